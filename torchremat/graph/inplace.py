"""In-place operators on tensors without views become the operators that return a new tensor.

    m = empty_like(x);  b = bernoulli_(m, 0.9);  d = div_(b, 0.9)
    m = empty_like(x);  b = bernoulli(m, 0.9);   d = div(b, 0.9)

Most writes are such (dropout, `relu_`). A graph with no others need not be traced a second time.
"""

from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.nodes import is_view

aten = torch.ops.aten


def is_mutable(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, _torch.OpOverload) and _torch.schema_of(target).is_mutable


def functionalize_unaliased_writes(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        functional = _functional_form(node) if is_mutable(node) else None
        if functional is not None and _is_unaliased(node) and _has_same_layout(node, functional):
            _replace(node, functional)


def _functional_form(node: fx.Node) -> Any:
    if node.target is aten.bernoulli_.float:  # whose probability has a default
        return aten.bernoulli.p if len(node.args) == 2 or "p" in node.kwargs else None
    target: Any = node.target
    name = _torch.schema_of(target).name.removeprefix("aten::")
    written = [i for i, a in enumerate(_torch.schema_arguments(target)) if _is_written(a)]
    if not name.endswith("_") or name.endswith("__") or written != [0] or node.target in _NOT_ALIKE:
        return None
    packet = getattr(aten, name[:-1], None)
    overloads = () if packet is None else (getattr(packet, o) for o in packet.overloads())
    wanted = _parameters(target)
    return next((overload for overload in overloads if _parameters(overload) == wanted), None)


def _parameters(op: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in _torch.schema_arguments(op)]


# They change the storage or the shape of their argument, not only its values.
_NOT_ALIKE = {aten.set_.source_Tensor, aten.resize_.default}


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_unaliased(node: fx.Node) -> bool:
    target = node.args[0]
    if not isinstance(target, fx.Node) or target.op != "call_function":
        return False
    if not isinstance(target.target, _torch.OpOverload) or is_mutable(target) or is_view(target):
        return False
    return not any(is_view(user) for user in target.users)


def _has_same_layout(node: fx.Node, functional: Any) -> bool:
    written: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    if functional is aten.bernoulli.p and not written.is_contiguous():
        return False  # it fills by index, the other in the order of memory
    mode = written.fake_mode
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    with _torch.isolate(), mode:
        value = functional(*args, **{k: v for k, v in kwargs.items() if k != "generator"})
    return (
        isinstance(value, Tensor)
        and value.dtype == written.dtype
        and value.shape == written.shape
        and value.stride() == written.stride()
        and value.storage_offset() == written.storage_offset()
    )


def _replace(node: fx.Node, functional: Any) -> None:
    target = node.args[0]
    assert isinstance(target, fx.Node)
    with node.graph.inserting_before(node):
        new = node.graph.call_function(functional, node.args, node.kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    after = False
    for later in node.graph.nodes:
        after = after or later is node
        if after and later is not node and target in later.all_input_nodes:
            later.replace_input_with(target, new)
    node.graph.erase_node(node)
