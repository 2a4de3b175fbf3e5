"""Rows of the integer program for bytes: what is alive at a moment, as a function of what is saved.

At a moment of the backward pass a known value v is alive

    always          if it is read before (or now) and after (or now);
    if s_v = 1      if it is read only later, and nothing that is computed again by now reads it;
    y_v             if it is read later, and was computed by now for a chain v -> u1 -> ... -> uk,
                    of which uk is what an operator of the backward pass reads: y_v >= s_v and
                    y_v >= 1 - s_u1 - ... - s_uk.

That holds if nothing is computed more than once in the backward pass. Of schedules that may, it
does with y_v >= s_v - r_v and y_v >= 2 - s_v - r_v - s_u1 - ... - s_uk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torchremat.planning.ordering import Replay
from torchremat.planning.problem import Costs, Part, Problem
from torchremat.planning.program import Row, SavingProgram

Chain = frozenset[int]
"""Values, any of which would be read instead if it were saved."""


class Moments:
    """The moments of one replay, as rows."""

    def __init__(self, problem: Problem, replay: Replay, costs: Costs) -> None:
        self.problem = problem
        self.replay = replay
        self.costs = costs
        self.num_forward = len(replay.schedule.forward)
        self.direct = _direct_reads(problem)

    def row(self, program: SavingProgram, position: int, budget: int, *, once: bool) -> None:
        """Add to `program` that no more than `budget` bytes are alive at `position`."""
        if position < self.num_forward:
            self._forward_row(program, position, budget)
        else:
            self._backward_row(program, position - self.num_forward, budget, once)

    def _forward_row(self, program: SavingProgram, position: int, budget: int) -> None:
        problem = self.problem
        order = self.replay.schedule.forward
        made = {v for o in order[: position + 1] for v in problem.operators[o].writes}
        in_use = {v for o in order[position:] for v in problem.operators[o].reads}
        in_use |= {*problem.outputs, *problem.written, *problem.operators[order[position]].writes}
        # what may be made by then, in another solution
        for o, op in enumerate(problem.operators):
            if op.part is Part.KNOWN and all(u in made or u not in problem.known for u in op.reads):
                made.update(op.writes)
        always = problem.constant + problem.operators[order[position]].nbytes_inside
        coefficients: dict[int, float] = {}
        produced = {v for o in order[: position + 1] for v in problem.operators[o].writes}
        for v in made:
            if v in in_use and v in produced:
                always += problem.nbytes[v]
            else:
                coefficients[program.saved[v]] = problem.nbytes[v]
        program.add(Row(coefficients, budget - always))

    def _backward_row(
        self, program: SavingProgram, place: int, budget: int, once: bool
    ) -> None:
        problem, replay = self.problem, self.replay
        nbytes = problem.nbytes
        step = replay.steps[place]
        order = replay.schedule.backward
        current = problem.operators[order[place]]
        runs_for_another = order[place] != problem.backward[step]
        chains = self._chains(place)
        later_readers = self._later_readers(place)
        there = self._there(place)
        always = self.costs.live[self.num_forward + place]
        coefficients: dict[int, float] = {}
        touched = {*current.reads, *current.writes}
        for v in problem.known:
            if v in problem.outputs:
                continue
            alive = v in there
            reads = self.direct.get(v, ())
            after = any(t >= step for t in reads)
            before = any(t < step for t in reads) or (step in reads and not runs_for_another)
            if alive and not runs_for_another and v in touched:
                continue  # counted always
            if after and before and alive and once:
                continue
            if alive:
                always -= nbytes[v]
            if not alive and not after:
                continue
            if not after:
                chain = later_readers.get(v)
                if chain is None and v in touched:
                    chain = frozenset()
                if chain is None:
                    continue
                if v in chains:
                    self._alive(program, coefficients, v, chains[v] | chain, once, saved=False)
                else:
                    y = program.add_variable()
                    program.require({y: 1, program.saved[v]: -1, **{program.saved[u]: 1 for u in chain}}, 0)
                    coefficients[y] = nbytes[v]
            elif before or v in chains:
                self._alive(
                    program, coefficients, v, frozenset() if before else chains[v], once, saved=True
                )
            elif once:
                coefficients[program.saved[v]] = nbytes[v]
            else:
                y = program.add_variable()
                again = program.again[problem.producers[v]]
                program.require({y: 1, program.saved[v]: -1, again: 1}, 0)
                coefficients[y] = nbytes[v]
        program.add(Row(coefficients, budget - always))

    def _alive(self, program, coefficients, v, chain, once, *, saved) -> None:
        y = program.add_variable()
        s = program.saved
        chain = chain - {v}
        terms = {y: 1.0, **{s[u]: 1.0 for u in chain}}
        again = program.again[self.problem.producers[v]]
        if once:
            program.require(terms, 1)
            if saved and chain:
                program.require({y: 1, s[v]: -1}, 0)
        else:
            program.require({**terms, s[v]: 1, again: 1}, 2)
            if saved and chain:
                program.require({y: 1, s[v]: -1, again: 1}, 0)
        coefficients[y] = self.problem.nbytes[v]

    def _there(self, place: int) -> set[int]:
        """The known values alive while the operator at `place` runs."""
        problem = self.problem
        order = self.replay.schedule.backward
        op = problem.operators[order[place]]
        wanted: set[int] = set()
        for o in reversed(order[place + 1 :]):
            wanted.difference_update(problem.operators[o].writes)
            wanted.update(problem.operators[o].reads)
        return (wanted | set(op.reads) | set(op.writes)) & problem.known

    def _chains(self, place: int) -> dict[int, Chain]:
        """The chain for which each value has been computed, or read, by the operator at `place`."""
        problem = self.problem
        chains: dict[int, Chain] = {}
        of_operator: dict[int, Chain] = {}
        order, wanted_by = self.replay.schedule.backward, self.replay.wanted_by
        for j in range(place, -1, -1):
            o = order[j]
            op = problem.operators[o]
            if op.part is Part.BACKWARD:
                of_operator[o] = frozenset()
            elif o not in of_operator:
                reader = wanted_by[j]
                own = [v for v in op.writes if v in problem.operators[reader].reads]
                base = of_operator.get(reader)
                if base is None:  # it runs for one that is yet to run
                    base = frozenset()
                of_operator[o] = base | frozenset(own[:1])
            chain = of_operator[o]
            for v in op.reads:
                if v in problem.known and (v not in chains or len(chain) < len(chains[v])):
                    chains[v] = chain
        return chains

    def _later_readers(self, place: int) -> dict[int, Chain]:
        """For each value that is read later, by what is computed again, the chain that it is for."""
        problem = self.problem
        found: dict[int, Chain] = {}
        of_operator: dict[int, Chain] = {}
        order, wanted_by = self.replay.schedule.backward, self.replay.wanted_by
        for j in range(len(order) - 1, place, -1):
            o = order[j]
            op = problem.operators[o]
            if op.part is Part.BACKWARD:
                of_operator[o] = frozenset()
                continue
            reader = wanted_by[j]
            own = [v for v in op.writes if v in problem.operators[reader].reads]
            of_operator[o] = of_operator.get(reader, frozenset()) | frozenset(own[:1])
            for v in op.reads:
                found[v] = of_operator[o]
        return found


def _direct_reads(problem: Problem) -> dict[int, tuple[int, ...]]:
    """The steps of the backward pass that read each known value."""
    found: dict[int, list[int]] = {}
    for step, o in enumerate(problem.backward):
        for v in problem.operators[o].reads:
            if v in problem.known:
                found.setdefault(v, []).append(step)
    return {v: tuple(steps) for v, steps in found.items()}
