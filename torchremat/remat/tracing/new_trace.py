"""Trace a call: the function on fake tensors, then the guards of the trace."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchremat.autodiff.joint import TraceOptions, is_differentiated
from torchremat.core.trees import Structure
from torchremat.errors import ConcretizationError
from torchremat.remat.escapes.read_watch import Spot, Watch, reads_unnoted
from torchremat.remat.tracing.calls import Call, ignore_numbers, is_number
from torchremat.remat.tracing.effects import trace_without_effects
from torchremat.remat.tracing.family import are_reads_known, may_be_shared
from torchremat.remat.tracing.function_trace import (
    FunctionTrace,
    TraceStart,
    describe_fun,
    trace_function,
)
from torchremat.remat.tracing.guards.entries import Binding
from torchremat.remat.tracing.guards.starting_point import StartingPoint
from torchremat.remat.tracing.trace_cache import Trace, build_trace, current_state
from torchremat.remat.tracing.unread import find_unread_numbers, forget_unread
from torchremat.tracing.dynamic_inputs import DynamicInputs
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.attribute_reads import AttributeReads


@dataclass(frozen=True, eq=False)
class Subject:
    """A function that is traced, with the variables that it reads."""

    fun: Callable[..., Any]
    variables: Sequence[Binding]
    around: Callable[..., Any] | None
    may_check: bool
    module_prefix: str
    read_spots: set[Spot]
    """Places that the function changes and reads; a trace may add others."""
    counts_calls: bool = False
    """Whether a counter that the function does not read counts calls, not traces."""
    may_be_shared: bool = False
    """Whether alike functions of other modules may be found, to share the trace with."""


def trace_call(
    subject: Subject,
    call: Call,
    structure: Structure,
    specs: tuple[InputSpec, ...],
    dynamic: DynamicInputs | None,
    options_of: Callable[[bool], TraceOptions],
    numbers: Collection[int] = (),
) -> Trace:
    """Trace `call` as `options_of` says, for any values of `numbers` that the function ignores.

    `numbers` are positions in the key of the call.
    """
    fun, prefix = subject.fun, subject.module_prefix
    with reads_unnoted():
        around = StartingPoint(fun, subject.variables, prefix, call.static_values)
    reads = AttributeReads(around.inside)
    state = current_state()

    def trace(*, with_gradients: bool) -> FunctionTrace:
        run = functools.partial(trace_once, options_of(with_gradients))
        return trace_without_effects(describe_fun(fun), run, subject.variables, around.inside)

    asked: list[list[str] | None] = [[]]

    def trace_once(
        options: TraceOptions,
        spots: Mapping[Spot, Any] = {},
        watches: Mapping[int, Watch] = {},
    ) -> FunctionTrace:
        own = (around.roots, spots, subject.around, subject.may_check, reads, watches, asked[-1])
        start = TraceStart(*own)
        return trace_function(fun, structure, specs, dynamic, start, options, call.tensors)

    made = _trace_again_if_asked(functools.partial(trace, with_gradients=state[0]), asked)
    if not state[0] and any(map(is_differentiated, made.result.tensors)):
        made = trace(with_gradients=True)  # it enables gradients itself
    again = functools.partial(trace_once, made.region.options)
    forget_unread(made, subject.read_spots, again, call.arguments, subject.counts_calls)
    call = _ignore_unread(made, call, numbers, functools.partial(again, {}))
    reads.close()
    known = reads if are_reads_known(made) else None
    may_share = subject.may_be_shared and may_be_shared(made, around.inside, known)
    return build_trace(made, around, call, specs, state, dynamic, known, may_be_shared=may_share)


def _ignore_unread(
    made: FunctionTrace,
    call: Call,
    positions: Collection[int],
    trace: Callable[[Mapping[int, Watch]], FunctionTrace],
) -> Call:
    """The call with a key for all numbers at those of the `positions` that `made` did not read."""
    in_order = [i for i, entry in enumerate(call.key) if is_number(entry)]
    unread = find_unread_numbers(made, map(in_order.index, positions), trace)
    return replace(call, key=ignore_numbers(call.key, [in_order[number] for number in unread]))


def _trace_again_if_asked(
    trace: Callable[[], FunctionTrace], asked: list[list[str] | None]
) -> FunctionTrace:
    """Trace, and again with `None` added to `asked` if a value is missing after a file was.

    A library that finds fake tensors may do without that value.
    """
    try:
        return trace()
    except ConcretizationError:
        if not asked[-1]:
            raise
    asked.append(None)
    return trace()
