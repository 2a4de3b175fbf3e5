"""Plans of steps with updates in the backward pass, which must keep to the budget as they run.

The numbers of a problem let an update wait as long as a schedule likes. As it runs, it does not
wait: a gradient is handed out once no operator reads its memory, or that of the parameter. So the
graphs of a schedule are simulated, and a search with less room follows where they take more.
"""

from collections.abc import Callable
from dataclasses import replace

from torchremat.core.formatting import human_bytes
from torchremat.errors import BudgetError
from torchremat.planning.budget import Budget
from torchremat.planning.plan import Plan
from torchremat.planning.planner import Planner
from torchremat.planning.step.planned_step import PlannedStep

# Searches for one budget; two are mostly enough. Chosen by hand.
_SEARCHES = 6

Describe = Callable[[PlannedStep], Plan]
"""Makes the plan of a schedule, with the peak of its graphs."""


def plan_with_updates(planner: Planner, describe: Describe, budget: Budget, asked: str) -> Plan:
    """The plan of least added time that was found within `budget`, which was written as `asked`.

    Raises `BudgetError` with the least budget that can be met if there is none.
    """
    nbytes = planner.bytes_of(budget)
    room, least = nbytes, None
    for _ in range(_SEARCHES):
        found = planner.search(Budget(nbytes=room))
        plan = describe(found.planned)
        if plan.peak_bytes <= nbytes:
            return replace(plan, budget=nbytes)
        if least is None or plan.peak_bytes < least.peak_bytes:
            least = plan
        if found.error is not None:
            break
        room -= plan.peak_bytes - nbytes
    lowest = describe(planner.find_lowest())
    if lowest.peak_bytes <= nbytes:
        return replace(lowest, budget=nbytes)
    assert least is not None
    best = min(least, lowest, key=lambda plan: plan.peak_bytes)
    if budget.is_searched:
        return replace(best, budget=best.peak_bytes)
    raise _build_error(best, nbytes, asked, planner.resident)


def _build_error(best: Plan, nbytes: int, asked: str, resident: int) -> BudgetError:
    least = best.peak_bytes
    plain = human_bytes(best.baseline.peak_bytes)
    there = f", {human_bytes(resident)} of it there anyway" if resident else ""
    return BudgetError(
        f"{asked}: a peak of {human_bytes(nbytes)} cannot be met, even with updates in the "
        f"backward pass. The least that was found is {human_bytes(least)} ({least} bytes{there}), "
        f"of {plain} without rematerialisation. Give a budget of at "
        f"least {least}, a smaller batch, or an optimizer with less state",
        least,
    )
