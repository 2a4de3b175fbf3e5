"""The common part of the callbacks for trainers: a policy on a model while it is trained.

`choose_policy` reads the options, `Session` has the policy, its report and the measured step, and
`SessionCallback` is the base class of both callbacks. `StepPeak` measures.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import nn

from torchremat.core.accelerators import has_streams, read_allocated_bytes
from torchremat.core.formatting import human_bytes
from torchremat.core.source import warn_user
from torchremat.errors import OptionError, UnmatchedWarning
from torchremat.nn.wrap import report
from torchremat.planning.budget import BudgetLike
from torchremat.planning.budget_policy import memory_budget
from torchremat.policies.module_selection import Select
from torchremat.policies.policy import Policy, PolicyLike, as_policy
from torchremat.remat.module_policies import PolicyByPattern
from torchremat.report.live_bytes import LiveBytes
from torchremat.report.report import Report

_logger = logging.getLogger("torchremat")

# The number of the step that is measured, from 0: the first one also traces and plans.
_MEASURED = 1


def choose_policy(
    policy: PolicyLike | PolicyByPattern | None, budget: BudgetLike | None, caller: str
) -> Policy | PolicyByPattern:
    """The one of both that is given, as a policy; `OptionError` (a `ValueError`) else."""
    if (policy is None) == (budget is None):
        given = "gives neither" if policy is None else f"gives both {policy!r} and {budget!r}"
        raise OptionError(
            f"{caller} {given}: give policy= (what may be saved: 'dots', 'names:attn', 'full' for "
            "nothing) or budget= (bytes of peak memory: '8GiB'), one of them"
        )
    if budget is not None:
        return memory_budget(budget)
    if isinstance(policy, Mapping):
        for each in policy.values():
            as_policy(each)
        return policy
    return as_policy(policy)


class Session:
    """A policy on a model from `begin` to `end`, with a report of it and a measured step.

    Attributes:
        policy: what may be saved, or a dict from selections to that.
        select: the submodules that the policy is for.
        report: the report of the first step, once it has run.
        peak_bytes: the most bytes alive at one time that the second step's forward and backward
            passes allocated, once they have run.
    """

    def __init__(self, policy: Policy | PolicyByPattern, select: Select | None) -> None:
        self.policy = policy
        self.select = select
        self.report: Report | None = None
        self.peak_bytes: int | None = None
        self._model: nn.Module | None = None
        self._undo: Callable[[], object] | None = None
        self._peak: StepPeak | None = None
        self._steps = 0

    @property
    def is_on(self) -> bool:
        return self._model is not None

    def begin(
        self, model: nn.Module, apply: Callable[[], list[str]], undo: Callable[[], object]
    ) -> None:
        """Put the policy on `model` by `apply`, after the end of a training that failed before."""
        self.end()
        self.report = self.peak_bytes = None
        self._steps = 0
        names = apply()
        self._model, self._undo = model, undo
        _logger.info("%s is on %s", _spell(self.policy), _list_names(names, model))

    def step_begins(self) -> None:
        """Begin to measure, in the second step."""
        if self._model is not None and self._steps == _MEASURED:
            self._peak = StepPeak(_device_of(self._model))
            self._peak.start()

    def passes_end(self) -> None:
        """Stop to measure: the forward and backward passes of a step have run."""
        if self._peak is not None and self._peak.is_running:
            self.peak_bytes = self._peak.stop()
            _logger.info("%s", self.summary())

    def step_ends(self) -> None:
        """Take the report, after the first step."""
        self.passes_end()
        if self._model is not None and self._steps == 0:
            self._take_report(self._model)
        self._steps += 1

    def _take_report(self, model: nn.Module) -> None:
        try:
            self.report = report(model)
        except RuntimeError as error:
            warn_user(
                f"{_spell(self.policy)} had no effect in the first step: {error}. The training "
                "calls another module than that: name it with select=",
                UnmatchedWarning,
            )
            return
        _logger.info("%s", self.summary())
        _logger.debug("%s", self.report)

    def end(self) -> None:
        if self._peak is not None and self._peak.is_running:
            self._peak.stop()
        self._peak = None
        if self._undo is not None:
            self._undo()
        self._model = self._undo = None

    def figures(self) -> dict[str, int]:
        """Bytes for a trainer's log, as far as the steps have run.

        `remat_saved_bytes` and `remat_recomputed_bytes` of the report, and `remat_peak_bytes`.
        """
        found = {}
        if self.report is not None:
            found["remat_saved_bytes"] = self.report.total
            found["remat_recomputed_bytes"] = self.report.by_decision().get("recomputed", 0)
        if self.peak_bytes is not None:
            found["remat_peak_bytes"] = self.peak_bytes
        return found

    def summary(self) -> str:
        """A line with the bytes saved and recomputed, and the measured peak.

        >>> Session(as_policy("dots"), None).summary()
        'dots: no step has run yet'
        """
        figures = self.figures()
        if not figures:
            return f"{_spell(self.policy)}: no step has run yet"
        parts = []
        if "remat_saved_bytes" in figures:
            saved, recomputed = figures["remat_saved_bytes"], figures["remat_recomputed_bytes"]
            parts.append(f"{human_bytes(saved)} saved, {human_bytes(recomputed)} recomputed")
        if "remat_peak_bytes" in figures:
            parts.append(f"measured peak of a step {human_bytes(figures['remat_peak_bytes'])}")
        return f"{_spell(self.policy)}: {', '.join(parts)}"


class SessionCallback:
    """The options and the results of a callback for a trainer.

    After `with callback:` the model is without the policy, also where a trainer fails and leaves it
    on.
    """

    def __init__(
        self,
        policy: PolicyLike | PolicyByPattern | None = None,
        *,
        budget: BudgetLike | None = None,
        select: Select | None = None,
    ) -> None:
        super().__init__()
        self._session = Session(choose_policy(policy, budget, "RematCallback"), select)

    @property
    def policy(self) -> Policy | PolicyByPattern:
        """The policy, or a dict from selections to policies."""
        return self._session.policy

    @property
    def report(self) -> Report | None:
        """The report of the first step, once it has run."""
        return self._session.report

    @property
    def peak_bytes(self) -> int | None:
        """The measured peak of a step in bytes, once two have run."""
        return self._session.peak_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._session.end()


def _spell(policy: Policy | PolicyByPattern) -> str:
    if isinstance(policy, Policy):
        return str(policy)
    return ", ".join(f"{pattern}: {value}" for pattern, value in policy.items())


def _list_names(names: list[str], model: nn.Module) -> str:
    shown = ", ".join(name or type(model).__name__ for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(model.parameters(), None)
    return torch.device("cpu") if tensor is None else tensor.device


class StepPeak:
    """The most bytes alive at one time that are allocated between `start` and `stop`.

    On a GPU the allocator counts them, beyond those that were allocated at the start. Elsewhere
    `LiveBytes` does, at each operator: for a step, not for a training.

    >>> peak = StepPeak(torch.device("cpu"))
    >>> peak.start()
    >>> x = torch.ones(256) + 1
    >>> peak.stop()
    2048
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: LiveBytes | None = None
        self._before: int | None = None

    @property
    def is_running(self) -> bool:
        return self._memory is not None or self._before is not None

    def start(self) -> None:
        if has_streams(self._device):
            torch.accelerator.reset_peak_memory_stats(self._device)
            self._before = read_allocated_bytes(self._device, "current")
        else:
            self._memory = LiveBytes()
            self._memory.__enter__()

    def stop(self) -> int:
        if self._memory is not None:
            memory, self._memory = self._memory, None
            memory.__exit__(None, None, None)
            return memory.peak
        assert self._before is not None, "it was not started"
        before, self._before = self._before, None
        return read_allocated_bytes(self._device, "peak") - before
