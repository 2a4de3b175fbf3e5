"""An axis is an int, negative ones counting from the end, or `not_mapped` (`None`)."""

from typing import Any

import torch
from torch import Tensor

from torchremat.errors import AxisError

not_mapped = None
"""The axis of a tensor that all examples share."""


def moveaxis(x: Tensor, src: int, dst: int) -> Tensor:
    """Move dimension `src` of `x` to `dst`: a view.

    Raises:
        AxisError: (a `ValueError`) if there is no such dimension.

    >>> import torch
    >>> moveaxis(torch.ones(2, 3, 4), 0, -1).shape
    torch.Size([3, 4, 2])
    """
    src, dst = canonical_axis(src, x.dim()), canonical_axis(dst, x.dim())
    return x if src == dst else x.movedim(src, dst)


def broadcast(x: Tensor | float | complex, sz: int, axis: int) -> Tensor:
    """Repeat a tensor or a number `sz` times along a new dimension `axis`: a view.

    Raises:
        AxisError: (a `ValueError`) if the result has no such dimension.

    >>> import torch
    >>> broadcast(torch.tensor([1., 2.]), 3, 1)
    tensor([[1., 1., 1.],
            [2., 2., 2.]])
    """
    x = torch.as_tensor(x)
    axis = canonical_axis(axis, x.dim() + 1)
    shape = list(x.shape)
    shape.insert(axis, sz)
    return x.unsqueeze(axis).expand(shape)


def bdim_at_front(x: Tensor, bdim: int | None, size: int) -> Tensor:
    """Move the mapped axis of `x` to the front; repeat `x` if it has none.

    >>> import torch
    >>> bdim_at_front(torch.ones(4, 2), 1, 2).shape, bdim_at_front(torch.ones(4), None, 2).shape
    (torch.Size([2, 4]), torch.Size([2, 4]))
    """
    return broadcast(x, size, 0) if bdim is None else moveaxis(x, bdim, 0)


def matchaxis(
    axis_name: Any, sz: int, src: int | None, dst: int | None, x: Tensor, sum_match: bool = False
) -> Tensor:
    """Move the mapped axis of `x` from `src` to `dst`.

    Args:
        axis_name: what the axis is called, for the error; `None` if it has no name.
        sz: the size of the axis.
        src: where it is in `x`; `None` if `x` does not vary.
        dst: where the result has it. An `x` that does not vary is repeated there.
        x: a tensor.
        sum_match: whether an `x` that varies is summed where `dst` is `None`.

    Raises:
        AxisError: (a `ValueError`) if `x` varies and `dst` is `None`, or out of range.

    >>> import torch
    >>> matchaxis(None, 3, 0, None, torch.arange(3.0), sum_match=True)
    tensor(3.)
    """
    if src is None:
        return x if dst is None else broadcast(x, sz, dst)
    if dst is not None:
        return moveaxis(x, src, dst)
    if sum_match:
        return x.sum(src)
    name = "" if axis_name is None else f" (axis_name={axis_name})"
    raise AxisError(
        f"vmap has mapped output{name} but out_axes is None. None says that all examples give the "
        "same value; give their axis in the output, or reduce over them: psum over a named "
        "axis, or sum_match=True for the sum."
    )


def canonical_axis(axis: int, rank: int) -> int:
    """Count `axis` of a tensor of `rank` dimensions from the front.

    >>> canonical_axis(-1, 3)
    2
    """
    if not -rank <= axis < rank:
        raise AxisError(f"axis {axis} is out of bounds for array of dimension {rank}")
    return axis % rank
