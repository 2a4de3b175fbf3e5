"""Scaled-dot-product attention over elements of different lengths, as one operator.

PyTorch writes it into a graph as its parts, with a matrix of scores that is quadratic in the
length. So the graph of an element has one operator for it, which kernels for concatenated data
serve.
"""

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchremat import _torch
from torchremat.batching.ragged.layouts.layouts import Packed, Value, fill_beyond_ends, pad
from torchremat.batching.ragged.rules.op_call import RULES, RaggedCall, as_padded
from torchremat.kernels.attention.ragged_attention import ragged_attention


def _scale_of(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _compute_weights(q: Tensor, k: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    scores = (q @ k.mT) * _scale_of(q, scale)
    if is_causal:
        scores = scores.masked_fill(~_make_lower_triangle(scores), -torch.inf)
    return scores.softmax(-1)


def _run(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale).contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


class _ElementAttention(torch.autograd.Function):
    """Differentiated in the graph of an element it is its parts, whose derivatives have rules.

    p = softmax(scale * q k^T);  dv = p^T dy;  dp = dy v^T;  ds = p * (dp - sum(dp * p)) * scale
    """

    @staticmethod
    def forward(run: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        return run(q, k, v, *options)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, q, k, v, *ctx.options = inputs
        ctx.save_for_backward(q, k, v)
        ctx.save_for_forward(q, k, v)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        weights = _compute_weights(q, k, *ctx.options)
        slopes = cotangent @ v.mT
        slopes = weights * (slopes - (slopes * weights).sum(-1, keepdim=True))
        slopes = slopes * _scale_of(q, ctx.options[1])
        return None, slopes @ k, slopes.mT @ q, weights.mT @ cotangent, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, dq: Tensor, dk: Tensor, dv: Tensor, *__: None) -> Tensor:
        q, k, v = ctx.saved_tensors
        weights = _compute_weights(q, k, *ctx.options)
        zero = torch.zeros_like
        dq, dk, dv = (zero(p) if t is None else t for p, t in ((q, dq), (k, dk), (v, dv)))
        slopes = (dq @ k.mT + q @ dk.mT) * _scale_of(q, ctx.options[1])
        slopes = weights * (slopes - (slopes * weights).sum(-1, keepdim=True))
        tangent: Tensor = slopes @ v + weights @ dv
        return tangent


def _batch_attention(
    info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, int]:
    tensors = [
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((q, k, v), in_dims[:3], strict=True)
    ]
    return attention(*tensors, is_causal, scale), 0


_definition = torch.library.custom_op("torchremat::attention", _run, mutates_args=())
_definition.register_fake(_fake)
_definition.register_vmap(_batch_attention)
attention = torch.ops.torchremat.attention.default
_torch.register_function(attention, _ElementAttention)


class AttentionMode(TorchFunctionMode):
    """With dropout or a mask, which says more than lengths do, the parts are traced as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            func = _call_with(_attend, func)
        return func(*args, **kwargs)


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    found = _attend_within_lengths(*args, **kwargs)
    return F.scaled_dot_product_attention(*args, **kwargs) if found is None else found


def _call_with(attend: Callable[..., Tensor], function: Any) -> FunctionType:
    """PyTorch disables a mode while it handles a function: no mode sees the attention inside.

    The copy also finds itself by its name, which it passes to the modes below.
    """
    names = {**function.__globals__, "scaled_dot_product_attention": attend}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    names[function.__name__] = copy
    return copy


def _attend_within_lengths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    tensors = (query, key, value)
    symbolic = any(isinstance(t.shape[-2], torch.SymInt) for t in tensors if t.dim() > 1)
    leading = {tuple(t.shape[:-2]) for t in tensors}
    if not symbolic or attn_mask is not None or dropout_p or enable_gqa or len(leading) > 1:
        return None
    return attention(query, key, value, is_causal, scale)  # type: ignore[no-any-return]


def _attention(call: RaggedCall) -> Any:
    q, k, v = call.args[:3]
    is_causal, scale = call.bound["is_causal"], call.bound["scale"]
    along = [isinstance(x, Packed) and x.dim == x.rank - 2 for x in (q, k, v)]
    if not all(along) or k.extent is not v.extent:
        return _on_padded(call, q, k, v)
    queries, keys, values = (
        x.data.flatten(0, -3).movedim(-2, 0) if x.rank > 2 else x.data[:, None] for x in (q, k, v)
    )
    ends = q.extent.offsets, None if k.extent is q.extent else k.extent.offsets
    out = ragged_attention(queries, keys, values, *ends, is_causal=is_causal, scale=scale)
    data = out.movedim(0, -2).reshape(*q.data.shape[:-1], v.data.shape[-1])
    return Packed(data, q.dim, q.extent)


def _on_padded(call: RaggedCall, q: Value, k: Value, v: Value) -> Value:
    """Through all scores, as any operators: for a kernel the sizes must differ along the length."""
    size = call.batch.axis_size
    of_k = pad(k, size)
    queries, keys = pad(q, size).data, of_k.data
    values = fill_beyond_ends(pad(v, size), [v.rank - 2], 0)
    is_causal, scale = call.bound["is_causal"], call.bound["scale"]
    scores = (queries @ keys.mT) * _scale_of(queries, scale)
    least = torch.finfo(scores.dtype).min
    extent = of_k.extents[-2]
    if extent is not None:
        shape = [size, *[1] * (k.rank - 1), -1]
        scores = scores.masked_fill(~extent.is_valid.view(shape), least)
    if is_causal:
        scores = scores.masked_fill(~_make_lower_triangle(scores), -torch.inf)
    data = scores.softmax(-1) @ values
    return as_padded(data, call.sizes_of(call.result))


def _make_lower_triangle(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()


RULES["torchremat.attention"] = _attention
