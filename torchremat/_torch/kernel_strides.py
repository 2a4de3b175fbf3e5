"""The strides that kernels give their results, where PyTorch's rules for fake tensors give others.

    BatchNorm1d(x.transpose(1, 2)): the kernel's result is contiguous, the rule's is transposed

A graph with the rule's strides would hold views that the real tensors do not have: an error at the
first call, or a write that plain PyTorch does to a copy. The tables were made, and are tested, by
running each operator's samples with their dimensions in other orders, forward and backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_Rule = Callable[..., Tensor]
"""Makes an empty tensor with the strides of the result, from the operator's arguments."""


def _contiguous(result: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _in_format_of(position: int) -> _Rule:
    """Channels come last as in the argument at `position`, or else the result is contiguous."""

    def make(result: Tensor, *args: Any) -> Tensor:
        return torch.empty_like(result, memory_format=_find_memory_format(args[position]))

    return make


def _in_format_of_volume(position: int) -> _Rule:
    """As `_in_format_of`, of a volume with channels that may stand for a batch of one."""

    def make(result: Tensor, *args: Any) -> Tensor:
        volume = args[position]
        if volume.dim() != 4:
            return torch.empty_like(result, memory_format=_find_memory_format(volume))
        is_last = volume.unsqueeze(0).is_contiguous(memory_format=torch.channels_last_3d)
        layout = torch.channels_last_3d if is_last else torch.contiguous_format
        return torch.empty_like(result.unsqueeze(0), memory_format=layout).squeeze(0)

    return make


def _as_sum(result: Tensor, a: Any, b: Any, *_: Any) -> Tensor:
    """As the operators that PyTorch iterates over elements for."""
    return torch.empty_like(torch.add(a, b), dtype=result.dtype)


_OF_INPUT, _OF_SECOND = _in_format_of(0), _in_format_of(1)

# most rules are of the first result: the others are of a few numbers, or have the rule's strides
_RULES: dict[Any, tuple[_Rule, ...]] = {
    **dict.fromkeys(
        (
            aten._batch_norm_with_update.default,
            aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
            aten.native_batch_norm.default,
            aten.channel_shuffle.default,
            aten.reflection_pad3d.default,
            aten.replication_pad3d.default,
        ),
        (_OF_INPUT,),
    ),
    **dict.fromkeys(
        (
            aten.batch_norm_backward.default,
            aten.native_batch_norm_backward.default,
            aten.reflection_pad2d_backward.default,
            aten.reflection_pad3d_backward.default,
            aten.replication_pad2d_backward.default,
            aten.replication_pad3d_backward.default,
        ),
        (_OF_SECOND,),
    ),
    **dict.fromkeys(
        (
            aten._log_softmax_backward_data.default,
            aten.glu_backward.default,
            aten.huber_loss_backward.default,
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.nll_loss2d_forward.default,
        ),
        (_contiguous,),
    ),
    aten.max_pool3d_with_indices.default: (_in_format_of_volume(0), _in_format_of_volume(0)),
    aten.max_pool3d_with_indices_backward.default: (_in_format_of_volume(1),),
    aten.log_sigmoid_forward.default: (_contiguous, _contiguous),
    aten.native_layer_norm_backward.default: (_contiguous, _contiguous),
    **dict.fromkeys(
        (
            aten.copysign.Tensor,
            aten.div.Tensor_mode,
            aten.floor_divide.default,
            aten.heaviside.default,
            aten.logaddexp.default,
            aten.logical_and.default,
            aten.logical_or.default,
            aten.logical_xor.default,
            aten.special_xlog1py.default,
            aten.xlogy.Tensor,
        ),
        (_as_sum,),
    ),
}


def has_other_strides(func: Any) -> bool:
    """Whether the rule of this operator may give strides that its kernel does not."""
    return func in _RULES


def lay_out_as_kernel(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The fake `result` of `func`, of which `has_other_strides` is true, as its kernel lays it out.

    It must run under the mode of the fake tensors.
    """
    is_one = isinstance(result, Tensor)
    results = [result] if is_one else list(result)
    for i, make in enumerate(_RULES[func]):
        if isinstance(results[i], Tensor):  # no gradient is made that nobody needs
            made = make(results[i], *args)
            if made.stride() != results[i].stride():
                results[i] = made
    return results[0] if is_one else tuple(results)


def _find_memory_format(tensor: Tensor) -> torch.memory_format:
    """The format that kernels allocate for: `suggest_memory_format` of PyTorch's C++, in Python."""
    if tensor.dim() == 4 and _has_channels_last(tensor, (1, 3, 2, 0)):
        return torch.channels_last
    if tensor.dim() == 5 and _has_channels_last(tensor, (1, 4, 3, 2, 0)):
        return torch.channels_last_3d
    return torch.contiguous_format


def _has_channels_last(tensor: Tensor, order: tuple[int, ...]) -> bool:
    sizes, strides = tensor.shape, tensor.stride()
    if strides[1] == 0:
        return False
    least = 0
    for dim in order:
        if sizes[dim] == 0 or strides[dim] < least:
            return False
        if dim == 0 and least == strides[1]:
            return False  # sizes of 1 fit either format
        least = strides[dim] * sizes[dim] if sizes[dim] > 1 else strides[dim]
    return True
