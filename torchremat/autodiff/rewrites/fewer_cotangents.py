"""Take cotangents out of a joint graph, by symbolic zeros.

    outputs y, aux                   dx = dy * w + daux * u
    `daux` is zero                   dx = dy * w

A backward pass is linear in its cotangents. So an operator is zero where all of the cotangents'
part in its operands is, and a zero is added by nothing. That is what autograd does, which does not
run what no cotangent reaches; and no zero meets an infinity. JAX calls them symbolic zeros.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.rewrites.loss_gradient_op import loss_gradient
from torchremat.graph.notes import notes_of, set_notes
from torchremat.graph.slicing import erase_dead
from torchremat.graph.symbolic_sizes import literal_size

aten = torch.ops.aten


class NotLinearError(Exception):
    """A backward pass returns, or adds, what does not depend on a cotangent."""


def drop_cotangents(joint: Joint, wanted: Sequence[int], *, may_add_zeros: bool = True) -> Joint:
    """The joint graph of the same trace in which only the outputs `wanted` have a cotangent.

    Raises `NotLinearError` where zeros do not say what autograd would do: in a backward pass that
    a user wrote, which returns a constant. Unless `may_add_zeros`, also where an operator would
    read zeros: autograd has a shorter formula there, or none.
    """
    copy, _ = joint.copy()
    graph = copy.module.graph
    missing = {ct for i, ct in enumerate(copy.cotangents) if ct is not None and i not in wanted}
    given = {ct for ct in copy.cotangents if ct is not None}
    zeros = _Zeros(missing, given, may_add_zeros=may_add_zeros)
    for node in list(graph.nodes):
        if node.op == "call_function":
            zeros.visit(node)
    found = replace(
        copy,
        cotangents=tuple(None if ct in missing else ct for ct in copy.cotangents),
        gradients=tuple(map(zeros.result, copy.gradients)),
        parts=tuple((i, part) for i, v in copy.parts if (part := zeros.result(v)) is not None),
    )
    (end,) = graph.find_nodes(op="output")
    end.args = ((*found.outputs, *found.gradients, *(v for _, v in found.parts)),)
    erase_dead(graph, missing)
    return found


class _Zeros:
    """Knows the values that depend on a cotangent, and those of them that are zero."""

    def __init__(
        self, missing: set[fx.Node], cotangents: set[fx.Node], *, may_add_zeros: bool
    ) -> None:
        self._may_add_zeros = may_add_zeros
        self._zero = set(missing)
        self._linear = set(cotangents)
        self._stands_for: dict[fx.Node, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        linear = [n for n in node.all_input_nodes if n in self._linear]
        if not linear:
            return
        self._linear.add(node)
        self._refuse_affine(node)
        zeros = [n for n in linear if n in self._zero]
        if len(zeros) == len(linear):
            self._zero.add(node)
        elif zeros:
            self._drop(node, zeros)

    def result(self, gradient: Any) -> Any:
        """Return the value for a gradient: `None` for a zero."""
        if not isinstance(gradient, fx.Node) or gradient in self._zero:
            return None
        if gradient not in self._linear:
            raise NotLinearError
        return self._stands_for.get(gradient, gradient)

    def _refuse_affine(self, node: fx.Node) -> None:
        if node.target in _SUMS:
            terms = node.args[:2]
            if not all(isinstance(t, fx.Node) and t in self._linear for t in terms):
                raise NotLinearError
        if node.target is loss_gradient:  # of a gradient plus an addend: both zero or none
            terms = (node.args[0], node.args[7])
            live = {t in self._linear and t not in self._zero for t in terms if t is not None}
            if len(live) > 1:
                raise NotLinearError

    def _drop(self, node: fx.Node, zeros: Sequence[fx.Node]) -> None:
        if node.target is aten.add.Tensor and not node.kwargs:
            (other,) = (n for n in node.all_input_nodes if n not in zeros)
            if _is_alike(node, other):
                other = self._stands_for.get(other, other)
                self._stands_for[node] = other
                node.replace_all_uses_with(other)
                return
        if not self._may_add_zeros:
            raise NotLinearError
        for zero in zeros:
            node.replace_input_with(zero, _make_zeros(node, zero))


_SUMS = (aten.add.Tensor, aten.sub.Tensor)


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    a, b = node.meta.get("val"), other.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _make_zeros(before: fx.Node, zero: fx.Node) -> fx.Node:
    """The operator that makes the tensor `zero`, in front of its reader."""
    value = zero.meta["val"]
    shape = [literal_size(size) for size in value.shape]
    options = {"dtype": value.dtype, "device": value.device}
    with before.graph.inserting_before(before):
        made = before.graph.call_function(aten.zeros.default, (shape,), options)
    made.meta = dict(zero.meta)
    set_notes(made, notes_of(before))
    return made
