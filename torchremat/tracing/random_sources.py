"""Random numbers that no operator draws: in a graph they would be the same at each call."""

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchremat import _torch


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
