"""Which values share memory: views and their bases."""

import operator

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.codegen import is_identity

aten = torch.ops.aten

# They share memory with their input, though their schemas do not say so.
_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten._reshape_alias.default,
}


def is_view(node: fx.Node) -> bool:
    """Whether `node` computes nothing: its outputs lie in the memory of its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if is_identity(node) or node.target in _UNDECLARED_VIEWS:
        return True
    if not isinstance(node.target, _torch.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def changes_nothing(node: fx.Node) -> bool:
    """Whether `node` is a view of just what it is a view of, such as `x[:]`.

    PyTorch writes more of them where sizes are symbols.
    """
    if not is_view(node) or is_item(node):
        return False
    value, source = node.meta.get("val"), node.args[0]
    base = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(base, torch.Tensor):
        return False
    return value.dtype == base.dtype and _layout(value) == _layout(base)


def _layout(tensor: torch.Tensor) -> list[str]:
    """Sizes, strides and offset, in which symbols are compared by name: nothing is assumed."""
    return [str(n) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]


def base_of(node: fx.Node) -> fx.Node:
    """The value in whose memory `node` lies: itself, unless it is a view.

    With `t = transpose(w)` and `s = select(t, 0)`, the base of `s` is `w`.
    """
    while is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def is_item(node: fx.Node) -> bool:
    """Whether `node` takes one output of an operator that has several."""
    return node.op == "call_function" and node.target is operator.getitem


def call_of(node: fx.Node) -> fx.Node:
    """The call of an operator that computes the value `node`."""
    if is_item(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return node
