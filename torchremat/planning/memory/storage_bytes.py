"""The bytes of what operators make, where kernels make something else than fake tensors say."""

import math

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.notes import device_kind_of
from torchremat.planning.memory.probed_storage import scalar_nbytes

aten = torch.ops.aten


def nbytes_of(node: fx.Node, value: Tensor, index: int = 0, *, inside: int | None = None) -> int:
    """The bytes of the storage that `node` makes for `value`, output `index` of its operator.

    `inside`: the bytes of the storage that the first argument lies in, if it is known better than
    its fake tensor says. Sizes that vary count at what they were when traced.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(lambda x: x.sin())(torch.ones(3, 4)).graph_module.graph
    >>> (sin,) = g.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    >>> nbytes_of(sin, sin.meta["val"])                     # 3 x 4 x 4 bytes
    48
    """
    if node.op == "placeholder" or node.target is aten.clone.default:
        return _dense(value)  # the fake tensor may be a view of something larger: it is a copy's
    if node.target is aten.empty_strided.default:
        return _span(value)
    if node.target in _KEEP_STORAGE:
        return _nbytes_with_storage(node, value, inside)
    if node.target is _BATCH_NORM and device_kind_of(node, value) == "cpu":
        return _numel(value) * _dtype_of_batch_norm(node, value, index).itemsize
    if value.dim() == 0 and node.op == "call_function":
        return scalar_nbytes(node, value, index)
    return storage_nbytes(value)


def storage_nbytes(value: Tensor) -> int:
    """The bytes of the storage that `value` lies in.

    >>> storage_nbytes(torch.ones(3, 4)[0])
    48
    """
    return _torch.hint_of(value.untyped_storage().nbytes())


# They copy all of the storage that their first argument lies in, and write into the copy:
# clone_preserve_strides, in ATen/FunctionalInverses.cpp and ATen/native/Copy.cpp
_KEEP_STORAGE = {
    aten.copy.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
}
_BATCH_NORM = aten._native_batch_norm_legit_functional.default


def _numel(value: Tensor) -> int:
    return math.prod(map(_torch.hint_of, value.shape))


def _dense(value: Tensor) -> int:
    return _numel(value) * value.dtype.itemsize


def _span(value: Tensor) -> int:
    sizes, strides = ([*map(_torch.hint_of, numbers)] for numbers in (value.shape, value.stride()))
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return (last + 1) * value.dtype.itemsize if all(sizes) else 0


def _nbytes_with_storage(node: fx.Node, value: Tensor, inside: int | None) -> int:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    like = source.meta["val"]
    sizes, strides = map(_torch.hint_of, like.shape), map(_torch.hint_of, like.stride())
    if any(size > 1 and stride == 0 for size, stride in zip(sizes, strides, strict=True)):
        return _dense(value)
    return storage_nbytes(like) if inside is None else inside


def _dtype_of_batch_norm(node: fx.Node, value: Tensor, index: int) -> torch.dtype:
    """The kernel's dtype: its statistics are as precise as the parameters, which fakes forget."""
    dtypes = [a.meta["val"].dtype if isinstance(a, fx.Node) else None for a in node.args[:5]]
    if index == 0:
        return value.dtype
    given = dtypes[index:] if index > 2 else [*dtypes[1:], dtypes[0]]
    return next((dtype for dtype in given if dtype is not None), value.dtype)
