"""Operators that must not run a second time, or should not, and the reasons."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.nodes import (
    base_of,
    call_of,
    inner_graphs_of,
    is_checkpoint,
    is_forward,
    is_item,
    item_index,
    results_of,
)
from torchremat.graph.notes import device_kind_of
from torchremat.graph.ops import communicates, name_arguments, packet_name


def reason_not_replayable(node: fx.Node) -> str | None:
    """Why the operator that gives `node` must not run a second time; `None` if it may."""
    inside = body_value_of(node)
    if inside is not None and (reason := reason_not_replayable(inside)):
        return reason
    call = call_of(node)
    if not isinstance(call.target, _torch.OpOverload):
        if packet_name(call.target).startswith("higher_order.auto_functionalized"):
            return "it writes to its arguments"
        if not is_checkpoint(call) and any(map(_draws, inner_graphs_of(call))):
            return "random numbers are drawn inside it, which a replay would draw anew"
        return None
    if is_random(call.target) and not drops_nothing(call.target, call.args, call.kwargs):
        return "it draws random numbers, which a replay would draw anew"
    return None


def is_random(op: _torch.OpOverload) -> bool:
    """Whether `op` draws random numbers, as PyTorch declares it."""
    return torch.Tag.nondeterministic_seeded in op.tags


# They choose among values. If their inputs are recomputed with other rounding (a sum in another
# order, or by a compiler), the backward pass may choose others than the forward pass did.
_SELECTING = frozenset({
    "aten.topk", "aten.sort", "aten.argsort", "aten.msort", "aten.argmax", "aten.argmin",
    "aten.kthvalue", "aten.mode", "aten.nonzero", "aten.nonzero_static", "aten.bincount",
    "aten.histc", "aten.searchsorted", "aten.bucketize", "aten._unique2", "aten.unique_dim",
    "aten.unique_consecutive",
})  # fmt: skip
_SELECTING_BY_DIM = frozenset(
    {"aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.nanmedian.dim"}
)

# On a GPU they add with atomics, in an order that varies, so that a replay may round otherwise:
# https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
_ADDING_IN_ANY_ORDER = frozenset({
    "aten.index_add", "aten.scatter_add", "aten.scatter_reduce", "aten.scatter", "aten.put",
    "aten.index_reduce", "aten.index_put", "aten._index_put_impl", "aten.cumsum", "aten.bincount",
    "aten.histc", "aten.embedding_bag", "aten._embedding_bag", "aten._ctc_loss",
    "aten.segment_reduce", "aten.grid_sampler_2d_backward", "aten.nll_loss2d_forward",
})  # fmt: skip


# Numbers of results of which the kernel writes only a part: `log_alpha` has rows for the longest
# target, a workspace has what its library wants. Samples of all operators were run on a CPU with
# new memory filled, and without. Else only linalg_lstsq differed: by rounding, as two runs of its
# driver "gelsy" do anyway.
_WITH_GAPS = {"aten._ctc_loss": (1,), "aten.mkldnn_rnn_layer": (3,)}


def selects(op: object) -> bool:
    """Whether `op` chooses among values, so that other rounding may change its choice."""
    return packet_name(op) in _SELECTING or str(op) in _SELECTING_BY_DIM


def has_gaps(op: object, index: int) -> bool:
    """Whether a part of this result is whatever was in memory, so that no two runs agree.

    >>> has_gaps(torch.ops.aten._ctc_loss.default, 1), has_gaps(torch.ops.aten.sin.default, 0)
    (True, False)
    """
    return index in _WITH_GAPS.get(packet_name(op), ())


def reason_to_save(node: fx.Node) -> str | None:
    """Why the value of `node` should be saved rather than recomputed; `None` if nothing says so."""
    inside = body_value_of(node)
    if inside is not None:
        return reason_to_save(inside)
    call = call_of(node)
    value = node.meta.get("val")
    kind = device_kind_of(node, value) if isinstance(value, torch.Tensor) else None
    return reason_to_save_results(call.target, call.kwargs, kind)


def reason_to_save_results(
    op: object, kwargs: Mapping[str, object], device_kind: str | None
) -> str | None:
    """Why the results of a call of `op`, on a device of a kind, should not be recomputed."""
    if communicates(op, kwargs):
        return "it is a collective, for which the processes would communicate again"
    if selects(op):
        return "it selects among values, and a replay might select others"
    if (
        packet_name(op).removesuffix("_") in _ADDING_IN_ANY_ORDER
        and device_kind not in (None, "cpu")
        and not torch.are_deterministic_algorithms_enabled()
    ):
        return "it adds with atomics, in an order that varies"
    return None


def _draws(body: fx.GraphModule) -> bool:
    return any(reason_not_replayable(node) is not None for node in body.graph.nodes)


def drops_nothing(op: _torch.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator with a dropout probability has one of 0, and so draws nothing."""
    given = name_arguments(op, args, kwargs)
    return any(given.get(name) == 0.0 for name in ("dropout_p", "p"))


def draws_in_forward(node: fx.Node) -> bool:
    """Whether a call in the forward pass draws random numbers, in itself or in its body.

    Such a call runs even if nobody reads its result: later draws then equal those of plain PyTorch.
    """
    return (
        node.op == "call_function"
        and is_forward(node)
        and not is_item(node)
        and draws_anywhere(node)
    )


def draws_anywhere(node: fx.Node) -> bool:
    """Whether a call draws random numbers, in itself or in its body."""
    if reason_not_replayable(node) is not None:
        return True
    return any(
        draws_anywhere(inner)
        for graph in inner_graphs_of(node)
        for inner in graph.graph.nodes
        if inner.op == "call_function" and not is_item(inner)
    )


def body_value_of(node: fx.Node) -> fx.Node | None:
    """The value of a body that `node` is, a result of a call with the results of its body."""
    if not is_item(node):
        return None
    call = call_of(node)
    bodies = inner_graphs_of(call)
    if not bodies:
        return None
    results = results_of(bodies[0])
    if len(results) != len(call.meta["val"]):  # flex_attention's bodies change a score
        return None
    made = results[item_index(node)]
    if not isinstance(made, fx.Node):
        return None
    base = base_of(made)
    return base if base.op == "call_function" else None
