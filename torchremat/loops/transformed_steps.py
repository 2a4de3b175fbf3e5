"""Steps made of another step: one with tangents, and one of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.accelerators import get_all_generator_states, set_all_generator_states
from torchremat.loops.step import Step, StepLayout, Tensors, pick

Flags = tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class DualStep:
    """A step with tangents: of each kind, all tensors come first, and then tangents of some.

    Attributes:
        flags: which tensors of the state, the slices, the shared ones, and the stacked results
            have a tangent.
    """

    step: Step
    flags: tuple[Flags, Flags, Flags, Flags]

    @property
    def layout(self) -> StepLayout:
        inner = self.step.layout
        sizes = (inner.state, inner.slices, inner.shared, inner.stacked)
        return StepLayout(*(n + sum(f) for n, f in zip(sizes, self.flags, strict=True)))

    def __call__(self, state: Tensors, slices: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        flags = self.flags[0], self.flags[1], self.flags[2]
        split = [_halve(*pair) for pair in zip((state, slices, shared), flags, strict=True)]
        primals = [pick(*pair) for pair in zip((p for p, _ in split), flags, strict=True)]

        def run(*varying: Tensors) -> tuple[tuple[Tensors, Tensors], tuple[Tensors, Tensors]]:
            kinds = zip(split, flags, varying, strict=True)
            groups = [_merge(whole, some, values) for (whole, _), some, values in kinds]
            new, stacked = self.step(*groups)
            return (pick(new, self.flags[0]), pick(stacked, self.flags[3])), (new, stacked)

        tangents = tuple(t for _, t in split)
        with _torch.dual_level_as_functorch_level():
            outputs: Any = torch.func.jvp(run, tuple(primals), tangents, has_aux=True)
        _, pushed, results = outputs
        new, stacked = ([*r, *t] for r, t in zip(results, pushed, strict=True))
        return new, stacked

    def asks(self, state: Tensors, shared: Tensors) -> Any:
        primal, _ = _halve(state, self.flags[0])
        return self.step.asks(primal, _halve(shared, self.flags[2])[0])


def _halve(tensors: Tensors, flags: Flags) -> tuple[Tensors, Tensors]:
    return tensors[: len(flags)], tensors[len(flags) :]


def _merge(whole: Tensors, flags: Flags, some: Tensors) -> Tensors:
    left = iter(some)
    return [next(left) if flag else t for t, flag in zip(whole, flags, strict=True)]


@dataclass(frozen=True, eq=False)
class MappedStep:
    """A step of a batch. Where an element has ended, its state stays as it is.

    Attributes:
        flags: which tensors of the state, the slices and the shared ones have a first dimension
            that is the batch's. Stacked results always have.
        ends_apart: whether elements end after different numbers of steps.
    """

    step: Step
    flags: tuple[Flags, Flags, Flags]
    ends_apart: bool
    randomness: str

    @property
    def layout(self) -> StepLayout:
        return self.step.layout

    def __call__(self, state: Tensors, slices: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        (mapped, stacked), (same, _) = self._map(self.step, state, slices, shared)
        new = _merge(same, self.flags[0], mapped)
        if self.ends_apart:
            running = self._ask_each(state, shared)
            new = [_choose(running, t, old) for t, old in zip(new, state, strict=True)]
        return new, stacked

    def asks(self, state: Tensors, shared: Tensors) -> Any:
        if self.ends_apart:
            return self._ask_each(state, shared).any()
        found: list[Any] = []
        dims = (_dims(self.flags[0]), _dims(self.flags[2]))

        def run(*groups: Tensors) -> Tensor:
            found.append(self.step.asks(*groups))
            return torch.zeros(())

        torch.func.vmap(run, dims, 0, self.randomness)(state, shared)
        return found[0]  # no dimension of it is the batch's

    def _map(
        self, step: Step, *groups: Tensors
    ) -> tuple[tuple[Tensors, Tensors], tuple[Tensors, Tensors]]:
        """The results that are mapped, and all as they are inside: the others stay so."""
        found: list[Any] = []

        def run(*groups: Tensors) -> tuple[Tensors, Tensors, Tensor]:
            new, stacked = step(*groups)
            found.append((new, stacked))
            return pick(new, self.flags[0]), stacked, torch.zeros(())

        dims = tuple(_dims(flags) for flags in self.flags)
        mapped, stacked, _ = torch.func.vmap(run, dims, 0, self.randomness)(*groups)
        return (mapped, stacked), found[0]

    def _ask_each(self, state: Tensors, shared: Tensors) -> Tensor:
        dims = (_dims(self.flags[0]), _dims(self.flags[2]))
        return torch.func.vmap(self._answer, dims, 0, self.randomness)(state, shared)

    def _answer(self, state: Tensors, shared: Tensors) -> Tensor:
        return torch.as_tensor(self.step.asks(state, shared)).reshape(())


def _dims(flags: Sequence[bool]) -> list[int | None]:
    return [0 if flag else None for flag in flags]


def _choose(running: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(running.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def map_step(
    step: Step,
    groups: tuple[Tensors, Tensors, Tensors],
    flags: tuple[Flags, Flags, Flags],
    *,
    has_condition: bool,
    randomness: str,
) -> MappedStep:
    """The step of a batch; those of the state are mapped besides that a step makes so.

    `groups` has the first state, the slices of one step, and the shared ones.
    """
    states, slices, shared = flags
    ends_apart = False
    before = get_all_generator_states()
    while True:
        found = _look(step, groups, (states, slices, shared), has_condition, randomness)
        now = tuple(a or b for a, b in zip(states, found[0], strict=True))
        ends_apart = ends_apart or found[1]
        if ends_apart:
            now = (True,) * len(states)
        if now == states:
            break
        groups = (expand_all(groups[0], states, now, _size(groups, flags)), *groups[1:])
        states = now
    set_all_generator_states(before.items())
    return MappedStep(step, (states, slices, shared), ends_apart, randomness)


def expand_all(tensors: Tensors, have: Flags, want: Flags, size: int, dim: int = 0) -> Tensors:
    """`tensors` with a dimension of `size` where one is wanted, and not there yet."""
    return [
        t.unsqueeze(dim).expand(*t.shape[:dim], size, *t.shape[dim:]) if w and not h else t
        for t, h, w in zip(tensors, have, want, strict=True)
    ]


def _size(groups: tuple[Tensors, ...], flags: tuple[Flags, ...]) -> int:
    pairs = zip(groups, flags, strict=True)
    mapped: list[Tensor] = [t for tensors, some in pairs for t in pick(tensors, some)]
    return mapped[0].shape[0]


def _look(
    step: Step,
    groups: tuple[Tensors, Tensors, Tensors],
    flags: tuple[Flags, Flags, Flags],
    has_condition: bool,
    randomness: str,
) -> tuple[Flags, bool]:
    """Run a step of a batch to see which results are mapped, and whether the condition is."""
    found: list[Any] = []

    def run(state: Tensors, slices: Tensors, shared: Tensors) -> Tensor:
        level = _torch.transform_depth()
        asked = step.asks(state, shared) if has_condition else False
        new, _ = step(state, slices, shared)
        found.append(tuple(_torch.is_mapped_at(t, level) for t in new))
        found.append(isinstance(asked, Tensor) and _torch.is_mapped_at(asked, level))
        return torch.zeros(())

    with torch.no_grad():
        torch.func.vmap(run, tuple(map(_dims, flags)), 0, randomness)(*groups)
    return found[0], found[1]
