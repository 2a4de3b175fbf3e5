"""Side effects of a traced function, found when it is traced: an error or a warning each.

A graph replays operators. A random number that Python or NumPy draws would be the same each time; a
counter that a module's `forward` keeps would stand still.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from torchremat.core.source import Source, first_line_where
from torchremat.errors import EffectError
from torchremat.remat.escapes.live_tensors import LastingChangeError
from torchremat.remat.tracing.guards.entries import Binding
from torchremat.tracing.modules.attribute_changes import MISSING, AttributeChange
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.random_sources import RandomSource, RandomState, global_sources, source_of


class TraceWithEffects(Protocol):
    @property
    def paths(self) -> ModulePaths:
        """The modules that ran, with what became of their attributes."""

    @property
    def num_draws(self) -> int:
        """How many operators draw random numbers."""


T = TypeVar("T", bound=TraceWithEffects)


def trace_without_effects(
    name: str, trace: Callable[[], T], variables: Sequence[Binding], modules: Sequence[nn.Module]
) -> T:
    """The result of `trace`, which traces the function `name`; raises for what cannot be replayed.

    An attribute that the first trace sets and the second leaves alone is a cache, and stays. But
    where random numbers were drawn to make it, the call draws them too, and has to run as it is.
    """
    sources = [*global_sources(), *_sources_among(variables, modules)]
    states = RandomState(sources)
    try:
        made = trace()
    except BaseException:  # without a trace the function draws the same numbers
        states.restore()
        raise
    drawn = states.find_changed()
    if drawn is not None and (line := _line_that_draws(drawn, trace)) is not None:
        states.restore()
        raise EffectError(
            f"{name} draws random numbers from {drawn.label}, or seeds it, at {line}: a checkpoint "
            "replays a graph, in which they would be the same at each call. Draw with operators of "
            "PyTorch (torch.rand), or outside the function and pass the numbers in."
        )
    changes = _lasting(made)
    if not changes:
        return made
    if not any(change.is_of_trace for change in changes):
        for change in changes:
            change.redo()
        first, made = made, trace()
        if not _lasting(made) and made.num_draws == first.num_draws:
            return made
        changes = [*changes, *_lasting(made)]
    for change in reversed(changes):
        change.undo()
    change = changes[0]
    line = first_line_where(change.is_made, trace)
    change.undo()
    where = "" if line is None else f" at {line}"
    was = ", which it did not have" if change.before is MISSING else f", from {change.before!r}"
    raise LastingChangeError(
        f"{name} changes {_describe(change, made)}{where}{was}: a checkpoint "
        "replays a graph, which would leave it as it is. Keep it in a buffer that is written in "
        "place (self.count.add_(1)), return it, or change it outside what is checkpointed."
    )


def _lasting(made: TraceWithEffects) -> list[AttributeChange]:
    return list(made.paths.changes)


def _describe(change: AttributeChange, made: TraceWithEffects) -> str:
    owner = made.paths.name_of(change.module) or type(change.module).__name__
    return f"the attribute {change.name!r} of the module {owner}"


def _line_that_draws(source: RandomSource, trace: Callable[[], Any]) -> Source | None:
    """The user's line that draws; none if it was another thread, which draws when it likes."""
    before = RandomState([source])
    time.sleep(0.02)  # long enough for a thread that draws in a loop to get its turn
    if before.find_changed() is not None:
        return None
    lines = []
    for _ in range(2):
        source.draw()  # else setting the seed that it has would change nothing
        before = RandomState([source])
        lines.append(first_line_where(lambda s=before: s.find_changed() is not None, trace))  # type: ignore[misc]
    return lines[0] if lines[0] == lines[1] else None


def _sources_among(
    variables: Iterable[Binding], modules: Iterable[nn.Module]
) -> Iterator[RandomSource]:
    found: dict[int, RandomSource] = {}
    for variable in variables:
        value = variable.get()
        source = source_of(value, f"the {variable.label}")
        if source is not None:
            found.setdefault(id(value), source)
    for module in modules:
        for name, value in vars(module).items():
            source = source_of(value, f"{type(module).__name__}.{name}")
            if source is not None:
                found.setdefault(id(value), source)
    return iter(found.values())
