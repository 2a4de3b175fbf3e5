"""The storage of scalars, learned from the kernels: some return one in a large storage.

`mse_loss` of 6,144 floats on a CPU computes the differences in the memory of its result, which it
keeps: 24,576 bytes for 4. Fake tensors say 4. So each operator that returns a scalar runs once on
small tensors, on its device. That shows whether its storage grows with what it reads.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.core.accelerators import is_here
from torchremat.graph.symbolic_sizes import Size

# Two elements a dimension tell the storage of a scalar from that of all elements.
_MOST_ELEMENTS = 2

_grows: dict[tuple[Any, ...], bool] = {}
"""Whether the storage of an output grows, by operator, device and arguments."""


def scalar_nbytes(node: fx.Node, value: Tensor, index: int) -> int:
    """The bytes of the storage that `node` makes for `value`, a scalar: output `index`.

    >>> import torch, torchremat as tr
    >>> x = torch.ones(64, 96)
    >>> graph = tr.make_graph(torch.nn.functional.mse_loss)(x, x).graph_module.graph
    >>> (loss,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mse_loss.default)
    >>> scalar_nbytes(loss, loss.meta["val"], 0)
    24576
    """
    operands = [n.meta["val"] for n in node.all_input_nodes if "val" in n.meta]
    if not _can_probe(node, value, operands):
        return value.dtype.itemsize
    small = [tuple(min(_torch.hint_of(n), _MOST_ELEMENTS) for n in t.shape) for t in operands]
    arguments = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: None))
    dtypes = tuple(t.dtype for t in operands)
    key = (node.target, index, value.device, arguments, dtypes, tuple(small))
    if key not in _grows:
        _grows[key] = _probe(node, index, small)
    if not _grows[key]:
        return value.dtype.itemsize
    return max(math.prod(map(_torch.hint_of, t.shape)) for t in operands) * value.dtype.itemsize


def _can_probe(node: fx.Node, value: Tensor, operands: list[Any]) -> bool:
    """Whether it is an operator of PyTorch without effects that reduces tensors to a scalar."""
    target = node.target
    literals: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), literals.append)
    return (
        isinstance(target, _torch.OpOverload)
        and target.namespace == "aten"
        and not _torch.schema_of(target).is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and all(isinstance(t, Tensor) for t in operands)
        and any(t.dim() > 0 for t in operands)
        and not any(isinstance(literal, Size) for literal in literals)
        and (value.device.type == "cpu" or is_here(value.device))
    )


def _probe(node: fx.Node, index: int, small: list[tuple[int, ...]]) -> bool:
    shapes = dict(zip(node.all_input_nodes, small, strict=True))

    def make_small(of: fx.Node) -> Tensor:
        like = of.meta["val"]
        return torch.zeros(shapes[of], dtype=like.dtype, device=like.device)

    with _torch.isolate(), torch.no_grad():
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), make_small)
        try:
            result: Any = node.target(*args, **kwargs)  # type: ignore[operator]
            made = result[index] if isinstance(result, tuple | list) else result
        except (RuntimeError, IndexError):  # not defined on so little: the shape is believed
            return False
    return bool(made.untyped_storage().nbytes() > made.dtype.itemsize)
