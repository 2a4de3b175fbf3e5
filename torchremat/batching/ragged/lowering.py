"""Which operators of the graph of an element are broken up into others, that have rules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.batching.ragged.calls import RULES

aten = torch.ops.aten


def decomposition(op: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """PyTorch's own way to say `op` with others, if some size among `args` is a symbol and no rule
    is there for it.
    """
    if not isinstance(op, _torch.OpOverload) or not _has_symbols(args):
        return None
    name = str(op.overloadpacket)
    if op is aten.native_layer_norm_backward.default:
        return layer_norm_backward
    has_rule = name in RULES or torch.Tag.pointwise in op.tags
    if op is aten.native_layer_norm.default:  # over dims whose size differs there is none
        has_rule = not _has_symbols(args[1])
    return None if has_rule else _torch.decomposition_table().get(op)


def layer_norm_backward(
    cotangent: Tensor,
    x: Tensor,
    shape: list[Any],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """The derivative of `native_layer_norm`, in operators whose derivative is its second one.

    As operators see it, `mean` and `rstd` do not depend on x: so they are computed again.

        n = (x - mean) * rstd;  dn = dy * weight
        dx = rstd * (dn - mean(dn) - n * mean(dn * n));  dweight = sum(dy * n);  dbias = sum(dy)
    """
    inner = list(range(x.dim() - len(shape), x.dim()))
    outer = list(range(x.dim() - len(shape)))
    center = x.mean(inner, keepdim=True)
    variance = ((x - center) ** 2).mean(inner, keepdim=True)
    epsilon = (rstd.detach() ** -2 - variance.detach()).detach()
    scale = (variance + epsilon).rsqrt()
    normal = (x - center) * scale
    inside = cotangent if weight is None else cotangent * weight
    found: list[Tensor | None] = [None, None, None]
    if wanted[0]:
        slope = (inside * normal).mean(inner, keepdim=True)
        found[0] = scale * (inside - inside.mean(inner, keepdim=True) - normal * slope)
    if wanted[1]:
        product = cotangent * normal
        found[1] = product.sum(outer) if outer else product
    if wanted[2]:
        found[2] = cotangent.sum(outer) if outer else cotangent
    return tuple(found)


def _has_symbols(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    if isinstance(value, tuple | list):
        return any(map(_has_symbols, value))
    return isinstance(value, torch.SymInt)
