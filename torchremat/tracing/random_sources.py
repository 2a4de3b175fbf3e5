"""Random numbers that no operator draws: in a graph they would be the same at each call."""

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchremat import _torch
from torchremat.core.accelerators import (
    get_accelerator_states,
    get_generator_state,
    set_generator_state,
)
from torchremat.core.source import Source, current_source
from torchremat.errors import EffectError
from torchremat.graph.nodes import attribute


@dataclass(frozen=True, eq=False)
class RandomSource:
    """Something that drawing or seeding changes, with its state as bytes."""

    label: str
    get: Callable[[], bytes]
    set: Callable[[bytes], None]
    draw: Callable[[], object]


class RandomState:
    def __init__(self, sources: Iterable[RandomSource]) -> None:
        self._states = [(source, source.get()) for source in sources]

    def find_changed(self) -> RandomSource | None:
        for source, state in self._states:
            if source.get() != state:
                return source
        return None

    def restore(self) -> None:
        for source, state in self._states:
            source.set(state)


def global_sources() -> Iterator[RandomSource]:
    yield _pickle_states("Python's random module", random.getstate, random.setstate, random.random)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield _pickle_states("numpy.random", numpy.get_state, numpy.set_state, numpy.random)
    yield _generator("PyTorch's default generator", torch.default_generator)


def source_of(value: Any, label: str) -> RandomSource | None:
    if isinstance(value, torch.Generator):
        return _generator(label, value)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _pickle_states(label, value.getstate, value.setstate, value.random)
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        return _pickle_states(label, value.get_state, value.set_state, value.random_sample)
    if isinstance(value, numpy.Generator):
        bits = value.bit_generator

        def set_(state: Any) -> None:
            bits.state = state

        return _pickle_states(label, lambda: bits.state, set_, value.random)
    return None


def _pickle_states(
    label: str, get: Callable[[], Any], set_: Callable[[Any], None], draw: Callable[[], object]
) -> RandomSource:
    return RandomSource(
        label, lambda: pickle.dumps(get()), lambda state: set_(pickle.loads(state)), draw
    )


def _generator(label: str, generator: torch.Generator) -> RandomSource:
    def get() -> bytes:
        with _torch.isolate():  # it may run in the middle of a trace
            return generator.get_state().numpy().tobytes()

    def set_(state: bytes) -> None:
        with _torch.isolate():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def draw() -> None:
        with _torch.isolate():
            torch.rand((), generator=generator, device=generator.device)

    return RandomSource(label, get, set_, draw)


def _is_seeded(before: Tensor, now: Tensor) -> bool:
    """Whether more was done to the generator of a GPU than to draw: it is a seed and an offset."""
    if before.numel() != 16 or now.numel() != 16:
        return False
    seed, offset = before.view(torch.int64).tolist()
    new_seed, new_offset = now.view(torch.int64).tolist()
    return bool(new_seed != seed or new_offset < offset)


class DrawWatch:
    """Notices a generator that is seeded or restored between the draws of a traced function.

    A graph draws from a generator as it is at each call. An operator of a trace draws nothing, so a
    number is drawn in its place: a generator that then is in another state was set to it.
    """

    def __init__(self, root: nn.Module, is_known: Callable[[torch.Generator], bool]) -> None:
        self._root = root
        self._is_known = is_known
        self._default = _generator("PyTorch's default generator", torch.default_generator)
        self._watched: dict[int, tuple[RandomSource, bytes]] = {}
        self._expected: dict[int, bytes] = {
            _torch.generator_id(torch.default_generator): self._default.get()
        }
        self._last: Source | None = None
        self._on_devices = get_accelerator_states()
        """PyTorch runs operators without a rule for shapes on real tensors, and they draw there."""

    def note(self, node: fx.Node) -> None:
        """Note an operator that a trace records, which may draw random numbers."""
        if not isinstance(node.target, _torch.OpOverload):
            return
        if torch.Tag.nondeterministic_seeded not in node.target.tags:
            return
        generator: Any = node.kwargs.get("generator")
        if isinstance(generator, fx.Node):
            generator = attribute(self._root, str(generator.target))
        source, line = self._default, current_source()
        if generator is None:
            generator = torch.default_generator
        elif generator is not torch.default_generator:
            source = _generator("a generator", generator)
            if not self._is_known(generator):
                raise EffectError(
                    f"a generator that the function makes draws at {line}: a checkpoint replays a "
                    "graph, in which it would go on from call to call. Make it outside, and seed "
                    "it there before each call."
                )
        before = source.get()
        key = _torch.generator_id(generator)
        if self._expected.get(key, before) != before:
            source.set(self._expected[key])
            raise _seeding_error(source.label, line)
        self._watched.setdefault(key, (source, before))
        source.draw()
        self._expected[key] = source.get()
        self._last = line

    def finish(self) -> None:
        """Restore the generators; raise if one was set after the last draw."""
        moved = [s.label for key, (s, _) in self._watched.items() if s.get() != self._expected[key]]
        for source, before in self._watched.values():
            source.set(before)
        self._watched.clear()
        for device, state in self._on_devices.items():
            with _torch.isolate():
                now = get_generator_state(device)
                if not torch.equal(now, state):
                    set_generator_state(device, state)
                    if _is_seeded(state, now):
                        moved.append(f"the default generator of {device}")
        if moved:
            raise _seeding_error(moved[0], self._last)


def _seeding_error(label: str, line: Source | None) -> EffectError:
    return EffectError(
        f"the function seeds {label}, or sets its state, around the draw at {line} (by "
        "manual_seed, set_rng_state or fork_rng): a checkpoint replays a graph, which draws from "
        "generators as they are. Seed outside of the checkpoint, or pass a generator to the draw."
    )
