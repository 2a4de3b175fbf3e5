from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchremat.batching.axis_positions import canonical_axis
from torchremat.batching.vmap import vmap
from torchremat.errors import AxisError, AxisTypeError


def vtile(
    f_flat: Callable[..., Any],
    in_axes_flat: Sequence[int | None],
    out_axes_flat: Sequence[int | None],
    tile_size: int | None,
    axis_name: Any = None,
) -> Callable[..., Any]:
    """Cut an axis of `tile_size * n` into `tile_size` tiles of `n`, and map over the tiles.

    Args:
        f_flat: a function of tensors that returns a list or tuple of tensors; it sees one tile.
        in_axes_flat: the axis to cut in each argument; `None` for what all tiles share.
        out_axes_flat: the axis of each output along which its tiles are concatenated; `None` for
            an output that is the same for all tiles.
        tile_size: the number of tiles, which divides the axis. `None`: as many as the axis is long,
            so that a tile has a size of 1.
        axis_name: what collectives in `f_flat` call the axis of tiles.

    Returns:
        A function of the whole tensors, which gives a list.

    Raises:
        AxisError: (a `ValueError`) at the call, if an axis is missing or cannot be divided evenly,
            or no argument is cut. Also if an output that varies has `None` in `out_axes_flat`.

    After `jax.interpreters.batching.vtile`.

    >>> import torch
    >>> sums = vtile(lambda x: [x.sum(0, keepdim=True)], [0], [0], 3)
    >>> sums(torch.arange(6.0))
    [tensor([1., 5., 9.])]
    """

    def map_tiles(*args: Tensor) -> list[Tensor]:
        if len(args) != len(in_axes_flat):
            raise AxisError(
                f"vtile was given {len(in_axes_flat)} in_axes, but the function was called with "
                f"{len(args)} arguments"
            )
        if all(axis is None for axis in in_axes_flat):
            raise AxisError("vtile must have an argument that is cut: No mapped arguments?")
        cut = [_cut(x, a, tile_size) for x, a in zip(args, in_axes_flat, strict=True)]
        axes = [_axis_of(x, a) for x, a in zip(args, in_axes_flat, strict=True)]
        in_front = [None if a is None else 0 for a in out_axes_flat]
        mapped = vmap(_as_list, (None, None, *axes), in_front, axis_name)
        outputs = mapped(f_flat, len(out_axes_flat), *cut)
        return [_join_tiles(y, a) for y, a in zip(outputs, out_axes_flat, strict=True)]

    return map_tiles


def _as_list(f_flat: Callable[..., Any], num_outputs: int, *tiles: Tensor) -> list[Any]:
    outputs = f_flat(*tiles)
    if not isinstance(outputs, list | tuple):
        raise AxisTypeError(
            f"vtile takes a function that returns a list or tuple of tensors, but it returned a "
            f"{type(outputs).__name__}"
        )
    if len(outputs) != num_outputs:
        raise AxisError(
            f"vtile was given {num_outputs} out_axes, but the function returns {len(outputs)} "
            "outputs"
        )
    return list(outputs)


def _axis_of(x: Tensor, axis: int | None) -> int | None:
    return None if axis is None else canonical_axis(axis, x.dim())


def _cut(x: Tensor, axis: int | None, num_tiles: int | None) -> Tensor:
    if axis is None:
        return x
    axis = canonical_axis(axis, x.dim())
    size = x.shape[axis]
    count = size if num_tiles is None else num_tiles
    if count < 1 or size % count:
        raise AxisError(
            f"Cannot divide evenly: vtile cuts axis {axis} of a tensor of shape {tuple(x.shape)}, "
            f"of size {size}, into {count} tiles"
        )
    return x.unflatten(axis, (count, size // count))  # type: ignore[no-any-return]


def _join_tiles(y: Tensor, axis: int | None) -> Tensor:
    if axis is None:
        return y
    axis = canonical_axis(axis, y.dim() - 1)
    return y.movedim(0, axis).flatten(axis, axis + 1)
