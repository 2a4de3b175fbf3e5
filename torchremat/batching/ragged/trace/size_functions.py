"""Functions of PyTorch that take a size as a number only, by others that take symbols."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchremat import _torch
from torchremat.core.source import current_source
from torchremat.errors import RaggedError

_GET, _SET = Tensor.__getitem__, Tensor.__setitem__


class SizeMode(TorchFunctionMode):
    """Replaces what takes a size `n` that differs: `x[n]`, `linspace(a, b, n)`, `F.linear`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _GET and _has_symbol(args[1]):
            part, rest = _select(*args)
            return part[rest] if rest else part
        if func is _SET and _has_symbol(args[1]):
            part, rest = _select(*args[:2])
            part[rest or ...] = args[2]
            return None
        if func is torch.linspace:
            return _space(*args, **kwargs)
        if func is F.linear and _torch.functorch_is_active():
            return _multiply_rows(*args, **kwargs)
        return func(*args, **kwargs)


def _has_symbol(index: Any) -> bool:
    return any(
        isinstance(i, torch.SymInt) for i in (index if isinstance(index, tuple) else (index,))
    )


def _select(x: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """`x` at the symbols in `index`, and the rest of `index`."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, Tensor | list | bool) for i in items):
        raise RaggedError(
            "an index is made of tensors and of a size that differs from element to element: index "
            "in two steps, x[n][index]"
        )
    taken = sum(i is not None and i is not ... for i in items)
    dim = 0
    places = []
    for item in items:
        if isinstance(item, torch.SymInt):
            places.append((dim, item))
        dim += x.dim() - taken if item is ... else item is not None
    for place, number in reversed(places):
        try:
            x = x.select(place, number)
        except _torch.DATA_DEPENDENT_ERRORS as error:
            raise RaggedError(
                f"the index {number}, at {current_source()}, counts from the end in some elements "
                "and not in others"
            ) from error
    return x, tuple(i for i in items if not isinstance(i, torch.SymInt))


def _space(start: Any, end: Any, steps: Any, **options: Any) -> Tensor:
    if not isinstance(steps, torch.SymInt):
        return torch.linspace(start, end, steps, **options)
    options.setdefault("dtype", torch.get_default_dtype())
    place: Tensor = torch.arange(steps, **options)  # type: ignore[call-overload]
    step = (end - start) / torch.sym_max(steps - 1, 1)
    from_end = end - step * (-1 - place + steps)
    half = torch.sym_max(steps // 2, 1)  # of one step it has the start
    return torch.where(place < half, start + step * place, from_end)


def _multiply_rows(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` by the operators that PyTorch makes of it under a level of torch.func.

    From PyTorch 2.15 on its own code, in C++, asks for the sizes of a contiguous input as numbers.
    """
    if bias is None or input.dim() < 3 or not any(isinstance(n, torch.SymInt) for n in input.shape):
        return F.linear(input, weight, bias)
    *lengths, width = input.shape
    rows = torch.addmm(bias, input.reshape(math.prod(lengths), width), weight.t())
    return rows.view(*lengths, rows.shape[1])
