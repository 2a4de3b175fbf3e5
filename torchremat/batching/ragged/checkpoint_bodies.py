"""A checkpoint inside the mapped function: it stays one, over the whole batch."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.batching.ragged.interpret import interpret
from torchremat.batching.ragged.layouts.layouts import Packed, Padded, Shared, Value, pack
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize, Sizes
from torchremat.batching.ragged.rules.op_call import Batch
from torchremat.batching.ragged.trace.decompositions import decompose_body
from torchremat.graph.nodes import results_of
from torchremat.graph.symbolic_sizes import symbols_in
from torchremat.remat.checkpoint import checkpoint
from torchremat.remat.op.op_rules import policy_of


@dataclass(frozen=True)
class _BodyForm:
    """The layouts and sizes of the operands of a body: the key of its traces."""

    kinds: tuple[tuple[Any, ...], ...]
    extents: tuple[tuple[str, Any], ...]
    numbers: tuple[tuple[str, Any], ...]
    batch: tuple[Any, ...]
    computed: dict[str, Any] = field(compare=False)
    """Sizes that are computed from others, by their texts."""


_functions: "weakref.WeakKeyDictionary[fx.GraphModule, dict[_BodyForm, _Body]]" = (
    weakref.WeakKeyDictionary()
)


class _Body:
    def __init__(self, module: fx.GraphModule, form: _BodyForm) -> None:
        self.kinds: list[tuple[Any, ...]] = []
        self.computed = form.computed
        body = decompose_body(module)

        def run(operands: list[Tensor], lengths: list[Tensor]) -> list[Tensor]:
            sizes = _make_sizes(form, lengths, operands)
            batch = Batch(form.batch[0], sizes, *form.batch[1:])
            pairs = zip(operands, form.kinds, strict=True)
            inputs = [_make_value(t, kind, sizes, form.computed) for t, kind in pairs]
            found = interpret(body, inputs, batch, results_of(body), {}, run_body)
            self.kinds = [_describe_layout(v) for v in found]
            form.computed.update(_find_computed_sizes(sizes))
            return [v.data for v in found]

        self.function = run  # a checkpoint has its traces as long as its function lives
        self.checkpointed: Callable[..., list[Tensor]] = checkpoint(run, policy=policy_of(module))


def run_body(module: fx.GraphModule, operands: Sequence[Value], batch: Batch) -> list[Value]:
    """Run the body of a checkpoint on ragged operands, by a function for their layouts."""
    symbols = batch.sizes.symbols
    extents = [(name, e.known_longest) for name, e in symbols.items() if isinstance(e, RaggedSize)]
    names = {*symbols_in(module)}
    form = _BodyForm(
        tuple(_describe_layout(v) for v in operands),
        tuple(extents),
        tuple((n, symbols[n]) for n in sorted(names) if not isinstance(symbols[n], RaggedSize)),
        (batch.axis_size, batch.randomness, batch.axis_name),
        _find_computed_sizes(batch.sizes),
    )
    bodies = _functions.setdefault(module, {})
    body = bodies.setdefault(form, _Body(module, form))
    lengths = [symbols[name].lengths for name, _ in extents]
    results = body.checkpointed([_pad_to_bound(v) for v in operands], lengths)
    pairs = zip(results, body.kinds, strict=True)
    computed = body.computed
    return [_as_outside(_make_value(t, kind, batch.sizes, computed)) for t, kind in pairs]


def _pad_to_bound(value: Value) -> Tensor:
    """Pad to the bound of lengths, which in the trace of a body is the greatest length."""
    if not isinstance(value, Padded):
        return value.data
    pads: list[int] = []
    for extent, count in zip(reversed(value.extents), reversed(value.data.shape), strict=False):
        bound = count if extent is None or extent.known_longest is None else extent.known_longest
        pads += [0, bound - count]
    return torch.constant_pad_nd(value.data, pads) if any(pads) else value.data


def _as_outside(value: Value) -> Value:
    if not isinstance(value, Padded):
        return value
    data = value.data
    for dim, extent in enumerate(value.extents):
        if extent is not None and data.shape[1 + dim] > extent.longest:
            data = data.narrow(1 + dim, 0, extent.longest)
    return pack(Padded(data, value.extents))


def _find_computed_sizes(sizes: Sizes) -> dict[str, Any]:
    return {text: e.symbolic for text, e in sizes.extents.items() if e.symbolic is not None}


def _describe_layout(value: Value) -> tuple[Any, ...]:
    if isinstance(value, Shared):
        return ("shared",)
    if isinstance(value, Packed):
        return ("packed", value.dim, value.extent.text)
    return ("padded", tuple(None if e is None else e.text for e in value.extents))


def _make_value(
    tensor: Tensor, kind: tuple[Any, ...], sizes: Sizes, computed: dict[str, Any]
) -> Value:
    def find_size(text: str) -> RaggedSize:
        if text in sizes.extents:
            return sizes.extents[text]
        return sizes.of(computed[text])  # type: ignore[no-any-return]

    if kind[0] == "shared":
        return Shared(tensor)
    if kind[0] == "packed":
        extent = find_size(kind[2])
        if extent.known_total is None:
            extent.known_total = tensor.shape[kind[1]]
        return Packed(tensor, kind[1], extent)
    return Padded(tensor, tuple(None if e is None else find_size(e) for e in kind[1]))


def _make_sizes(form: _BodyForm, lengths: Sequence[Tensor], operands: Sequence[Tensor]) -> Sizes:
    symbols: dict[str, Any] = dict(form.numbers)
    totals = {
        kind[2]: tensor.shape[kind[1]]
        for kind, tensor in zip(form.kinds, operands, strict=True)
        if kind[0] == "packed"
    }
    for (name, longest), of in zip(form.extents, lengths, strict=True):
        symbols[name] = RaggedSize(name, of, totals.get(name), longest)
    return Sizes(form.batch[0], symbols)
