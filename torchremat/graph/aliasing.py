"""Memory that values share: layouts of nodes and fake tensors, and overlaps of two tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.nodes import is_item, is_view


def changes_nothing(node: fx.Node) -> bool:
    """PyTorch traces such views, `x[:]` for one, mostly where sizes are symbols."""
    source = node.args[0] if is_view(node) and not is_item(node) else None
    return isinstance(source, fx.Node) and lies_alike(node, source)


def before_identities(node: fx.Node) -> fx.Node:
    """The value of which `node` is a view that changes nothing, or a view of such; else `node`."""
    while changes_nothing(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def lies_alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether the values of two nodes have one dtype and layout."""
    return tensors_lie_alike(a.meta.get("val"), b.meta.get("val"))


def tensors_lie_alike(value: Any, other: Any) -> bool:
    """Whether two tensors have one dtype and layout; what is not a tensor is like none."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return value.dtype == other.dtype and _layout(value) == _layout(other)


def _layout(tensor: torch.Tensor) -> list[str]:
    """Symbols are compared by name: nothing is assumed of their values."""
    return [str(n) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]


def spread(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy if numbers of it share memory: PyTorch can give it no tangent then."""
    layout = zip(tensor.shape, tensor.stride(), strict=True)
    if any(stride == 0 and size > 1 for size, stride in layout):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def view_in(base: Tensor, value: Tensor) -> Tensor:
    """`value` as a view of `base` if it lies in its storage: a write to one counts for both."""
    storage = _storage_of(value)
    if storage is None or storage != _storage_of(base) or _torch.is_view(value):
        return value
    if (value.is_conj(), value.is_neg()) != (base.is_conj(), base.is_neg()):
        return value  # PyTorch's operators made it: no compiled kernel sets these bits
    whole = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0)
    whole = whole if whole.dtype == value.dtype else whole.view(value.dtype)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def overlapping_pair(tensors: Sequence[Any], written: Sequence[int]) -> tuple[int, int] | None:
    """The positions of one of `written` and of another of `tensors` whose memory overlaps."""
    in_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        storage = _storage_of(tensor)
        if storage is not None:
            in_storage.setdefault(storage, []).append(i)
    for i in written:
        storage = _storage_of(tensors[i])
        for j in () if storage is None else in_storage[storage]:
            if i != j and _overlap(tensors[i], tensors[j]):
                return i, j
    return None


def _storage_of(tensor: Any) -> int | None:
    if not isinstance(tensor, Tensor):
        return None
    try:
        return _torch.storage_id(_torch.innermost_tensor(tensor))
    except NotImplementedError:  # a tensor without storage
        return None


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors in one storage have a byte in common.

    Their elements lie at offset + i_0 * stride_0 + i_1 * stride_1 + ...: is there a solution? The
    caches `kv[:, 0]` and `kv[:, 1]` are interleaved, and have none.
    """
    a, b = _torch.innermost_tensor(a), _torch.innermost_tensor(b)
    if a.numel() == 0 or b.numel() == 0:
        return False
    ranges: dict[int, list[int]] = {}
    for tensor, side in ((a, 1), (b, 0)):
        width = tensor.element_size()
        strides = [*(stride * width for stride in tensor.stride()), 1]
        for stride, size in zip(strides, (*tensor.shape, width), strict=True):
            ranges.setdefault(stride, [0, 0])[side] += size - 1
    distance = b.storage_offset() * b.element_size() - a.storage_offset() * a.element_size()
    return _reaches(sorted(ranges.items(), reverse=True), int(distance))


def _reaches(ranges: Sequence[tuple[int, Sequence[int]]], distance: int) -> bool:
    """Whether `distance` is a sum of `stride * i`, with `-down <= i <= up` for each stride."""
    if not ranges:
        return distance == 0
    (stride, (down, up)), *rest = ranges
    if stride == 0:
        return _reaches(rest, distance)
    below = sum(s * d for s, (d, _) in rest)
    above = sum(s * u for s, (_, u) in rest)
    first = max(-down, -((above - distance) // stride))
    last = min(up, (distance + below) // stride)
    return any(_reaches(rest, distance - i * stride) for i in range(first, last + 1))


# --- layouts of fake tensors ---------------------------------------------------------------------


def has_form_of(value: Any, like: Any) -> bool:
    """Whether two values are tensors of one dtype and shape, symbols included."""
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return False
    return value.dtype == like.dtype and [*map(str, value.shape)] == [*map(str, like.shape)]


def is_static(value: Any) -> bool:
    """Whether `value` is a tensor without symbols in its shape, strides and offset."""
    if not isinstance(value, Tensor):
        return False
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return all(isinstance(number, int) for number in numbers)


def overlaps_itself(value: Tensor) -> bool:
    """Whether two entries of `value` may have one place in memory, as where it is expanded."""
    hints = ([*map(_torch.hint_of, numbers)] for numbers in (value.stride(), value.shape))
    end = 0
    for stride, size in sorted((s, n) for s, n in zip(*hints, strict=True) if n > 1):
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False


def run_fake(node: fx.Node, source: fx.Node, layout: Any) -> Any:
    """The fake value of `node` when `source`, which it reads, lies so; `None` if there is none."""
    values: dict[fx.Node, Any] = {n: n.meta.get("val") for n in node.all_input_nodes}
    values[source] = layout
    tensors = [t for v in values.values() for t in (v if isinstance(v, tuple | list) else [v])]
    if not all(map(is_static, tensors)):
        return None
    mode = tensors[0].fake_mode
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: lie_alike(values[n], mode))
    try:
        with _torch.isolate(), mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except RuntimeError:  # a view that cannot be had of this layout
        return None


def lie_alike(value: Any, mode: Any) -> Any:
    """A fake tensor of `mode` that lies as `value` does, which may be one of another trace."""
    if not isinstance(value, Tensor) or getattr(value, "fake_mode", mode) is mode:
        return value
    with _torch.isolate(), mode:
        numel = value.untyped_storage().nbytes() // value.dtype.itemsize
        storage = torch.empty(numel, dtype=value.dtype, device=value.device)
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def gives_alike(node: fx.Node, argument: fx.Node, layout: Any) -> bool:
    """Whether `node` gives what the graph says when `argument` lies so."""
    found, said = run_fake(node, argument, layout), node.meta.get("val")
    if not isinstance(found, tuple | list) or not isinstance(said, tuple | list):
        return tensors_lie_alike(found, said)
    return len(found) == len(said) and all(map(tensors_lie_alike, found, said))
