"""Plans of steps with updates in the backward pass, which must keep to the budget as they run.

The numbers of a problem let an update wait as long as a schedule likes. As it runs, it does not
wait: a gradient is handed out once no operator reads its memory, or that of the parameter. So the
graphs of a schedule are simulated, and a search with less room follows where they take more.
"""

from dataclasses import replace
from functools import cached_property, partial

from torchremat.core.formatting import human_bytes
from torchremat.errors import BudgetError
from torchremat.planning.budget import Budget
from torchremat.planning.planner import Planner, Search
from torchremat.planning.problem.problem import Schedule
from torchremat.planning.step.planned_step import PlannedStep

# Searches for one budget; two are mostly enough. Chosen by hand.
_SEARCHES = 6


class WholeStepPlanner(Planner):
    """A planner whose peaks are those of the graphs that run, as updates consume gradients."""

    @cached_property
    def _peaks(self) -> dict[Schedule, int]:
        return {}

    def peak_of(self, planned: PlannedStep) -> int:
        assert self.updated is not None
        if planned.schedule not in self._peaks:
            self._peaks[planned.schedule] = self.updated.find_peak(planned)
        return self._peaks[planned.schedule] + self.resident

    def search(
        self,
        budget: Budget | None,
        saved: int | None = None,
        near: Schedule | None = None,
        *,
        seconds: float | None = None,
        is_prompt: bool = False,
    ) -> Search:
        if budget is None or budget.is_searched:
            return super().search(budget, saved, near, seconds=seconds, is_prompt=is_prompt)
        nbytes = self.bytes_of(budget)

        def keeps_within(planned: PlannedStep) -> bool:
            return self.peak_of(planned) <= nbytes and (
                saved is None or planned.saved_bytes <= saved
            )

        if keeps_within(self.plain):
            return Search(replace(self.plain, budget=nbytes), was_needed=False)
        room = nbytes
        tried = [self.plain]
        for _ in range(_SEARCHES):
            room_left = Budget(nbytes=room)
            found = super().search(room_left, saved, near, seconds=seconds, is_prompt=is_prompt)
            tried.append(found.planned)
            if keeps_within(found.planned) or found.error is not None:
                break
            room -= self.peak_of(found.planned) - nbytes
        else:
            tried.append(self.find_lowest(seconds))
        best = next(filter(keeps_within, tried), None)
        if best is not None:
            return Search(replace(best, budget=nbytes))
        best = min(tried, key=self.peak_of)
        return Search(replace(best, budget=nbytes), partial(self._build_error, best, nbytes))

    def _find_least(self, *, is_prompt: bool) -> PlannedStep:
        known = self.plain, super()._find_least(is_prompt=is_prompt), self.find_lowest()
        best = min(known, key=self.peak_of)
        for _ in range(_SEARCHES):  # the schedule of least numbers is not always that of least peak
            less = self.search(Budget(nbytes=self.peak_of(best) - 1), is_prompt=is_prompt)
            if less.error is not None:
                break
            best = less.planned
        return best

    def _build_error(self, best: PlannedStep, nbytes: int, asked: str) -> BudgetError:
        least = self.peak_of(best)
        plain = Planner(self.joint, cost_model=self.cost_model, resident=self.resident).plain
        there = f", {human_bytes(self.resident)} of it there anyway" if self.resident else ""
        on_host = 0 if self.updated is None else self.updated.state_on_host
        state = " and the optimizer's state on the host" if on_host else ""
        return BudgetError(
            f"{asked}: a peak of {human_bytes(nbytes)} cannot be met, even with updates in the "
            f"backward pass{state}. The least that was found is {human_bytes(least)} ({least} "
            f"bytes{there}), of {human_bytes(plain.peak_bytes + self.resident + on_host)} without "
            f"rematerialisation. Give a budget of at least {least}, a smaller batch, or an "
            "optimizer with less state",
            least,
        )
