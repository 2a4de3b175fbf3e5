"""A budget over the calls of one function that writes tapes.

call 1   all is saved, under the limit; then the tape is known: a plan is made and obeyed
call 2   values at the places of the plan are saved, others recomputed
call 3   other experts are chosen: values at new places are as those of alike modules
         the tape is simulated with its real sizes; what is above the budget is dropped
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torchremat.core.formatting import human_bytes, human_seconds
from torchremat.core.source import warn_user
from torchremat.errors import BudgetError, BudgetWarning
from torchremat.planning.costs.op_signature import OpSignature, signature_of_call
from torchremat.planning.problem.trial import Evaluated
from torchremat.planning.tapes.tape_plan import NO_LIMIT, Crossing, TapeLimits, TapePlanner
from torchremat.planning.tapes.tape_problem import TapeStep
from torchremat.remat.tape.contents import Blank, Content, Entry, Read
from torchremat.remat.tape.limited_calls import TapeCall, TapeJob, TapeRecord
from torchremat.remat.tape.tape_decisions import Site

_logger = logging.getLogger("torchremat")

# A call that is so many times as large as the one that was planned for gets a plan of its own.
# Chosen by hand: below, dropping a few values more than were planned takes less time than a plan.
_GROWTH = 1.1
# What plans use of the limit after a call above it with the last plan: this part, or less if the
# call was further above. Plans are made so a few times at most: each takes as long as some steps.
# Chosen by hand.
_LOWER = 0.98
# Plans that are made so. Chosen by hand.
_MOST_LOWERED = 6
# Walls of a call that has no plan yet. More save more of what would rather be dropped, and fewer
# let the backward pass recompute more at once. Chosen by hand.
_MOST_WALLS = 24
# A backward pass takes twice the time of its forward pass, roughly: two products for each.
_TIMES_FORWARD = 3


class BudgetOfPeak(Protocol):
    """A budget as a user wrote it: `planning.budget.Budget`."""

    @property
    def nbytes(self) -> int | None: ...
    @property
    def fraction(self) -> float | None: ...
    @property
    def added(self) -> float | None: ...
    @property
    def is_relative(self) -> bool: ...
    @property
    def is_searched(self) -> bool: ...

    def bytes_of(self, plain_peak: int) -> int: ...


@dataclass(frozen=True)
class TapeOptions:
    """The options of a policy: its text for messages, its limits, and what operators cost."""

    text: str
    budget: BudgetOfPeak | None
    saved: int | None
    is_strict: bool
    """Whether a later call that cannot be met is an error."""
    seconds_of_call: Callable[[OpSignature], float]
    resident: int = 0
    """The bytes that are there beside the step, and count."""
    limit: int | None = None
    """The bytes of the budget, if they were fixed before."""
    largest: int | None = None
    """The peak without rematerialisation of the step that fixed them."""


@dataclass(frozen=True)
class TapePlan:
    """Where values are saved, of the call that it was made for.

    Attributes:
        plain_peak: the peak of that call without rematerialisation.
        is_plain: whether all is saved that autograd saves.
        saved: the values that are saved, as numbers of places and counts.
        known: the counts at each place.
        shares: of each place, and of each that is alike, the part of the bytes that is saved.
    """

    plain_peak: int
    is_plain: bool
    saved: frozenset[tuple[int, int]]
    known: dict[int, int]
    shares: dict[int, float]

    def lets_save(self, place: Site, count: int) -> bool:
        if count < self.known.get(place.number, 0):
            return (place.number, count) in self.saved
        share = self.shares.get(place.number, self.shares.get(place.alike, 1.0))
        return share > 0.5


def _make_plan(step: TapeStep, chosen: Evaluated, plain: Evaluated) -> TapePlan:
    saved: set[tuple[int, int]] = set()
    known: dict[int, int] = {}
    all_bytes: Counter[int] = Counter()
    saved_bytes: Counter[int] = Counter()
    needed = step.problem.needed
    for v, content in enumerate(step.contents):
        if content is None or content.place is None:
            continue
        place = content.place
        known[place.number] = max(known.get(place.number, 0), content.count + 1)
        for number in {place.number, place.alike}:
            if v in needed or v in chosen.decisions.saved:
                all_bytes[number] += content.nbytes + 1
            if v in chosen.decisions.saved:
                saved_bytes[number] += content.nbytes + 1
        if v in chosen.decisions.saved:
            saved.add((place.number, content.count))
    shares = {number: saved_bytes[number] / total for number, total in all_bytes.items()}
    is_plain = chosen is plain
    return TapePlan(plain.costs.peak, is_plain, frozenset(saved), known, shares)


@dataclass(eq=False)
class TapeBudgetJob(TapeJob):
    """The bytes of a budget, and the plan for it.

    Attributes:
        limit: the bytes for the step alone, once they are known.
    """

    options: TapeOptions
    num_plans: int = 0
    seconds: float = 0.0
    plan: TapePlan | None = None
    limit: int | None = None
    _largest: int | None = None
    _aim: float = 1.0
    """The part of the limit that plans use; the rest is for calls that are larger in places."""
    _num_lowered: int = 0
    has_begun: bool = False
    _has_warned: bool = False
    _seconds: dict[OpSignature, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget, self.saved = self.options.budget, self.options.saved
        given = None if self.budget is None else self.budget.nbytes
        limit = given if self.options.limit is None else self.options.limit
        self.limit = None if limit is None else limit - self.options.resident
        self._largest = self.options.largest

    def begin_call(self) -> "TapeBudgetCall":
        return TapeBudgetCall(self)

    def seconds_of(self, entry: Entry) -> float:
        signature = _signature_of(entry)
        found = self._seconds.get(signature)
        if found is None:
            found = self._seconds[signature] = self.options.seconds_of_call(signature)
        return found

    # --- limits ---

    def has_new_limit(self, planner: TapePlanner) -> bool:
        """Whether this call is the largest so far, of which a relative budget is."""
        is_largest = self._largest is None or planner.plain.costs.peak > self._largest
        return is_largest and self.budget is not None and self.budget.is_relative

    def fix_limit(self, planner: TapePlanner) -> None:
        """Fix the bytes of a relative budget by the largest call so far."""
        budget, plain = self.budget, planner.plain.costs.peak
        if budget is None or not self.has_new_limit(planner):
            return
        self._largest = plain
        if budget.fraction is not None:
            resident = self.options.resident
            self.limit = max(0, budget.bytes_of(plain + resident) - resident)
            return
        allowed = float("inf")
        if budget.added is not None:
            problem = planner.problem
            allowed = budget.added * _TIMES_FORWARD * problem.seconds_of(problem.forward)
        limits = TapeLimits(seconds=allowed, is_least=True, room=planner.room)
        self.limit = limits.peak_of(planner.find(limits))

    @property
    def limits(self) -> TapeLimits:
        peak = NO_LIMIT if self.limit is None else self.limit
        return TapeLimits(peak, NO_LIMIT if self.saved is None else self.saved)

    # --- plans ---

    def serves(self, planner: TapePlanner) -> bool:
        """Whether there is a plan for calls as large as this one."""
        plan = self.plan
        return plan is not None and planner.plain.costs.peak <= _GROWTH * plan.plain_peak

    def aim_lower(self, trial: Evaluated, step: TapeStep, planner: TapePlanner) -> None:
        """Let plans leave room for calls such as this one, which exceeded a limit with the last."""
        if self._num_lowered < _MOST_LOWERED:
            self._num_lowered += 1
            self._aim *= min(_LOWER, self.limits.peak / trial.costs.peak)
            self.make_plan(step, planner)

    def make_plan(self, step: TapeStep, planner: TapePlanner) -> None:
        """Plan for a call; it may raise `BudgetError`."""
        limits = replace(self.limits, room=planner.room)
        start = time.monotonic()
        found = planner.find(replace(limits, peak=int(limits.peak * self._aim)))
        self.plan = _make_plan(step, found, planner.plain)
        if found is not planner.plain:
            self.num_plans += 1
            self.seconds += time.monotonic() - start
            _logger.info("%s: %s", self.options.text, self.describe())
        if limits.excess_of(found, planner.problem):
            self._refuse(limits.peak_of(found), planner, found)
        self.has_begun = True

    def _refuse(self, least: int, planner: TapePlanner, found: Evaluated) -> None:
        """Raise, or warn once, of a call that no plan keeps within the budget."""
        if self.budget is not None and self.budget.is_searched:
            self.limit = least
            return
        error = self._build_error(least, planner, found)
        if self.options.is_strict or not self.has_begun:
            raise error
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"{error}. Steps like this one run with the least peak", BudgetWarning)

    def _build_error(self, least: int, planner: TapePlanner, found: Evaluated) -> BudgetError:
        limits, problem = self.limits, planner.problem
        if least > limits.peak:
            resident = self.options.resident
            besides = f", {human_bytes(resident)} of it there anyway" if resident else ""
            least += resident
            return BudgetError(
                f"{self.options.text}: a peak of {human_bytes(limits.peak + resident)} cannot be "
                f"met. The least that was found is {human_bytes(least)} ({least} bytes{besides}), "
                f"of {human_bytes(planner.plain.costs.peak + resident)} without rematerialisation, "
                "on the tape of a function that cannot be one graph. Give a budget of at least "
                f"{least}, or a smaller batch",
                least,
            )
        saved = sum(problem.nbytes[v] for v in found.decisions.saved - problem.outputs)
        return BudgetError(
            f"{self.options.text}: the least that was found to be saved is {human_bytes(saved)} "
            f"({saved} bytes), on the tape of a function that cannot be one graph. Values that "
            f"must not be recomputed have to be saved: let at least {saved} bytes be saved",
            least,
        )

    def describe(self) -> str:
        """The bytes and the plans as a line of a report."""
        parts = []
        if self.limit is not None and self.budget is not None and self.budget.is_relative:
            limit = self.limit + self.options.resident
            largest = (self._largest or 0) + self.options.resident
            parts.append(
                f"{human_bytes(limit)} ({limit} bytes), fixed by the largest step so far, which "
                f"takes {human_bytes(largest)} without rematerialisation"
            )
        count = f"{self.num_plans} plan{'s' * (self.num_plans != 1)} of a tape"
        parts.append(f"{count} in {human_seconds(self.seconds)}" if self.num_plans else "no plan")
        return "; ".join(parts)


@dataclass(frozen=True, eq=False)
class TapeBudgetCall(TapeCall):
    """One call: decisions by the plan, then by its own sizes."""

    job: TapeBudgetJob

    def lets_save(self, place: Site, count: int) -> bool:
        plan = self.job.plan
        return plan is None or plan.is_plain or plan.lets_save(place, count)

    def limit(self, plain_bytes: int) -> float:
        job = self.job
        if job.limit is not None:
            return job.limit
        if job.budget is None or job.budget.fraction is None:
            return float("inf")
        resident = job.options.resident
        return max(0, job.budget.fraction * (plain_bytes + resident) - resident)

    @property
    def is_tight(self) -> bool:
        job = self.job
        if job.plan is None:
            return job.limit is not None
        is_given = job.budget is not None and not job.budget.is_relative
        return is_given or not job.plan.is_plain

    def find_walls(
        self, made: Sequence[Content], is_there: Callable[[Content], bool]
    ) -> frozenset[int]:
        if self.job.plan is not None:  # it says what is saved, and few values more are dropped
            return frozenset()
        step = TapeStep.of_forward(made, self.job.seconds_of)
        contents = step.contents
        crossing = Crossing(step.problem, lambda v: (c := contents[v]) is None or is_there(c))
        found = (contents[v] for v in crossing.values_at(crossing.places(_MOST_WALLS)))
        return frozenset(map(id, found))

    def seconds_of(self, entry: Entry) -> float:
        return self.job.seconds_of(entry)

    def settle(self, record: TapeRecord) -> frozenset[int]:
        """Values stay saved as planned, and fewer do if this call is larger in places."""
        job = self.job
        if (usual := self._settle_as_planned(record)) is not None:
            return usual
        step = TapeStep.of(record, job.seconds_of)
        planner = TapePlanner(step.problem)
        job.fix_limit(planner)
        is_first = job.plan is None
        if not job.serves(planner):
            job.make_plan(step, planner)
        assert job.plan is not None
        there = {v for n in record.available if (v := step.numbers.get(n)) is not None}
        kept = there
        if is_first:
            kept = {v for v in there if _is_planned(job.plan, step.contents[v])}
        best = trial = planner.evaluate(kept)
        if job.limits.excess_of(trial, step.problem):
            best = self._reduce(planner, trial, frozenset(there))
            if not is_first:
                job.aim_lower(trial, step, planner)
        return step.contents_of(best.decisions.saved)

    def _settle_as_planned(self, record: TapeRecord) -> frozenset[int] | None:
        """If this call is within the limits with its plan; no times are needed to see that."""
        job = self.job
        step = TapeStep.of(record, lambda _: 0.0)
        planner = TapePlanner(step.problem)
        if not job.serves(planner) or job.has_new_limit(planner):
            return None
        there = {v for n in record.available if (v := step.numbers.get(n)) is not None}
        trial = planner.evaluate(there)
        if job.limits.excess_of(trial, step.problem):
            return None
        return step.contents_of(trial.decisions.saved)

    def _reduce(self, planner: TapePlanner, trial: Evaluated, there: frozenset[int]) -> Evaluated:
        """Find a set of values that are there, within the limits if there is such a set."""
        limits, problem = self.job.limits, planner.problem
        found = TapePlanner(problem, there).find(limits)
        return min(trial, found, key=lambda t: limits.rank_of(t, problem))


def _is_planned(plan: TapePlan, content: Content | None) -> bool:
    if plan.is_plain or content is None or content.place is None:
        return True
    return plan.lets_save(content.place, content.count)


def _signature_of(entry: Entry) -> OpSignature:
    outputs = [c.geometry for _, ref in entry.makes if (c := ref()) is not None]
    return signature_of_call(entry.op, entry.args, entry.kwargs, outputs, _geometry_of)


def _geometry_of(value: Any) -> Any:
    return value.geometry if isinstance(value, Read | Blank) else None
