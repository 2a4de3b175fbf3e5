"""Inputs whose sizes vary from call to call, and for which calls a trace of such holds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.graph.symbolic_sizes import Sizes, format_size, value_of
from torchremat.tracing.input_spec import InputSpec


@dataclass(eq=False)
class DynamicInputs:
    """Inputs some of whose sizes are symbols, with the conditions under which a trace holds.

    `specs` are those of the inputs with symbols for sizes, `places` the input and the dimension
    that each of `symbols` is the size of.
    """

    specs: tuple[InputSpec, ...]
    places: tuple[tuple[int, int], ...]
    symbols: tuple[torch.SymInt, ...]
    shapes: _torch.ShapeEnv
    _compiled: "_Checks | None" = field(default=None, init=False)

    @classmethod
    def of(
        cls, specs: Sequence[InputSpec], dims: Sequence[frozenset[int]]
    ) -> "DynamicInputs | None":
        """Symbols for the sizes of the dimensions `dims` of each input; `None` if there are none.

        A size of 0 or 1 stays as it is: it changes what operators do.
        """
        shapes = _torch.new_shape_env()
        places: list[tuple[int, int]] = []
        symbols: list[torch.SymInt] = []
        symbolic: list[InputSpec] = []
        for i, (spec, varying) in enumerate(zip(specs, dims, strict=True)):
            shape: list[Any] = list(spec.shape)
            for dim in sorted(varying):
                if spec.shape[dim] > 1:
                    name = f"input_{i}_size_{dim}"
                    shape[dim] = _torch.new_symbol(shapes, spec.shape[dim], name)
                    places.append((i, dim))
                    symbols.append(shape[dim])
            symbolic.append(replace(spec, shape=tuple(shape), stride=_strides(spec, shape)))
        if not symbols:
            return None
        return cls(tuple(symbolic), tuple(places), tuple(symbols), shapes)

    @property
    def fixed(self) -> frozenset[tuple[int, int]]:
        """The places of which the function needs the very size, so that the trace holds for one."""
        pairs = zip(self.places, self.symbols, strict=True)
        return frozenset(p for p, size in pairs if isinstance(_torch.settle_size(size), int))

    def allows(self, specs: Sequence[InputSpec]) -> bool:
        """Whether inputs of `specs` are like those of the trace, apart from sizes that vary."""
        varying = set(self.places)
        with_symbols = {i for i, _ in self.places}  # `sizes` compares the strides of these
        return len(specs) == len(self.specs) and all(
            is_alike(theirs, ours)
            and (i in with_symbols or theirs.stride == ours.stride)
            and all(
                (i, dim) in varying or size == ours.shape[dim]
                for dim, size in enumerate(theirs.shape)
            )
            for i, (theirs, ours) in enumerate(zip(specs, self.specs, strict=True))
        )

    @property
    def traced_sizes(self) -> Sizes:
        """The values of the symbols in the call that was traced."""
        names = (_torch.print_size(symbol, original=True) for symbol in self.symbols)
        return dict(zip(names, map(_torch.hint_of, self.symbols), strict=True))

    def sizes(self, tensors: Sequence[Tensor]) -> Sizes | None:
        """The values of the symbols for `tensors`; `None` if the trace does not hold there."""
        return self._checks.of_tensors(tensors)

    def holds(self, sizes: Sizes) -> bool:
        return self._checks.of_sizes(*sizes.values())

    @property
    def _checks(self) -> "_Checks":
        num_guards = _torch.num_guards(self.shapes)
        if self._compiled is None or self._compiled.num_guards != num_guards:
            self._compiled = _Checks.of(self, num_guards)  # a later trace may have assumed more
        return self._compiled


@dataclass(frozen=True)
class _Checks:
    num_guards: int
    of_tensors: Callable[[Sequence[Tensor]], Sizes | None]
    of_sizes: Callable[..., bool]

    @classmethod
    def of(cls, inputs: DynamicInputs, num_guards: int) -> "_Checks":
        names = [_torch.print_size(symbol, original=True) for symbol in inputs.symbols]
        guards = _torch.guards_of(inputs.shapes, inputs.symbols, names)
        found = "\n    ".join(
            f"{name} = tensors[{i}].shape[{dim}]"
            for name, (i, dim) in zip(names, inputs.places, strict=True)
        )
        strides = " and ".join(
            f"tensors[{i}].stride() == ({', '.join(map(format_size, inputs.specs[i].stride))},)"
            for i in sorted({i for i, _ in inputs.places})
        )
        scope: dict[str, Any] = dict(_torch.NAMES_IN_SIZES)
        exec(
            f"""
def of_tensors(tensors):
    {found}
    if {guards} and {strides}:
        return {{{", ".join(f"{name!r}: {name}" for name in names)}}}
    return None

def of_sizes({", ".join(names)}):
    return {guards}
""",
            scope,
        )
        return cls(num_guards, scope["of_tensors"], scope["of_sizes"])


def _strides(spec: InputSpec, shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of `spec` as products of sizes, as far as they are such."""
    strides: list[Any] = list(spec.stride)
    expected, symbolic = 1, 1
    for dim in sorted(range(len(shape)), key=lambda d: (spec.stride[d], spec.shape[d])):
        if spec.stride[dim] == expected:
            strides[dim] = symbolic
        expected = spec.stride[dim] * spec.shape[dim]
        symbolic = strides[dim] * shape[dim]
    return tuple(strides)


def is_alike(a: InputSpec, b: InputSpec) -> bool:
    """Whether two inputs differ in nothing but their sizes and strides."""
    return len(a.shape) == len(b.shape) and (
        a.dtype,
        a.device,
        a.requires_grad,
        a.is_leaf,
        a.sharding,
        a.is_conj,
        a.is_neg,
    ) == (b.dtype, b.device, b.requires_grad, b.is_leaf, b.sharding, b.is_conj, b.is_neg)


def spec_at(spec: InputSpec, sizes: Sizes) -> InputSpec:
    shape = tuple(value_of(size, sizes) for size in spec.shape)
    return replace(spec, shape=shape, stride=tuple(value_of(s, sizes) for s in spec.stride))


def shapes_of(inputs: Iterable[InputSpec]) -> _torch.ShapeEnv | None:
    for value in inputs:
        for size in value.shape:
            if isinstance(size, torch.SymInt):
                return _torch.shape_env_of(size)
    return None
