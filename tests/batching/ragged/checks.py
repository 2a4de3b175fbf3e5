"""What the tests of ragged batching share: the oracle is a Python loop over the elements."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchremat.batching import Pile, pile_axis
from torchremat.batching.ragged.run import Dense, as_pile, run_ragged

LENGTHS = (3, 0, 1, 4)


def pile_of(lengths: Sequence[int], *rest: int, seed: int = 0) -> Pile:
    """A pile of random matrices of these lengths."""
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, *rest, dtype=torch.float64, generator=draw) for n in lengths]
    return Pile.from_list(rows, dim=0)


def axes_of(values: Sequence[Any]) -> list[Any]:
    return [pile_axis if isinstance(v, Pile) else 0 for v in values]


def mapped(f: Callable[..., Any], *values: Any, axes: Any = None, **options: Any) -> Any:
    """`f` mapped over `values`: a pile or a batch."""
    size = next(
        len(v) for v, a in zip(values, axes or axes_of(values), strict=True) if a is not None
    )
    (out,) = run_ragged(
        lambda xs: [f(*xs)], list(values), axes or axes_of(values), size, owner=f, **options
    )
    if isinstance(out, Dense):
        tensor = torch.as_tensor(out.tensor)
        return tensor.expand(size, *tensor.shape) if out.dim is None else tensor.movedim(out.dim, 0)
    return as_pile(out, size)


def elements(value: Any, axis: Any, size: int) -> list[Any]:
    if isinstance(value, Pile):
        return value.to_list()
    return [value] * size if axis is None else list(value.unbind(axis))


def looped(f: Callable[..., Any], *values: Any, axes: Any = None) -> list[Tensor]:
    axes = axes or axes_of(values)
    size = next(len(v) for v, a in zip(values, axes, strict=True) if a is not None)
    columns = [elements(v, a, size) for v, a in zip(values, axes, strict=True)]
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of PyTorch have no second derivative
        return [torch.as_tensor(f(*row)) for row in zip(*columns, strict=True)]


def check(f: Callable[..., Any], *values: Any, axes: Any = None, loops: bool = False) -> None:
    """Values and gradients of `f` mapped over `values` are those of a loop."""
    leaves = [v.data if isinstance(v, Pile) else v for v in values]
    leaves = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
    with warnings.catch_warnings():
        if loops:
            warnings.simplefilter("ignore")
        result = mapped(f, *values, axes=axes)
    got = result.to_list() if isinstance(result, Pile) else list(result)
    want = looped(f, *values, axes=axes)
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-8, equal_nan=True)
    if not leaves or not want[0].requires_grad:
        return
    weights = [torch.randn_like(w) for w in want]
    ours = gradients(got, weights, leaves)
    theirs = gradients(want, weights, leaves)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, atol=1e-8, rtol=1e-7, equal_nan=True)


def gradients(
    outputs: Sequence[Tensor], weights: Sequence[Tensor], leaves: Sequence[Tensor]
) -> list[Tensor]:
    total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
