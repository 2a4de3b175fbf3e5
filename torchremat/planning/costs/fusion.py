"""Values that a compiler never writes to memory, as they live inside one kernel.

    a = exp(x)          in the kernel of b: never written
    b = sum(a * y)      a * y: in the kernel of sum; b is written
    c = cos(x)          written: mm reads it
    d = mm(c, w)

A value of a pointwise operator is computed where it is read if all that read it are pointwise or
reductions. Compilers do it so, within limits that are not modelled: sizes that do not match, too
many readers. A normalisation is pointwise when it runs again: means and variances are little, and
there.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.nodes import base_of, call_of, is_item, is_view
from torchremat.graph.ops import packet_name

# Those that PyTorch does not tag as pointwise, though each element is computed on its own.
_POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy", "clone", "copy", "where", "full", "full_like", "zeros", "zeros_like", "ones",
        "ones_like", "new_zeros", "new_ones", "new_full", "arange", "fill", "masked_fill", "tril",
        "triu", "cat", "stack", "constant_pad_nd", "flip", "roll", "repeat", "gather", "index",
        "index_select", "_unsafe_index", "embedding", "slice_backward", "select_backward",
        "slice_scatter", "select_scatter", "diagonal_scatter", "native_dropout", "rand", "randn",
        "rand_like", "randn_like", "bernoulli", "upsample_nearest2d", "hardswish_backward",
        "leaky_relu_backward", "hardtanh_backward", "elu_backward", "native_dropout_backward",
    )
)  # fmt: skip

_REDUCTIONS = frozenset(
    f"aten.{name}"
    for name in (
        "sum", "mean", "var", "var_mean", "std", "amax", "amin", "aminmax", "max", "min", "argmax",
        "argmin", "any", "all", "prod", "linalg_vector_norm", "logsumexp", "cumsum",
        "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward",
        "native_group_norm_backward", "native_batch_norm_backward", "cudnn_batch_norm_backward",
        "miopen_batch_norm_backward", "_fused_rms_norm_backward", "nll_loss_forward",
        "nll_loss_backward", "mse_loss",
    )
) | {"torchremat.loss_gradient"}  # fmt: skip

# Reductions to little, which are not done again, and of these and the input something pointwise;
# with the additions that this is for each element.
_NORMALISATIONS = {
    f"aten.{name}": count
    for count, names in {
        4: "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_functional cudnn_batch_norm _fused_rms_norm",
        8: "_softmax _log_softmax",
    }.items()
    for name in names.split()
} | {f"torchremat.functional_{library}_batch_norm": 4 for library in ("cudnn", "miopen")}


def is_written(node: fx.Node) -> bool:
    """Whether the outputs of the operator `node` are written to memory, by a compiler too."""
    if not _is_pointwise(node.target):
        return True
    found = False
    for consumer in _consumers(_find_normalised_input(node)):
        if consumer.op != "call_function" or not _fuses(consumer.target):
            return True
        found = True
    return not found


def flops_again(target: Any) -> int | None:
    """The additions of a normalisation for each element, given its statistics; else `None`."""
    return _NORMALISATIONS.get(packet_name(target))


def is_read_in_place(source: fx.Node) -> bool:
    """Whether whoever reads the value `source` computes it itself."""
    node = base_of(source)
    if is_item(node):
        node = call_of(node)
    return node.op == "call_function" and not is_written(node)


def _find_normalised_input(node: fx.Node) -> fx.Node:
    """The output of a normalisation that is as large as its input; of other nodes, the node."""
    if flops_again(node.target) is None:
        return node
    items = (user for user in node.users if is_item(user) and user.args[1] == 0)
    return next(items, node)


def _consumers(node: fx.Node) -> Iterator[fx.Node]:
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if is_item(user) or is_view(user):
            stack += user.users
        else:
            yield user


@cache
def _is_pointwise(target: Any) -> bool:
    if packet_name(target) in _POINTWISE or packet_name(target) in _NORMALISATIONS:
        return True
    return isinstance(target, _torch.OpOverload) and (
        torch.Tag.pointwise in target.tags and not _torch.schema_of(target).is_mutable
    )


@cache
def _fuses(target: Any) -> bool:
    return _is_pointwise(target) or packet_name(target) in _REDUCTIONS
