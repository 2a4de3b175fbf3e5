"""The rule of encodings: what the backward pass reads in part is saved in fewer bits.

    y  = relu(x)                               y  = relu(x)
    dx = threshold_backward(dy, y, 0)          b  = encode_at_most(y, 0)      a bit for each entry
                                               dx = drop_gradient(dy, b)

The encoding `b` does not depend on cotangents, so that it may run in the forward pass. A policy
that saves `y` saves `b` in its place, and a plan may. Three kinds of values have one:

- A mask is a bit for each entry.
- Indices that a pooling, `sort` or `topk` gives are integers of as few bits as the sizes that it
  chooses among need.
- A tensor of which the backward pass reads the sign alone (of ReLU), or the shape (of poolings).

The bits of results are those of PyTorch:

- `threshold_backward` gives 0 where `y <= 0` and `dy` elsewhere, as `drop_gradient` does. Where
  `y` is NaN both give `dy`. Other thresholds must be numbers of the dtype of `y`.
- A mask and its indices are the same after they were decoded.
- The gradient of a pooling reads the indices and, of its input, the sizes and strides.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.replay_rules import reason_not_replayable, reason_to_save
from torchremat.autodiff.rewrites.added_calls import add_call, add_like
from torchremat.autodiff.rewrites.encoding_ops import (
    decode_bits,
    decode_shape,
    drop_gradient,
    encode_at_most,
    encode_bits,
    encode_indices,
    encode_shape,
    is_encoding,
)
from torchremat.graph.nodes import (
    base_of,
    call_of,
    is_forward,
    is_identity,
    is_item,
    is_view,
    item_index,
)
from torchremat.graph.notes import device_kind_of, notes_of, set_notes
from torchremat.graph.ops import name_arguments, packet_name
from torchremat.graph.symbolic_sizes import literal_size

aten = torch.ops.aten

LEAST_NBYTES = 1 << 20
"""Of smaller values the calls of operators cost more than the memory is worth."""

_BY_SHAPE = frozenset({
    "aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward",
    "aten.adaptive_max_pool2d_backward", "aten.adaptive_max_pool3d_backward",
    "aten.avg_pool2d_backward", "aten.avg_pool3d_backward",
    "aten._adaptive_avg_pool2d_backward", "aten._adaptive_avg_pool3d_backward",
})  # fmt: skip
"""Operators that read sizes and strides of their second argument, and nothing else of it."""

_POOLINGS = {
    "aten.max_pool2d_with_indices": 2, "aten.adaptive_max_pool2d": 2,
    "aten.max_pool3d_with_indices": 3, "aten.adaptive_max_pool3d": 3,
}  # fmt: skip
"""How many dims at the end of the argument the indices of a pooling count along."""

_CHOICES_ALONG_DIM = frozenset({
    "aten.topk", "aten.sort", "aten.max", "aten.min", "aten.median", "aten.nanmedian",
    "aten.mode", "aten.kthvalue", "aten.cummax", "aten.cummin",
})  # fmt: skip
"""Operators of which the second result has indices along the argument `dim`."""


@dataclass(frozen=True)
class Use:
    """`operand`, a value or a view of it, as an operator of the backward pass reads it."""

    reader: fx.Node
    operand: fx.Node


def encode_saved_values(graph: fx.Graph) -> None:
    """Let the backward pass of `graph` read encodings of values that have one."""
    results = _find_results(graph)
    with _torch.isolate():  # a trace in progress would record what sizes are read
        lost = _find_lost(graph)
        for value in list(graph.nodes):
            if not is_forward(value) or value in results or not _is_worth_it(value):
                continue
            is_again = lost.isdisjoint(value.all_input_nodes) and not _must_not_run_again(value)
            uses = list(_find_uses(value, value))
            if uses and (is_again or _is_given_back(value)):
                _encode(value, uses)


def value_of_encoding(encoding: fx.Node) -> fx.Node:
    """The value of the forward pass that an encoding stands for."""
    (value,) = encoding.all_input_nodes
    return base_of(value)


def encode_at_once(graph: fx.Graph) -> None:
    """Let a graph of the forward pass encode each value as soon as it is there."""
    for code in [node for node in graph.nodes if is_encoding(node)]:
        source: Any = code.args[0]
        if is_view(source) and len(source.users) == 1:
            source.args[0].append(source)
        source.append(code)


def undo_encodings(graph: fx.Graph) -> None:
    """Let what `graph` encodes itself be read as it is, with the operators that were traced."""
    for code in [node for node in graph.nodes if is_encoding(node)]:
        value = value_of_encoding(code)
        for decoded in list(code.users):
            if code.target is encode_at_most:
                decoded.target = aten.threshold_backward.default
                decoded.args = (decoded.args[0], value, code.args[1])
            else:
                decoded.replace_all_uses_with(code.args[0])
                graph.erase_node(decoded)
        lying: Any = code.args[0]
        graph.erase_node(code)
        if lying is not value and not lying.users:
            graph.erase_node(lying)


def decode_in(graph: fx.Graph, code: fx.Node, encoding: fx.Node) -> None:
    """Let `code`, an input that stood for the value of `encoding`, be in the bits of that."""
    if not code.users:
        return
    first = next(node for node in graph.nodes if node in code.users)
    readers, value = list(code.users), code.meta["val"]
    with graph.inserting_before(first), _torch.isolate():
        if encoding.target is encode_indices:
            decoded = add_like(first, aten._to_copy.default, (code,), value, {"dtype": value.dtype})
        else:
            order = _order_of(value_of_encoding(encoding).meta["val"])
            assert order is not None
            decoded = _unpack(code, value, order, first)
    for reader in readers:
        reader.replace_input_with(code, decoded)
    code.meta["val"] = encoding.meta["val"]


def _find_results(graph: fx.Graph) -> set[fx.Node]:
    """The values that the graph returns, which are in memory whatever is saved."""
    (output,) = graph.find_nodes(op="output")
    return set(map(base_of, output.all_input_nodes))


def _find_lost(graph: fx.Graph) -> set[fx.Node]:
    """The values that a second derivative could not compute of what the first one has.

    They are computed of random numbers, say, that the first derivative does not need. Values that
    it reads are there: saved, or recomputed from what is saved. Encoded ones are recomputed.
    """
    lost: set[fx.Node] = set()
    for node in graph.nodes:
        if not is_forward(node) or any(_find_uses(node, base_of(node))):
            continue
        if _must_not_run_again(node) or not lost.isdisjoint(node.all_input_nodes):
            lost.add(node)
    return lost


def _is_given_back(value: fx.Node) -> bool:
    """Whether an encoding of `value` gives back all of it."""
    return value.meta["val"].dtype in (torch.bool, torch.int64)


def _must_not_run_again(value: fx.Node) -> bool:
    return reason_not_replayable(value) is not None or reason_to_save(value) is not None


def _is_worth_it(value: fx.Node) -> bool:
    found = value.meta.get("val")
    if value.op != "call_function" or is_view(value) or not _torch.is_fake(found):
        return False
    assert isinstance(found, Tensor)
    if found.layout != torch.strided:
        return False
    return bool(_torch.hint_of(found.numel()) * found.itemsize >= LEAST_NBYTES)


def _find_uses(value: fx.Node, base: fx.Node) -> Iterator[Use]:
    """The uses of `value`, and of views of it, in the backward pass."""
    for user in value.users:
        if is_view(user) and base_of(user) is base:
            yield from _find_uses(user, base)
        elif user.op == "call_function" and not is_forward(user) and not is_encoding(user):
            yield Use(user, value)


def _encode(value: fx.Node, uses: list[Use]) -> None:
    found: Tensor = value.meta["val"]
    order = _order_of(found)
    if order is None:
        return
    if found.dtype == torch.bool:
        _read_again(value, uses, _decode(value, order, _first(value.graph, uses)))
    elif found.dtype == torch.int64:
        dtype = _dtype_for(_count_choices(value))
        if dtype is not None:
            _read_again(value, uses, _widen(value, dtype, _first(value.graph, uses)))
    elif all(_reads_sign(use, value) or _reads_shape(use, value) for use in uses):
        _read_less(value, uses, order)


def _decode(value: fx.Node, order: list[int], before: fx.Node) -> fx.Node:
    """Encode a mask and decode it again, before an operator."""
    with before.graph.inserting_before(before):
        code = _encode_as(encode_bits, value, before, _lay(value, order, before))
        return _unpack(code, value.meta["val"], order, before)


def _unpack(code: fx.Node, value: Tensor, order: list[int], before: fx.Node) -> fx.Node:
    """Add the mask of the bits `code`, with the sizes of `value` and its order in memory."""
    laid = value.permute(order)
    shape = [*map(literal_size, laid.shape)]
    mask = add_like(before, decode_bits, (code, shape), laid.new_empty(laid.shape))
    if order == sorted(order):
        return mask
    back = [order.index(dim) for dim in range(len(order))]
    return add_call(before, aten.permute.default, (mask, back))


def _widen(value: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
    """Encode indices and decode them again, before an operator."""
    with before.graph.inserting_before(before):
        code = _encode_as(encode_indices, value, before, value, dtype)
        return add_call(before, aten._to_copy.default, (code,), {"dtype": value.meta["val"].dtype})


def _encode_as(encoder: Any, value: fx.Node, before: fx.Node, *args: Any) -> fx.Node:
    """Add an encoding, at the user's line that `value` is from: reports show it."""
    code = add_call(before, encoder, args)
    set_notes(code, replace(notes_of(value), phase=notes_of(before).phase))
    return code


def _lay(value: fx.Node, order: list[int], before: fx.Node) -> fx.Node:
    """`value` with its dims as they lie in memory."""
    is_laid = order == sorted(order)
    return value if is_laid else add_call(before, aten.permute.default, (value, order))


def _read_again(value: fx.Node, uses: list[Use], decoded: fx.Node) -> None:
    """Let operators read `decoded`, and views of it, in place of `value`."""
    for use in uses:
        with value.graph.inserting_before(use.reader):
            again = _view_again(use, use.operand, {value: decoded})
            use.reader.replace_input_with(use.operand, again)


def _view_again(use: Use, operand: fx.Node, decoded: dict[fx.Node, fx.Node]) -> fx.Node:
    if operand in decoded:
        return decoded[operand]
    source = _view_again(use, operand.args[0], decoded)  # type: ignore[arg-type]
    return add_like(
        use.reader, operand.target, (source, *operand.args[1:]), operand.meta["val"], operand.kwargs
    )


def _read_less(value: fx.Node, uses: list[Use], order: list[int]) -> None:
    """Let operators read the sign of `value` from its bits, and its shape from another tensor."""
    codes: dict[float, fx.Node] = {}
    place = {node: i for i, node in enumerate(value.graph.nodes)}
    for use in sorted(uses, key=lambda use: place[use.reader]):
        reader = use.reader
        if _reads_shape(use, value):
            with value.graph.inserting_before(reader):
                shape = _add_empty(reader, value, order)
            reader.replace_input_with(use.operand, shape)
            continue
        most = float(reader.args[2])  # type: ignore[arg-type]
        if most not in codes:
            with value.graph.inserting_before(reader):
                lying = _lay(value, order, reader)
                codes[most] = _encode_as(encode_at_most, value, reader, lying, most)
        reader.target = drop_gradient
        reader.args = (reader.args[0], codes[most], order)


def _add_empty(reader: fx.Node, value: fx.Node, order: list[int]) -> fx.Node:
    """Add a tensor of the shape of `value`, for an operator that does not read what is in it.

    The kernels of the CPU never touch it, so that it needs the memory of one entry.
    """
    found: Tensor = value.meta["val"]
    code = _encode_as(encode_shape, value, reader, value)
    if order == sorted(order) and device_kind_of(value, found) == "cpu":
        return add_call(reader, aten.expand.default, (code, [*found.shape]))
    return add_call(reader, decode_shape, (code, [*found.shape], [*found.stride()]))


def _reads_sign(use: Use, value: fx.Node) -> bool:
    reader = use.reader
    if reader.target is not aten.threshold_backward.default or not _is_alias(use.operand, value):
        return False
    slope: Any = reader.args[0]
    found, given, made = (n.meta["val"] for n in (value, slope, reader))
    if base_of(slope) is value or not _is_exact(reader.args[2], found.dtype):
        return False
    # as text: to compare symbols would settle them
    layouts = [(t.dtype, str(t.shape), str(t.stride())) for t in (found, given, made)]
    return layouts[0] == layouts[1] == layouts[2]


def _is_exact(number: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor of `dtype` can have this number: kernels round others in their own ways."""
    if not isinstance(number, int | float):
        return False
    return float(torch.tensor(number, dtype=torch.float64).to(dtype)) == number


def _reads_shape(use: Use, value: fx.Node) -> bool:
    args = use.reader.args
    if packet_name(use.reader.target) not in _BY_SHAPE or not _is_alias(use.operand, value):
        return False
    slope: Any = args[0]
    is_alike = slope.meta["val"].dtype == value.meta["val"].dtype
    return bool(args.index(use.operand) == 1 and args.count(use.operand) == 1 and is_alike)


def _is_alias(operand: fx.Node, value: fx.Node) -> bool:
    """Whether `operand` is `value` itself, whatever it was detached from."""
    while operand is not value and is_identity(operand):
        operand = operand.args[0]  # type: ignore[assignment]
    return operand is value


def _order_of(value: Tensor) -> list[int] | None:
    """The dims of `value` as they lie in memory; `None` if it has gaps, or entries twice."""
    sizes, strides = value.shape, value.stride()
    order = sorted(range(value.dim()), key=lambda dim: (-_torch.hint_of(strides[dim]), dim))
    expected: Any = 1
    for dim in reversed(order):
        # as text: to compare symbols would settle them
        if str(sizes[dim]) != "1" and str(strides[dim]) != str(expected):
            return None
        expected = expected * sizes[dim]
    return order


def _count_choices(value: fx.Node) -> int | None:
    """From how many entries an index in `value` chooses; `None` if it has no such indices."""
    if not is_item(value) or item_index(value) != 1:
        return None
    call = call_of(value)
    name, source = packet_name(call.target), call.args[0]
    if not isinstance(source, fx.Node) or not isinstance(call.target, _torch.OpOverload):
        return None
    sizes = list(source.meta["val"].shape)
    if name in _CHOICES_ALONG_DIM:
        dim = name_arguments(call.target, call.args, call.kwargs)["dim"]
        sizes = sizes and [sizes[dim]]
    elif name in _POOLINGS:
        sizes = sizes[-_POOLINGS[name] :]
    else:
        return None
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _dtype_for(choices: int | None) -> torch.dtype | None:
    """The dtype of fewest bits with integers from 0 to `choices` - 1."""
    if choices is None:
        return None
    dtypes = (torch.uint8, torch.int16, torch.int32)
    return next((d for d in dtypes if choices - 1 <= torch.iinfo(d).max), None)


def _first(graph: fx.Graph, uses: list[Use]) -> fx.Node:
    readers = {use.reader for use in uses}
    first: fx.Node = next(node for node in graph.nodes if node in readers)
    return first
