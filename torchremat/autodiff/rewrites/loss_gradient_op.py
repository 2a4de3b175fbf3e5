"""The gradient of a cross-entropy by its logits, as one operator that makes one large tensor.

    z = nll_loss_backward(g, logp, ...)                  zero, but for one entry of each row
    z = z + addend                                       of label smoothing
    dx = z - exp(logp) * sum of z by rows                _log_softmax_backward_data

Three operators make three tensors as large as the logits. This one runs the same kernels and lets
each write where the one before it wrote. Proof that the bits are equal:

- The sum is elementwise.
- The kernels of `_log_softmax_backward_data` for CPU and CUDA read a row to its end for the sum,
  and only then write. Where the classes are not the last dim, they do so with a column. The thread
  that writes an entry has read that entry, and no other thread reads it then.
- A row has the same place in its memory as before, on which the order of the sum depends.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch

aten = torch.ops.aten

DEVICES = frozenset({"cpu", "cuda"})
"""Where the kernels are known to read before they write."""

_library = torch.library.Library("torchremat", "FRAGMENT")


def _loss_operator(scores_dim: int) -> Any:
    packet = aten.nll_loss2d_backward if scores_dim == 4 else aten.nll_loss_backward
    return packet.default


def run_plain(*args: Any) -> Tensor:
    """Run the operators of the function that was traced: they have derivatives and batches."""
    *loss, addend, log_probs, dim = args
    slope = _loss_operator(loss[1].dim())(*loss).view(log_probs.shape)
    if addend is not None:
        slope = aten.add.Tensor(addend, slope)
    result: Tensor = aten._log_softmax_backward_data.default(slope, log_probs, dim, slope.dtype)
    return result


def _run(*args: Any) -> Tensor:
    *loss, addend, log_probs, dim = args
    slope: Tensor = _loss_operator(loss[1].dim())(*loss)
    if slope.device.type not in DEVICES or not slope.is_contiguous():
        del slope
        return run_plain(*args)
    slope = slope.view(log_probs.shape)
    if addend is not None:
        torch.add(addend, slope, out=slope)
    aten._log_softmax_backward_data.out(slope, log_probs, dim, slope.dtype, out=slope)
    return slope


def _run_autograd(*args: Any) -> Tensor:
    tensors = [a for a in args if isinstance(a, Tensor)]
    is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if is_recorded or _torch.in_dual_level() or _torch.functorch_is_active():
        return run_plain(*args)
    with _torch.below_autograd():
        result: Tensor = loss_gradient(*args)
    return result


_library.define(
    "loss_gradient(Tensor grad, Tensor scores, Tensor target, Tensor? weight, int reduction, "
    "SymInt ignore_index, Tensor total_weight, Tensor? addend, Tensor log_probs, int dim) -> Tensor"
)
_library.impl("loss_gradient", _run, "CompositeExplicitAutograd")
_library.impl("loss_gradient", run_plain, "Meta")
_library.impl("loss_gradient", run_plain, "FuncTorchBatched")
_library.impl("loss_gradient", _run_autograd, "Autograd")
loss_gradient = torch.ops.torchremat.loss_gradient.default


def write_plain(graph: fx.Graph, args: Sequence[Any], shape: Sequence[int]) -> fx.Node:
    """Write the operators that the operator stands for, for a result of `shape`, at the end.

    It is for compilers that fuse them.
    """
    *loss, addend, log_probs, dim = args
    scores: torch.Tensor = loss[1].meta["val"]
    slope = graph.call_function(_loss_operator(scores.dim()), tuple(loss))
    slope = graph.call_function(aten.view.default, (slope, list(shape)))
    if addend is not None:
        slope = graph.call_function(aten.add.Tensor, (addend, slope))
    given = (slope, log_probs, dim, scores.dtype)
    return graph.call_function(aten._log_softmax_backward_data.default, given)
