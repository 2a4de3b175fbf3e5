"""Calls that run as they are, on a tape: those that cannot be one graph, and would be too many.

range(n) over a size       a graph for each size, up to `FEW_TRACES`; then tapes
x[mask], if x.sum() > 0    no graph: tapes from the first call on
"""

from collections.abc import Callable
from typing import Any

from torchremat import _torch
from torchremat.api_util import StaticArguments
from torchremat.core.interrupts import hold_interrupts
from torchremat.core.source import warn_user
from torchremat.errors import RetraceWarning
from torchremat.policies.policy import Policy
from torchremat.remat.tape.taped_call import TapedCalls, allows_tape, find_policy, note_refusal
from torchremat.remat.tracing.calls import Call, is_in_plain_step
from torchremat.remat.tracing.function_trace import describe_fun
from torchremat.remat.tracing.guards.variables import roots_of
from torchremat.remat.tracing.new_trace import Subject
from torchremat.remat.tracing.retraces import find_why_retraced
from torchremat.remat.tracing.trace_cache import PolicyKey, Trace, Traces
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.tracing import trace_lock

_ON_TAPE = (
    "Calls that have no trace run as they are from now on, with a tape of their operators for the "
    "backward pass."
)


class TapeFallback:
    """The part of a checkpoint that runs calls for which there is no graph."""

    may_write_tape = True
    """Whether a call that cannot be one graph runs as it is, on a tape."""

    fun: Callable[..., Any]
    policy: Policy
    statics: StaticArguments
    module_prefix: str
    last_call: Any
    _key: PolicyKey
    _trace_cache: Traces

    def _call_refused(
        self, error: Exception | None, args: Any, kwargs: Any, kind: tuple[Any, ...] | None = None
    ) -> Any:
        """Call a function that is not a graph, as calls of this `kind` are; or raise `error`."""
        if error is None:
            return self.fun(*args, **kwargs)
        policy = find_policy(self.fun, self.policy, error) if self.may_write_tape else None
        if policy is None:
            raise error
        self.statics.refuse_tensors(args, kwargs)
        cache, is_last = self._trace_cache, True
        if kind is not None and not _torch.functorch_is_active():
            is_last = cache.gives_up(kind, error)
        self._begin_tapes(policy, has_begun=not is_last)
        if is_last:
            note_refusal(describe_fun(self.fun), error, self.policy, policy)
        return self._call_taped(args, kwargs, error)

    def _begin_tapes(self, policy: Policy, *, has_begun: bool) -> None:
        tapes = self._trace_cache.tapes
        if self._key not in tapes:
            roots = roots_of(self.fun, self._new_subject().variables)
            tapes[self._key] = TapedCalls(policy, roots, self.module_prefix, has_begun=has_begun)

    def _is_untraceable(self, kind: tuple[Any, ...]) -> bool:
        """Whether calls of this kind were refused before, and run on tapes."""
        cache = self._trace_cache
        return kind in cache.untraceable_keys and self._key in cache.tapes and allows_tape(self.fun)

    def _stops_tracing(self, call: Call) -> bool:
        """Whether `call` runs on a tape, since it has no trace and the function has too many."""
        cache = self._trace_cache
        if not (cache.may_stop and self.may_write_tape and is_in_plain_step()):
            return False
        with hold_interrupts(), trace_lock:
            if not allows_tape(self.fun) or self._find(call) is not None:
                return False
            policy = cache.job_of(self._key).on_tape()
            why = self._find_why_retraced(call, may_stop=True)
            if policy is None or not (why or cache.has_stopped):
                return False
            self._begin_tapes(policy, has_begun=True)
            if why:
                cache.warned = cache.has_stopped = True
                warn_user(f"{why} {_ON_TAPE}", RetraceWarning)
        return True

    def _find_why_retraced(self, call: Call, *, may_stop: bool = False) -> str | None:
        specs = tuple(InputSpec.of(t, any_level=True) for t in call.tensors)
        cache, name = self._trace_cache, describe_fun(self.fun)
        return find_why_retraced(name, cache, call, specs, self.fun, may_stop=may_stop)

    def _call_taped(self, args: Any, kwargs: Any, error: Exception | None = None) -> Any:
        tapes = self._trace_cache.tapes[self._key]
        result, summary = tapes.call(self.fun, args, kwargs, error)
        if summary is not None:
            self.last_call = summary
        return result

    def _find(self, call: Call) -> Trace | None:
        raise NotImplementedError

    def _new_subject(self) -> Subject:
        raise NotImplementedError
