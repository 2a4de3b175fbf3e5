"""Why a function is traced again and again: for a warning, and to stop tracing it."""

from collections.abc import Callable, Sequence
from typing import Any

from torchremat.remat.tape.refused_kinds import forget_passing_values
from torchremat.remat.tracing.calls import Call, differing_numbers
from torchremat.remat.tracing.trace_cache import (
    FEW_TRACES,
    MANY_TRACES,
    Trace,
    Traces,
    current_state,
)
from torchremat.tracing.dynamic_inputs import is_alike
from torchremat.tracing.input_spec import InputSpec


def find_why_retraced(
    name: str,
    known: Traces,
    call: Call,
    specs: Sequence[InputSpec],
    function: Callable[..., Any],
    *,
    may_stop: bool = False,
) -> str | None:
    """Say why the function has many traces that are alike but for one thing, if it has.

    Fewer will do for sizes of which each is sure to have its own, if it `may_stop` being traced.
    `None` also if that was warned of already.
    """
    if known.warned or len(known.traces) < FEW_TRACES:
        return None
    state = current_state()
    similar = [trace for trace in known.traces if trace.state == state]
    few = FEW_TRACES if may_stop and _are_sizes_read(similar, known) else MANY_TRACES
    for count, reason, most in (
        (*_for_numbers(similar, call, specs), MANY_TRACES),
        (*_for_state(similar, call, specs, function), MANY_TRACES),
        (*_for_sizes(similar, call, specs, known), few),
        (*_for_objects(similar, call, specs), FEW_TRACES if may_stop else MANY_TRACES),
        (*_for_values(similar, call, specs), MANY_TRACES),
        (len(similar), _SEVERAL, 2 * MANY_TRACES),
    ):
        if count >= most:
            return f"{name} has been traced {count} times for {reason}"
    return None


_SEVERAL = (
    "calls that differ in several things: sizes, numbers or texts among the arguments, or what "
    "else it reads. Each combination costs a trace: pass tensors in place of numbers, and pad."
)


def _are_sizes_read(traces: Sequence[Trace], known: Traces) -> bool:
    """Whether sizes are known to be read as numbers, or to have no graph in common."""
    return bool(known.fixed) or any(t.dynamic is not None and t.dynamic.fixed for t in traces)


def _for_numbers(
    traces: Sequence[Trace], call: Call, specs: Sequence[InputSpec]
) -> tuple[int, str]:
    keys = {
        t.key
        for t in traces
        if t.specs == specs and t.key != call.key and differing_numbers(t.key, call.key)
    }
    return len(keys), (
        "different Python numbers among its arguments. Each new number costs a trace: pass a "
        "tensor instead (torch.tensor(value)), if the function only computes with it."
    )


def _for_objects(
    traces: Sequence[Trace], call: Call, specs: Sequence[InputSpec]
) -> tuple[int, str]:
    asked = forget_passing_values(call.key)
    found = [
        t
        for t in traces
        if t.specs == specs and t.key != call.key and forget_passing_values(t.key) == asked
    ]
    kinds = sorted({kind.__name__ for kind in asked if isinstance(kind, type)})
    return len(found), (
        f"an argument that is another object in each call ({', '.join(kinds)}), and equal to none "
        "before. A trace is for the object that it saw: pass the tensors in it, hand the same "
        "object over, or give its class __eq__ and __hash__."
    )


def _for_state(
    traces: Sequence[Trace],
    call: Call,
    specs: Sequence[InputSpec],
    function: Callable[..., Any],
) -> tuple[int, str]:
    changed = [
        what
        for t in traces
        if t.key == call.key and t.specs == specs and (what := t.what_changed(call, function))
    ]
    last = changed[0] if changed else ""
    return len(changed), (
        f"calls that differ in nothing but what it reads besides its arguments: {last} changes. "
        "Each new value costs a trace: pass it as a tensor, or keep it out of the function."
    )


def _for_values(traces: Sequence[Trace], call: Call, specs: Sequence[InputSpec]) -> tuple[int, str]:
    same = [t for t in traces if t.key == call.key and t.specs == specs and t.still_holds()]
    return sum(bool(t.value_guards) for t in same), (
        "calls that differ in the truth values of masks that it branches on. Each combination "
        "costs a trace: choose by torch.where or torch.cond."
    )


def _for_sizes(
    traces: Sequence[Trace], call: Call, specs: Sequence[InputSpec], known: Traces
) -> tuple[int, str]:
    is_read = _are_sizes_read(traces, known)

    def is_like(trace: Trace) -> bool:
        if is_read:  # each size has its own trace, whatever numbers come with it
            return differing_numbers(trace.key, call.key) is not None
        return known.may_share_numbers(trace, call)

    differing = [
        t
        for t in traces
        if is_like(t)
        and len(t.specs) == len(specs)
        and all(map(is_alike, t.specs, specs))
        and t.specs != specs
    ]
    fixed = sorted({place for t in differing if t.dynamic for place in t.dynamic.fixed})
    where = ", ".join(f"dimension {dim} of tensor {i}" for i, dim in fixed)
    if known.fixed:
        return len(differing), (
            "different sizes, since no graph for many sizes could be made "
            f"({next(iter(known.fixed.values()))}). Pad, or use few sizes."
        )
    if not fixed:
        return len(differing), (
            "different sizes. One graph serves many sizes only outside torch.func, forward-mode "
            "derivatives and other traces, and where inductor does not compile it: pad, or use few "
            "sizes; code for many sizes is that of torch.compile(dynamic=True)."
        )
    return len(differing), (
        f"different sizes ({where}, counted among the arguments), since it needs their values as "
        "Python numbers: range(x.shape[0]), int(x.shape[0]), math.sqrt(x.shape[0]). Compute with "
        "tensors or with the sizes themselves (x.shape[0] ** 0.5), or pad."
    )
