"""Traces of one module that serve others which are built alike: the layers of a model.

A trace refers to its module through guards and captured tensors alone. `adopt` makes a trace of
another module from it, with the same region and the same programs, if all guards hold there too.
So a model of equal layers is traced and compiled once.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from torch import Tensor, nn

from torchremat.autodiff.bodies import FunctionBody
from torchremat.remat.tracing.calls import Call
from torchremat.remat.tracing.counterparts import Counterparts
from torchremat.remat.tracing.function_trace import FlatFunction
from torchremat.remat.tracing.given_scalars import WATCHED_KINDS, AttributeSlot, GivenScalars
from torchremat.remat.tracing.trace_cache import Kin, Trace, Traces, current_state
from torchremat.tracing.dynamic_inputs import is_alike
from torchremat.tracing.input_spec import InputSpec

# Each is compared module by module. Chosen by hand: a model has few kinds of layers of one class.
_MOST_REGIONS = 16


def module_of(fun: Callable[..., Any]) -> nn.Module | None:
    """The module that `fun` is, or a method of."""
    owner = fun.__self__ if isinstance(fun, MethodType) else fun
    return owner if isinstance(owner, nn.Module) else None


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a trace comes from: its function, and the modules of it by name."""

    flat: FlatFunction
    inside: tuple[tuple[str, weakref.ref[nn.Module]], ...]

    @classmethod
    def of(cls, flat: FlatFunction, fun: Callable[..., Any]) -> "Origin | None":
        """`None` where no other function can have the trace."""
        root = module_of(fun)
        if root is None or flat.escapes:
            return None
        return cls(flat, _refer(root))


def _refer(root: nn.Module) -> tuple[tuple[str, weakref.ref[nn.Module]], ...]:
    return tuple((name, weakref.ref(module)) for name, module in root.named_modules())


@dataclass(frozen=True, eq=False)
class _Sharer:
    """One function that has a region, by which the region can be traced again."""

    root: weakref.ref[nn.Module]
    flat: FlatFunction
    captured: Callable[[], Sequence[Tensor]]
    trace_holds: Callable[[], bool]


class _Sharers:
    """The functions that share a region. A later trace of it runs one that is as it was."""

    def __init__(self, body: FunctionBody) -> None:
        self._sharers: dict[int, _Sharer] = {}
        body.get_function = lambda: self._choose().flat
        body.captured = lambda: self._choose().captured()

    def add(self, trace: Trace, root: nn.Module, flat: FlatFunction) -> None:
        number, sharers = id(root), self._sharers

        def forget(_: weakref.ref[nn.Module]) -> None:
            sharers.pop(number, None)

        modules, variables = trace.modules, trace.variables
        sharers[number] = _Sharer(
            weakref.ref(root, forget),
            flat,
            trace.captured.current_tensors,
            lambda: modules.holds() and variables.holds(),
        )

    def _choose(self) -> _Sharer:
        sharers = [s for s in list(self._sharers.values()) if s.root() is not None]
        return next((s for s in sharers if s.trace_holds()), sharers[0])


def adopt(trace: Trace, fun: Callable[..., Any]) -> Trace | None:
    """`trace` as one of `fun`, if the two belong to modules that are built alike.

    Its guards may not hold for `fun`: the caller has to check them.
    """
    origin, root = trace.origin, module_of(fun)
    if origin is None or root is None or trace.is_sharded or not trace.still_holds():
        return None
    counterparts = Counterparts.of(origin.inside, root)
    captured = None if counterparts is None else trace.captured.for_other(counterparts)
    if counterparts is None or captured is None:
        return None
    flat = origin.flat.for_other(fun, root)
    return replace(
        trace,
        captured=captured,
        modules=trace.modules.for_other(counterparts),
        variables=trace.variables.for_other(counterparts),
        origin=Origin(flat, _refer(root)),
        tensor_guard=None,
        programs={},
    )


def find_adopted(
    own: Traces,
    call: Call,
    specs: tuple[InputSpec, ...],
    fun: Callable[..., Any],
    *,
    dynamic: bool,
) -> Trace | None:
    """A trace of a function like `fun` that serves this call; it is one of `fun` from now on."""
    state = current_state()
    for trace in _of_others(own):
        if trace.key != call.key or trace.state != state or (trace.dynamic and not dynamic):
            continue
        if trace.dynamic is None and trace.specs != specs:
            continue
        adopted = adopt(trace, fun)
        if adopted is not None and adopted.fits(call, specs, state, fun):
            _share(trace, adopted)
            own.add(adopted)
            return adopted
    return None


def _of_others(own: Traces) -> Iterator[Trace]:
    """Traces of functions like that of `own`, one of each region."""
    regions: set[int] = set()
    for traces in list(own.kin.members):
        for trace in () if traces is own else list(traces.traces):
            if id(trace.region) not in regions and len(regions) < _MOST_REGIONS:
                regions.add(id(trace.region))
                yield trace


def _share(trace: Trace, adopted: Trace) -> None:
    body = trace.region.body
    assert isinstance(body, FunctionBody) and adopted.origin is not None
    assert trace.origin is not None
    if trace.sharers is None:
        trace.sharers = _Sharers(body)
        _add_sharer(trace)
    adopted.sharers = trace.sharers
    _add_sharer(adopted)


def _add_sharer(trace: Trace) -> None:
    root = trace.origin.inside[0][1]()
    assert root is not None, "its trace has just been found to hold"
    trace.region.paths.rename(root)
    trace.sharers.add(trace, root, trace.origin.flat)


# --- what differs ----------------------------------------------------------------------------


def find_watch(
    own: Traces, call: Call, specs: tuple[InputSpec, ...], fun: Callable[..., Any]
) -> tuple[tuple[int, ...], tuple[AttributeSlot, ...]]:
    """The numbers and strings to watch in a new trace: leaves of `call`, and attributes.

    In these the call differs from another, and in nothing else but sizes. No trace has read them.
    """
    state = current_state()
    for trace in (*own.traces, *_of_others(own)):
        leaves = _differing_leaves(trace.key, call)
        if trace.state != state or not _are_alike(trace.specs, specs) or leaves is None:
            continue
        mine = trace if trace in own.traces else adopt(trace, fun)
        slots = None if mine is None else mine.modules.find_unequal()
        if mine is None or slots is None or not mine.variables.holds():
            continue
        found = own.kin.without_read(call, leaves, slots)
        if any(found):
            return found
    return (), ()


def trace_watched(
    trace: Callable[..., Trace],
    kin: Kin,
    call: Call,
    leaves: tuple[int, ...],
    slots: tuple[AttributeSlot, ...],
) -> Trace:
    """A trace that serves other numbers too in these places, as far as it does not read them.

    What it reads is part of the key again: it is traced anew with these in place.
    """
    while leaves or slots:
        given = GivenScalars(leaves, slots)
        try:
            found = trace(given=given)
        except Exception:  # what needs a real number, or a fault that the next trace has too
            given.give_up()
        if not given.is_read:
            return found
        kin.note_read(call, given.read_leaves, given.read_slots)
        leaves, slots = kin.without_read(call, leaves, slots)
    return trace(given=GivenScalars())


def _are_alike(known: Sequence[InputSpec], specs: Sequence[InputSpec]) -> bool:
    return len(known) == len(specs) and all(map(is_alike, known, specs))


def _differing_leaves(key: tuple[Any, ...], call: Call) -> list[int] | None:
    """The leaves in which a call differs from `key`; `None` if it differs in something else."""
    if len(key) != len(call.key):
        return None
    positions = {i for i in range(len(key)) if key[i] != call.key[i]}
    for i in positions:
        known, given = key[i], call.key[i]
        if type(known) is not tuple or type(given) is not tuple or known[0] is not given[0]:
            return None
        if given[0] not in WATCHED_KINDS:
            return None
    return [leaf for leaf, i in enumerate(call.leaves()) if i in positions]
