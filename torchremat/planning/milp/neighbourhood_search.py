"""Large-neighbourhood search: most of an answer is fixed, the integer program does the rest.

    relaxation    x = 0, 1, 0.4, 1, 0
    answer        x = 0, 1, 1,   1, 0

The first neighbourhood frees what the relaxation is least sure of, later ones other variables.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchremat.planning.milp.linear_program import Answer, Fixing, LinearProgram, Relaxation
from torchremat.planning.milp.saving_program import SavingProgram
from torchremat.planning.problem.trial import Floats

Integers = NDArray[np.int64]

# The kinds of neighbourhoods, which take turns; `_free` says what each leaves free.
_KINDS = 5
# Neighbourhoods in a row without a better answer that end the search: four of each kind.
_PATIENCE = 4 * _KINDS
# Seconds of one neighbourhood at most; chosen by hand.
_SLICE = 1.0
# Variables that may be free whatever the relaxation is. Chosen by hand.
_MOST_FREE = 1000
# Fractions in the relaxation of a program with more of them free that is solved. With more, the
# root of its search tree alone may take minutes. Chosen by hand.
_MOST_UNSURE = 250
# Nodes of its search tree: unlike the clock, the same on every machine. Chosen by hand.
_SLICE_NODES = 1000


@dataclass(frozen=True)
class Neighbourhoods:
    """Neighbourhoods of the answers of one program.

    Attributes:
        integral: the variables that must be integers.
        ranks: where in the forward pass each of them belongs, from 0 to 1.
        places: where in the backward pass, from 0 to 1; -1 for what is saved.
    """

    program: LinearProgram
    relaxation: Relaxation | None
    integral: Integers
    ranks: Floats
    places: Floats

    @classmethod
    def of(cls, program: SavingProgram, relaxation: Relaxation | None) -> "Neighbourhoods":
        integral = program.linear.integral
        ranks, places = program.ranks()[integral], program.places()[integral]
        return cls(program.linear, relaxation, integral, ranks, places)

    def find_first(self, free: int, seconds: Callable[[], float], gap: float) -> Answer:
        """An answer near the relaxation, with as few as `free` variables free if that goes."""
        answer = Answer(None, float("inf"), 0.0)
        while answer.x is None and seconds() > 0 and not self.is_too_hard(free):
            fixing = self.fix_sure(free)
            limit = seconds() if fixing is None else min(seconds(), 2.0)
            answer = self.program.solve(seconds=limit, gap=gap, fixed=fixing)
            if fixing is None:
                break
            free *= 2
        return answer

    def improve(self, answer: Answer, seconds: Callable[[], float], gap: float) -> Iterator[Answer]:
        random = np.random.default_rng(0)
        sizes = [min(0.6, max(0.05, 500 / len(self.integral)))] * _KINDS
        vain, turn = 0, 0
        while vain < _PATIENCE and seconds() > 0:
            assert answer.x is not None
            kind = turn % _KINDS
            free = self._free(kind, answer.x, sizes[kind], random)
            fixing = Fixing(self.integral[~free], np.round(answer.x[self.integral[~free]]))
            limit = min(seconds(), _SLICE)
            found = self.program.solve(seconds=limit, gap=gap, fixed=fixing, nodes=_SLICE_NODES)
            turn += 1
            vain += 1
            if found.x is not None and found.value < answer.value * (1 - 1e-6) - 1e-15:
                answer, vain = found, 0
                yield answer
            factor = 0.7 if found.is_late else 1.15
            sizes[kind] = min(max(factor * sizes[kind], 0.02), 0.8)

    def fix_sure(self, free: int) -> Fixing | None:
        """The values of the relaxation, but for the `free` ones of which it is least sure."""
        x = None if self.relaxation is None else self.relaxation.answer.x
        if x is None or self.relaxation is None or len(self.integral) <= free:
            return None
        reduced = np.abs(self.relaxation.reduced_costs[self.integral])
        sure = np.where(self._away(x) > 1e-6, -self._away(x), reduced)
        fixed = self.integral[np.argsort(sure, kind="stable")[free:]]
        return Fixing(fixed, np.round(x[fixed]))

    def is_too_hard(self, free: int) -> bool:
        """Whether so many of them are fractions that no limit ends the search in time."""
        x = None if self.relaxation is None else self.relaxation.answer.x
        if x is None or free <= _MOST_FREE:
            return False
        return int((self._away(x) > 1e-6).sum()) > _MOST_UNSURE

    def _away(self, x: Floats) -> Floats:
        chosen = x[self.integral]
        away: Floats = np.abs(chosen - np.round(chosen))
        return away

    def _free(
        self, kind: int, x: Floats, size: float, random: np.random.Generator
    ) -> NDArray[np.bool_]:
        """A mask of the integers that are left free."""
        relaxed = None if self.relaxation is None else self.relaxation.answer.x
        free = np.zeros(len(self.integral), dtype=bool)
        if kind == 0 and relaxed is not None:
            differ = np.abs(x[self.integral] - relaxed[self.integral]) + 0.3 * self._away(relaxed)
            differ += 1e-3 * random.random(len(free))
            free[np.argsort(-differ)[: int(size * len(free))]] = True
            return free
        if kind == 3:  # a stretch of the backward pass, and what is saved
            return (self.places < 0) | (np.abs(self.places - random.random()) < size / 2)
        if kind == 4:  # some values throughout
            ranks = np.unique(self.ranks)
            return np.isin(self.ranks, ranks[random.random(len(ranks)) < size])
        for _ in range(kind or 1):
            centre = random.random()
            free |= np.abs(self.ranks - centre) < size / 2 / (kind or 1)
        return free
