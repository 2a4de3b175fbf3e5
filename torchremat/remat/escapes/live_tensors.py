"""Tensors of a trace that something still holds when the function is over, found by their counts.

`Reach` knows where functions usually leave tensors. Other places are found here, by the references
to a tensor that should be garbage: an object with slots, a generator, a list of the caller alone.
They are an error with the line of the operator that made the tensor.
"""

import functools
import gc
import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from contextvars import Context
from types import FrameType, GeneratorType
from typing import Any

from torch import Tensor, fx, nn

from torchremat import _torch
from torchremat.core.source import is_user_file
from torchremat.errors import EffectError
from torchremat.graph.notes import notes_of
from torchremat.tracing.tracing import Tracing

_CACHED = type(functools.lru_cache(lambda: None))
# Objects of these packages serve the trace in progress, and lead nowhere.
_OF_TRACES = ("torchremat.remat.", "torchremat.tracing.", "torchremat.autodiff.")
# Chosen by hand: a tuple in a list in an object in a dict has four.
_MOST_LEVELS = 10
# Chosen by hand: more objects refer to what is common, and lead nowhere.
_MOST_REFERRERS = 200


def count_references(tensors: Sequence[Tensor]) -> dict[int, int]:
    """How many references Python has to each of `tensors`, by identity."""
    return {id(t): sys.getrefcount(t) - (_torch.tensor_uses(t) > 1) for t in tensors}


class LastingChangeError(EffectError):
    """A call left attributes of modules changed.

    The next call may leave them alone, as where `forward` fills a cache when it is first called.
    """


class LiveTensors:
    """Finds tensors of `tracing` that are alive though nothing known holds them."""

    def __init__(self, tracing: Tracing, arguments: Sequence[Tensor]) -> None:
        self._tracing = tracing
        self._arguments = count_references(arguments)

    def refuse_kept(
        self, arguments: Sequence[Tensor], held: Sequence[Sequence[Tensor]]
    ) -> list[Any]:
        """Raise if something holds a tensor, besides the lists in `held`; return caches that do."""
        now = count_references(arguments)
        known = {key: now[key] - count for key, count in self._arguments.items()}
        tracing = self._tracing
        bound = [t for binding in tracing.bindings for t in binding.values()]
        captured = Counter(map(id, [*tracing.captured_inputs, *bound]))
        del bound
        live: list[Tensor] = list(tracing.tracer.tensor_tracker.keys())
        if not live:
            return []
        counts = count_references(live)
        expected = 3  # a list, a loop and a call
        for key in [id(tensor) for tensors in held for tensor in tensors]:
            captured[key] += 1
        kept = []
        for tensor in live:
            key = id(tensor)
            allowed = captured[key]
            if key in known:
                is_kept = known[key] > allowed
            elif key in self._tracing.placeholders and not allowed:
                continue  # a leaf, for which the function is given another tensor
            else:
                is_kept = counts[key] > expected + allowed
            if is_kept:
                kept.append(tensor)
        del tensor
        return self._refuse(kept, [live, kept, *held, arguments]) if kept else []

    def _refuse(self, kept: Sequence[Tensor], own: list[Any]) -> list[Any]:
        # A search reads the whole heap, some 50 ms: one for all, and most find nothing.
        if _find_holder(kept, own) is None:
            return []
        caches = []
        for tensor in kept:
            holder = _find_holder([tensor], own)
            if isinstance(holder, _CACHED):
                caches.append(holder)
            elif holder is not None:
                node = self._tracing.node_of(tensor)
                line = None if node is None else notes_of(node).source
                raise LastingChangeError(
                    f"a tensor made at {line} is still in {holder} when the function has run: a "
                    "checkpoint replays a graph, and cannot put the tensor of each call there. "
                    "Return it, or keep it in an attribute, a list or a dict that the function "
                    "refers to."
                )
        return caches


def _find_holder(tensors: Sequence[Tensor], own: list[Any]) -> Any:
    """A holder of `tensors` that outlives the function, in words, or a cache; `None` for garbage.

    Chains of references lead up from the tensors. Autograd's records and frames of this package
    lead nowhere.
    """
    frames = _frames_around()
    ignored = {id(own), *map(id, own)}
    level: list[Any] = list(tensors)
    most = _MOST_REFERRERS * len(level)
    seen: set[int] = set()
    for _ in range(_MOST_LEVELS):
        above: list[Any] = []
        for value in gc.get_referrers(*level):
            if id(value) in ignored or id(value) in seen or value is level:
                continue
            seen.add(id(value))
            kind = value if isinstance(value, type) else type(value)
            if str(kind.__module__).startswith(_OF_TRACES):
                continue
            if isinstance(value, _CACHED):
                return value
            word = _root(value)
            if word is not None:
                return word
            for name, variables in frames:
                if id(value) in variables:
                    return f"a variable of {name}, which called the function"
            if not isinstance(value, FrameType):
                above.append(value)
        if not above or len(above) > most:
            return None
        level = above
        ignored.add(id(level))
    return None


def _frames_around() -> list[tuple[str, set[int]]]:
    """The user's functions that are running, by name, with the identities of their variables."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_own(frame.f_globals.get("__name__", "")):
            frames.append((frame.f_code.co_name, _ids_of_variables(frame)))
        frame = frame.f_back
    return frames


def _ids_of_variables(frame: FrameType) -> set[int]:
    names = frame.f_locals
    found = set(map(id, names.values()))
    # Up to Python 3.12 this is a copy that stays with the frame, and keeps what the user deletes.
    # Three references to it: the frame's, ours and that of the call. With more, it is the user's.
    is_copy = type(names) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(names) <= 3:
        names.clear()
    return found


def _root(value: Any) -> str | None:
    if isinstance(value, GeneratorType) and is_user_file(value.gi_code.co_filename):
        return f"the generator {value.__name__}, which has not ended"
    kind = value if isinstance(value, type) else type(value)
    if kind is nn.Module or issubclass(kind, fx.GraphModule):
        return None  # of a tracer of PyTorch's, for the body of a scan
    if isinstance(value, nn.Module | type):
        return f"an attribute of {kind.__name__}"
    if isinstance(value, Context):
        return "a context variable"
    if isinstance(value, dict) and "__builtins__" in value and "__name__" in value:
        name = str(value["__name__"])
        return None if _is_own(name) else f"a variable of the module {name}"
    return None


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "torchremat")
