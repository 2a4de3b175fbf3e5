"""Random numbers that no operator draws: in a graph they would be the same at each call."""

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class RandomSource:
    """Something that drawing or seeding changes, with its state as bytes."""

    label: str
    get: Callable[[], bytes]
    set: Callable[[bytes], None]


class RandomState:
    """The states of random sources at some time."""

    def __init__(self, sources: Iterable[RandomSource]) -> None:
        self._states = [(source, source.get()) for source in sources]

    def changed(self) -> str | None:
        """The first source whose state is another, in words."""
        for source, state in self._states:
            if source.get() != state:
                return source.label
        return None

    def restore(self) -> None:
        """Set the states to what they were."""
        for source, state in self._states:
            source.set(state)


def global_sources() -> Iterator[RandomSource]:
    """Those of the whole process: Python's, NumPy's, PyTorch's default generators."""
    yield _pickled("Python's random module", random.getstate, random.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        yield _pickled("numpy.random", numpy.random.get_state, numpy.random.set_state)
    yield _generator("PyTorch's default generator", torch.default_generator)


def source_of(value: Any, label: str) -> RandomSource | None:
    """The source that `value` is, if it is one: `random.Random`, NumPy's and PyTorch's."""
    if isinstance(value, torch.Generator):
        return _generator(label, value)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _pickled(label, value.getstate, value.setstate)
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        return _pickled(label, value.get_state, value.set_state)
    if isinstance(value, numpy.Generator):
        bits = value.bit_generator
        return _pickled(label, lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def _pickled(label: str, get: Callable[[], Any], set_: Callable[[Any], None]) -> RandomSource:
    return RandomSource(label, lambda: pickle.dumps(get()), lambda state: set_(pickle.loads(state)))


def _generator(label: str, generator: torch.Generator) -> RandomSource:
    def set_(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return RandomSource(label, lambda: generator.get_state().numpy().tobytes(), set_)
