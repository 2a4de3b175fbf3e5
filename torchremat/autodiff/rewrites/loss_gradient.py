"""The rule of cross-entropy: its backward pass makes one tensor of the size of the logits.

    z = nll_loss_backward(g, logp, t, w, 1, -100, n)
    s = add(smooth, z)                                   with label smoothing
    dx = _log_softmax_backward_data(s, logp, 1, f32)     ->  dx = loss_gradient(g, logp, t, ..., 1)

Beside `logp`, at most two such tensors were alive at once, and three with weights and label
smoothing. The operator has the proof.
"""

from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.rewrites.loss_gradient_op import DEVICES, loss_gradient
from torchremat.graph.nodes import is_forward

aten = torch.ops.aten

_LOSSES = {aten.nll_loss_backward.default: 2, aten.nll_loss2d_backward.default: 4}
"""The dims of the scores, which tell the operators apart."""

LEAST_NBYTES = 1 << 20
"""Of smaller gradients the call of an operator in Python costs more than the memory is worth."""


def merge_loss_gradients(graph: fx.Graph) -> None:
    """Let one operator make each gradient of cross-entropy in the backward pass of `graph`."""
    for node in graph.find_nodes(
        op="call_function", target=aten._log_softmax_backward_data.default
    ):
        if not is_forward(node):
            _merge(node)


def _merge(node: fx.Node) -> None:
    slope: Any
    slope, log_probs, dim, dtype = node.args
    value = node.meta["val"]
    if dtype != value.dtype or not _is_worth_it(value):
        return
    chain: list[fx.Node] = [slope]
    addend = None
    if _is_sum(slope):
        addend, slope = slope.args  # in this order: of two NaNs, a sum may give the first
        chain.append(slope)
    if not _is_alike(slope, value):  # else the sum has more dims
        return
    if slope.target is aten.view.default:
        slope = slope.args[0]
        chain.append(slope)
    if not all(map(_is_read_once, chain)) or not _is_loss(slope):
        return
    node.target = loss_gradient
    node.args = (*slope.args, addend, log_probs, dim)
    for link in chain:
        node.graph.erase_node(link)


def _is_worth_it(value: Any) -> bool:
    """Whether the rule knows the kernels and saves a megabyte; of symbols, by the sizes traced."""
    if not _torch.is_fake(value) or value.device.type not in DEVICES:
        return False
    return bool(_torch.hint_of(value.numel()) * value.element_size() >= LEAST_NBYTES)


def _is_loss(node: Any) -> bool:
    return node.target in _LOSSES and node.args[1].meta["val"].dim() == _LOSSES[node.target]


def _is_read_once(node: fx.Node) -> bool:
    return not is_forward(node) and len(node.users) == 1


def _is_sum(node: Any) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    return all(isinstance(a, fx.Node) for a in node.args)


def _is_alike(node: fx.Node, value: Tensor) -> bool:
    """Whether `node` has the dtype and shape of `value`, for all values of the symbols."""
    found = node.meta["val"]
    return bool(found.dtype == value.dtype) and [*map(str, found.shape)] == [*map(str, value.shape)]
