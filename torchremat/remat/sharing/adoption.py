"""A trace for a module from that of an alike one, with its own parameters, guards and names.

What the trace of `layers.0` depends on is compared with what `layers.1` has. If all of it is alike,
the joint graph holds for `layers.1` as well, whose parameters are inputs like any. All else is of
the module's own: its guards, the body that derivatives are traced of, the decisions of its policy,
and the names in its report. Whatever cannot be compared is traced.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchremat.core.source import Source, current_source
from torchremat.core.trees import Structure
from torchremat.remat.escapes.escapes import Escapes
from torchremat.remat.escapes.read_watch import reads_unnoted
from torchremat.remat.sharing.alike_modules import AlikeModules
from torchremat.remat.sharing.shared_objects import lead_to
from torchremat.remat.tracing.calls import Call, is_in_plain_step
from torchremat.remat.tracing.function_trace import FunctionTrace, TraceStart, trace_as_before
from torchremat.remat.tracing.guards.starting_point import StartingPoint
from torchremat.remat.tracing.new_trace import Subject
from torchremat.remat.tracing.trace_cache import Trace, build_trace, current_state
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.attribute_reads import AttributeReads


@dataclass(frozen=True, eq=False)
class _Known:
    """A trace of a module, which it does not keep alive."""

    module: weakref.ref[nn.Module]
    trace: weakref.ref[Trace]
    kind: Any
    source: Source | None
    """The line that called the module: operators of the backward pass note it."""


class KnownTraces:
    """The traces that alike modules may share, by the function that is their `forward`."""

    def __init__(self) -> None:
        self._by_function: weakref.WeakKeyDictionary[Any, list[_Known]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, function: Any, module: nn.Module, kind: Any, trace: Trace) -> None:
        """Let modules whose `forward` is `function` find `trace`, of calls of one `kind`."""
        if trace.shared_reads is None or not is_in_plain_step():
            return
        known = self._by_function.setdefault(function, [])
        known[:] = [k for k in known if k.trace() is not None and k.module() is not None]
        known.append(_Known(weakref.ref(module), weakref.ref(trace), kind, current_source()))

    def like(self, function: Any, kind: Any) -> Iterator[tuple[nn.Module, Trace]]:
        """Yield traces for calls of this kind, here, newest first, with their modules."""
        source = current_source()
        for known in reversed(self._by_function.get(function, [])):
            if known.kind != kind or known.source != source:
                continue
            module, trace = known.module(), known.trace()
            if module is not None and trace is not None:
                yield module, trace


def adopt(
    subject: Subject,
    module: nn.Module,
    candidates: Iterator[tuple[nn.Module, Trace]],
    call: Call,
    structure: Callable[[], Structure],
    specs: tuple[InputSpec, ...],
) -> Trace | None:
    """A trace of `call` by `module` from one of `candidates`; `None` if none is shown to serve."""
    state = current_state()
    tried: set[int] = set()
    for other, trace in candidates:
        family = id(trace.region.joint)
        if family in tried or not trace.is_for(call, specs, state):
            continue
        with reads_unnoted():
            found = _share(subject, (other, module), trace, call, structure, specs)
        if found is not None and found.fits(call, specs, state, subject.fun):
            return found
        tried.add(family)
    return None


def _share(
    subject: Subject,
    modules: tuple[nn.Module, nn.Module],
    trace: Trace,
    call: Call,
    structure: Callable[[], Structure],
    specs: tuple[InputSpec, ...],
) -> Trace | None:
    reads, captured = trace.shared_reads, trace.captured.current()
    assert reads is not None
    alike = AlikeModules(*modules, reads)
    prefix = subject.module_prefix
    around = StartingPoint(subject.fun, subject.variables, prefix, call.static_values)
    if captured is None or not alike.are_alike or not _are_all(around.inside, alike):
        return None
    code = trace.code.globals_of
    found = [*alike.in_both.values(), *_class_attributes(alike, reads)]
    found += [getattr(subject.fun, "__func__", None), call.arguments]  # not its module
    if lead_to(alike.own, code, found):
        return None
    copied = reads.copy_to(alike.modules)
    start = TraceStart(around.roots, may_check=subject.may_check, reads=copied)
    result = trace.result
    body, region = trace_as_before(subject.fun, structure(), specs, start, trace.region, result)
    own = [alike.twin_of(tensor) for tensor in captured]
    parts = region, result, body, own, region.paths
    made = FunctionTrace(subject.fun, *parts, escapes=Escapes(), watches={}, code=code)
    state = current_state()
    call = replace(call, key=trace.key)  # which is for other numbers as well
    return build_trace(made, around, call, specs, state, trace.dynamic, copied, may_be_shared=True)


def _are_all(modules: Iterable[nn.Module], alike: AlikeModules) -> bool:
    """Whether `modules`, which a function starts from, are those that were compared."""
    return set(map(id, modules)) == {id(second) for _, second in alike.modules}


def _class_attributes(alike: AlikeModules, reads: AttributeReads) -> Iterator[Any]:
    """The values that classes of the modules have under the names that were read."""
    for module, _ in alike.modules:
        for name in reads.names_of(module) or ():
            for kind in type(module).__mro__:
                if name in vars(kind):
                    yield vars(kind)[name]
