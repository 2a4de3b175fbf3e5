"""A call that writes a tape: what `checkpoint` does with a function that cannot be one graph."""

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchremat import _torch, config
from torchremat.core.source import source_of_error
from torchremat.errors import (
    ArgumentValueError,
    ConcretizationError,
    EffectError,
    GraphError,
    ParallelModuleError,
    TorchrematError,
    TraceError,
)
from torchremat.policies.checkpoint_name import listen_to_names
from torchremat.policies.policy import Policy
from torchremat.remat.tape.checksum import Checksum, WholeValue
from torchremat.remat.tape.limited_calls import LimitingPolicy
from torchremat.remat.tape.recorder import Recorder
from torchremat.remat.tape.rerun import unpack
from torchremat.remat.tape.surroundings import Surroundings
from torchremat.remat.tape.tape import TapeSummary
from torchremat.remat.tape.tape_decisions import TapeDecisions
from torchremat.tracing.inner_checkpoints import CallOnly

log = logging.getLogger("torchremat")

_CURE = (
    "torchremat.config.untraceable = 'tape' lets a checkpoint run such a function as it is, and "
    "record its operators for the backward pass. A wrapped module (torchremat.nn.wrap) runs so."
)

# Calls whose recomputed values are checked by sums. Chosen by hand: what writes unseen does so from
# the first call on, and the first may be one whose gradients nobody asks for.
_MOST_CHECKED = 4

_OF_THE_FUNCTION = (ConcretizationError, EffectError, GraphError, TraceError)


def find_policy(fun: Callable[..., Any], policy: Policy, error: Exception) -> Policy | None:
    """The policy on a tape of `fun`, which was refused with `error`; `None`: there is no tape.

    What is wrong with a policy or with the arguments of `checkpoint` is wrong without a trace too.
    An error that is not ours may be PyTorch's of fake tensors; else the function raises it again.
    Those who trace want a graph, and have no values.
    """
    is_refusal = isinstance(error, _OF_THE_FUNCTION) and not isinstance(error, ParallelModuleError)
    is_in_trace = _torch.innermost_proxy_mode() is not None or _torch.is_faking()
    if is_in_trace or not (is_refusal or not isinstance(error, TorchrematError)):
        return None
    if not allows_tape(fun):
        if is_refusal:
            error.add_note(_CURE)
        return None
    return policy.on_tape()


def records_gradients() -> bool:
    """Whether autograd alone records what runs: else there is nothing to save, or no way to."""
    return (
        torch.is_grad_enabled()
        and not _torch.functorch_is_active()
        and not _torch.in_dual_level()
        and not torch.is_inference_mode_enabled()
    )


def allows_tape(fun: Callable[..., Any]) -> bool:
    """Whether `config.untraceable` asks for a tape of `fun`."""
    setting = config.untraceable
    if setting not in ("modules", "tape", "error"):
        raise ArgumentValueError(
            f"config.untraceable is 'modules', 'tape' or 'error', but it is {setting!r}"
        )
    return setting == "tape" or (setting == "modules" and _is_of_module(fun))


def _is_of_module(fun: Callable[..., Any]) -> bool:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return isinstance(getattr(fun, "__self__", fun), nn.Module)


class TapedCalls:
    """Calls of one function that write tapes, with what they have in common."""

    def __init__(
        self,
        policy: Policy,
        roots: Sequence[tuple[str, nn.Module]],
        prefix: str,
        *,
        has_begun: bool = False,
    ) -> None:
        """`has_begun` says that limits which cannot be met are warned of and no errors."""
        self._decisions = TapeDecisions(policy, Surroundings(prefix, roots))
        self._handler = CallOnly(warns=True)
        self.policy = policy
        self.job = policy.begin_tapes(has_begun) if isinstance(policy, LimitingPolicy) else None
        """The limits that its calls have in common, if the policy limits bytes."""
        self._has_checked_names = False
        self._num_checked = 0

    def call(
        self, fun: Callable[..., Any], args: Any, kwargs: Any, error: Exception | None = None
    ) -> tuple[Any, TapeSummary | None]:
        """The result of `fun`, and what was saved, if autograd records it.

        Where `torch.func` refuses `fun` as it is, `error` is raised, which names the line.
        """
        if error is not None and _torch.functorch_is_active():
            try:
                return fun(*args, **kwargs), None
            except RuntimeError as refused:
                raise error from refused
        if not records_gradients():
            return fun(*args, **kwargs), None
        recorder = Recorder(self._decisions, self._find_check(), self.job)
        with (
            listen_to_names(recorder.name),
            _torch.handle_checkpoints(self._handler),
            _torch.handle_function_calls(recorder.call_function),
            self._decisions.surroundings.above(sys._getframe()),
            recorder.recording(),
            torch.autograd.graph.saved_tensors_hooks(recorder.pack, unpack),
        ):
            result = fun(*args, **kwargs)
            recorder.settle(result)
        if not self._has_checked_names:
            self._has_checked_names = True
            self._decisions.warn_of_unmatched()
        return result, recorder.tape.summary

    def _find_check(self) -> type[Checksum | WholeValue] | None:
        if config.verify_recomputation is not None:
            return WholeValue
        self._num_checked += 1
        return Checksum if self._num_checked <= _MOST_CHECKED else None


_noted: set[tuple[str, str]] = set()


def note_refusal(name: str, error: Exception, asked: Policy, policy: Policy) -> None:
    """Log, once for each function and reason, that it is not a graph and why."""
    line = source_of_error(error)
    text = str(error).strip().partition("\n")[0]
    if (name, text) in _noted:
        return
    _noted.add((name, text))
    where = f" at {line}" if line else ""
    instead = (
        "" if str(policy) == str(asked) else f" {asked} needs a graph: {policy} is in its place."
    )
    log.warning(
        "%s cannot be one graph (%s%s: %s). Its checkpoint runs it as it is and writes a tape of "
        "its operators, which the backward pass runs again; a graph is faster where one can be.%s",
        name, type(error).__name__, where, text, instead,
    )  # fmt: skip
