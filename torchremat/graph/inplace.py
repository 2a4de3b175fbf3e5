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
from torchremat.graph.notes import note

aten = torch.ops.aten


def is_mutable(node: fx.Node) -> bool:
    """Whether the operator of `node` writes to an argument."""
    target = node.target
    return isinstance(target, _torch.OpOverload) and _torch.schema_of(target).is_mutable


def functionalize_unaliased_writes(graph: fx.Graph) -> None:
    """Give writes a result of their own where nobody else sees the memory written to."""
    for node in list(graph.nodes):
        functional = _functional_form(node) if is_mutable(node) else None
        value = None if functional is None else _value_of(node, functional)
        if value is None:
            continue
        written: Any = node.args[0].meta["val"]
        has_layout = value.stride() == written.stride()
        if not has_layout and not _is_dense(written):
            continue  # a copy would have the gaps of the view that is written to
        restride = None if has_layout else find_restride(value, written)
        if _is_unaliased(node) and (has_layout or restride):
            _replace(node, functional, restride)
        elif not has_layout:
            _write_by_copy(node, functional, value)


def _functional_form(node: fx.Node) -> Any:
    if node.target is aten.bernoulli_.float:  # whose probability has a default
        return aten.bernoulli.p if len(node.args) == 2 or "p" in node.kwargs else None
    target: Any = node.target
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None  # a list of tensors is written to
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


def _value_of(node: fx.Node, functional: Any) -> Tensor | None:
    """The fake result of `functional`, if it is the written tensor in all but its strides."""
    written: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    if functional is aten.bernoulli.p and not written.is_contiguous():
        return None  # it fills by index, the other in the order of memory
    mode = written.fake_mode
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    with _torch.isolate(), mode:
        value = functional(*args, **{k: v for k, v in kwargs.items() if k != "generator"})
    is_alike = (
        isinstance(value, Tensor)
        and value.dtype == written.dtype
        and value.shape == written.shape
        and value.storage_offset() == written.storage_offset()
    )
    return value if is_alike else None


def _is_dense(tensor: Tensor) -> bool:
    num_before: Any = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride != num_before:
            return False
        num_before = num_before * size
    return True


Step = tuple[Any, tuple[Any, ...], dict[str, Any], Tensor]
"""An operator with the arguments after its first, its keywords and its fake value."""


def find_restride(value: Tensor, like: Tensor) -> list[Step] | None:
    """Operators that lay fake `value` out as `like`, which has its shape; `None` if none do.

    strides of (1, 4):    p = permute(x, [1, 0]);  c = clone(p);  permute(c, [1, 0])
    """
    order = sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True)
    back = [order.index(i) for i in range(like.dim())]
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (aten.permute.default, (back,), {}),
    ]
    steps: list[Step] = []
    with _torch.isolate(), like.fake_mode:  # type: ignore[attr-defined]
        for op, args, kwargs in calls:
            value = op(value, *args, **kwargs)
            steps.append((op, args, kwargs, value))
    return steps if value.stride() == like.stride() else None


def _replace(node: fx.Node, functional: Any, restride: list[Step] | None) -> None:
    target = node.args[0]
    assert isinstance(target, fx.Node)
    new = _insert(node, functional, node.args, node.kwargs, node.meta["val"])
    note(new, written_by=node.target)
    for op, args, kwargs, value in restride or ():
        new = _insert(node, op, (new, *args), kwargs, value)
    node.replace_all_uses_with(new)
    after = False
    for later in node.graph.nodes:
        after = after or later is node
        if after and later is not node and target in later.all_input_nodes:
            later.replace_input_with(target, new)
    node.graph.erase_node(node)


def _write_by_copy(node: fx.Node, functional: Any, value: Tensor) -> None:
    """Compute the values aside: `copy_`, unlike other operators, keeps strides in either form."""
    new = _insert(node, functional, node.args, node.kwargs, value)
    note(new, written_by=node.target)
    write = _insert(node, aten.copy_.default, (node.args[0], new), {}, node.meta["val"])
    node.replace_all_uses_with(write)
    node.graph.erase_node(node)


def _insert(node: fx.Node, op: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
    """Call `op` before `node`, with its notes."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(op, args, kwargs)
    new.meta = dict(node.meta, val=value)
    return new
