"""Several processes that plan one step: one of them looks for the schedule, and all take it.

Processes that measure the times of operators, or limit the time of a search, may find two schedules
of one graph. Each of them would be right by itself. Where the graph has collectives, however, all
processes must run these in one order. Besides, one search is enough for all.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from torch import distributed

from torchremat.core.upper_rooms import load_rooms
from torchremat.planning.problem.problem import Part, Problem, Schedule
from torchremat.planning.search.solver_options import Solution

Share = Callable[[Callable[[], str], Callable[[], str]], str]
"""Takes what says for what something is made, and what makes it; gives what one process made."""


class _Others:
    share: Share | None = None


def let_processes_share(share: Share) -> None:
    """Let `share` say what one of the processes made, where there are several."""
    _Others.share = share


def solve_once(describe: Callable[[], str], solve: Callable[[], Solution]) -> Solution:
    """The solution of one of the processes whose `describe` returns the same text."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return solve()
    load_rooms("shared plans")
    assert _Others.share is not None
    own: list[Solution] = []

    def make() -> str:
        own.append(solve())
        return json.dumps(asdict(own[0]))

    text = _Others.share(describe, make)
    return own[0] if own else _read(text)


def _read(text: str) -> Solution:
    content = json.loads(text)
    for name in ("schedule", "lowest"):
        if content[name] is not None:
            content[name] = Schedule(**{k: tuple(v) for k, v in content[name].items()})
    return Solution(**content)


def text_of(problem: Problem) -> str:
    """`problem` as text, without the times, which each process may measure.

    >>> from torchremat.planning.problem.problem import Operator, Part
    >>> sine = Operator((), (0,), 1.0, Part.FORWARD)
    >>> text_of(Problem((sine,), (4,))) == text_of(Problem((replace(sine, seconds=2.0),), (4,)))
    True
    >>> text_of(Problem((sine,), (4,))) == text_of(Problem((sine,), (8,)))
    False
    """
    untimed = replace(
        problem,
        operators=tuple(replace(operator, seconds=0.0) for operator in problem.operators),
        host_bytes_per_second=None,
    )
    return json.dumps(asdict(untimed), default=_encode)


def _encode(value: Any) -> Any:
    return value.name if isinstance(value, Part) else sorted(value)
