"""The memory policies of torchtitan's graph trainer, on the graphs of `bench_planning.py`.

The methods of its pull requests 3881, 3975 and 4636, written anew from their descriptions. The
forward pass is cut into layers. What leaves a layer is saved. Of the other values that a layer has
saved in a plain step, a share of the bytes is saved, and the rest is recomputed before it is read.

    greedy   the same share of every layer: the values that take longest per byte
    ilp      an outer linear program gives each layer its share, so that no moment of the backward
             pass has more than the budget; an inner program gives a layer the values to save

Offloading, which they also decide, is left out, as no other peer has it.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from torchremat.planning.problem.fixed_bytes import BackwardBytes
from torchremat.planning.problem.orders import find_plain_saved
from torchremat.planning.problem.problem import Problem, Schedule
from torchremat.planning.problem.replay import (
    Decisions,
    backward_order,
    replay_of,
    values_used,
)

SECONDS_OF_LAYER = 5.0
"""What the program of one layer may take; the best found by then is taken."""

Layer = Hashable
Shares = Mapping[Layer, float]


def save_longest_per_byte(
    problem: Problem, layer_of: Mapping[int, Layer], share: float
) -> Schedule:
    """The schedule of the greedy policy that saves `share` of each layer's bytes."""
    layers = _Layers(problem, layer_of)
    saved = set(layers.leaving)
    for values in layers.inner.values():
        left = share * sum(problem.nbytes[v] for v in values)
        for v in sorted(values, key=lambda v: (-layers.seconds_per_byte(v), v)):
            if problem.nbytes[v] <= left:
                left -= problem.nbytes[v]
                saved.add(v)
    return layers.schedule(saved)


def save_by_programs(
    problem: Problem, layer_of: Mapping[int, Layer], budget: int
) -> Schedule | None:
    """The schedule of the two programs for a peak of `budget` bytes; `None` if they have none.

    What they give may have another peak: of a layer they know the shares of bytes and seconds.
    """
    layers = _Layers(problem, layer_of)
    shares = _share_among_layers(layers, budget)
    if shares is None:
        return None
    saved = set(layers.leaving)
    solved: dict[tuple, tuple[int, ...]] = {}
    for layer, share in shares.items():
        program = _LayerProgram.of(layers, layer)
        key = (*program.signature, round(share, 3))
        if key not in solved:  # equal layers are solved once
            solved[key] = program.solve(round(share, 3))
        saved.update(program.values[i] for i in solved[key])
    return layers.schedule(saved)


@dataclass(frozen=True)
class _Layers:
    problem: Problem
    layer_of: Mapping[int, Layer]

    @cached_property
    def plain(self) -> frozenset[int]:
        return find_plain_saved(self.problem) - self.problem.outputs

    @cached_property
    def leaving(self) -> frozenset[int]:
        """The values of the forward pass that another layer reads."""
        problem, layer_of = self.problem, self.layer_of
        return frozenset(
            v
            for o in problem.forward
            for v in problem.operators[o].reads
            if layer_of[problem.producers[v]] != layer_of[o]
        )

    @cached_property
    def inner(self) -> dict[Layer, list[int]]:
        """The other values that a plain step saves, by layers."""
        found: dict[Layer, list[int]] = defaultdict(list)
        for v in sorted(self.plain - self.leaving):
            found[self.layer_of[self.problem.producers[v]]].append(v)
        return dict(found)

    def seconds_per_byte(self, v: int) -> float:
        seconds = self.problem.operators[self.problem.producers[v]].seconds
        return seconds / max(self.problem.nbytes[v], 1)

    def schedule(self, saved: Iterable[int]) -> Schedule:
        decisions = Decisions(frozenset(saved) - self.problem.outputs)
        order, _ = backward_order(self.problem, decisions)
        used = values_used(self.problem, decisions, order)
        return replay_of(self.problem, Decisions(used)).schedule


def _share_among_layers(layers: _Layers, budget: int) -> Shares | None:
    """For each layer the share of its bytes to save, so that what is recomputed takes least."""
    problem = layers.problem
    names = list(layers.inner)
    if not names:
        return {}
    columns = {layer: i for i, layer in enumerate(names)}
    steps = len(problem.backward)
    first, last = np.full(len(names), steps), dict[int, int]()
    for step, o in enumerate(problem.backward):
        for v in problem.operators[o].reads:
            if v in layers.plain:
                last[v] = step
                layer = columns.get(layers.layer_of[problem.producers[v]])
                if layer is not None:
                    first[layer] = min(first[layer], step)
    fixed = np.array(BackwardBytes.of(problem).before, dtype=float)
    waiting = np.zeros((steps, len(names)))
    for v, step in last.items():
        column = columns.get(layers.layer_of[problem.producers[v]])
        if v in layers.leaving or column is None:
            fixed[: step + 1] += problem.nbytes[v]
            continue
        waiting[: first[column], column] += problem.nbytes[v]
        fixed[first[column] : step + 1] += problem.nbytes[v]
    seconds = np.zeros(len(names))
    for o in problem.forward:
        if layers.layer_of[o] in columns:
            seconds[columns[layers.layer_of[o]]] += problem.operators[o].seconds
    scale = max(seconds.max(initial=0.0), 1e-30)
    answer = linprog(-seconds / scale, waiting / budget, (budget - fixed) / budget, bounds=(0, 1))
    if not answer.success:
        return None
    return dict(zip(names, answer.x, strict=True))


@dataclass(frozen=True)
class _LayerProgram:
    """Which values of a layer to save: all by their positions in it, so that layers compare."""

    operators: tuple[int, ...]
    values: tuple[int, ...]
    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]
    maker: tuple[int, ...]
    """For each value, the position of its operator."""
    reads: tuple[tuple[int, ...], ...]
    """For each operator, the positions of what it reads in the layer."""
    wanted: tuple[int, ...]
    """The positions of the values that the backward pass reads."""

    @classmethod
    def of(cls, layers: _Layers, layer: Layer) -> "_LayerProgram":
        problem = layers.problem
        operators = tuple(o for o in problem.forward if layers.layer_of[o] == layer)
        there = layers.leaving | problem.outputs
        values = tuple(v for o in operators for v in problem.operators[o].writes if v not in there)
        number = {v: i for i, v in enumerate(values)}
        place = {o: i for i, o in enumerate(operators)}
        return cls(
            operators,
            values,
            tuple(problem.operators[o].seconds for o in operators),
            tuple(problem.nbytes[v] for v in values),
            tuple(place[problem.producers[v]] for v in values),
            tuple(
                tuple(number[v] for v in problem.operators[o].reads if v in number)
                for o in operators
            ),
            tuple(number[v] for v in layers.inner[layer]),
        )

    @property
    def signature(self) -> tuple:
        return (self.seconds, self.nbytes, self.maker, self.reads, self.wanted)

    def solve(self, share: float) -> tuple[int, ...]:
        """The positions of the values to save, of at most `share` of the bytes wanted."""
        num_values, num_operators = len(self.values), len(self.operators)
        nbytes = np.array(self.nbytes, dtype=float)
        most = share * nbytes[list(self.wanted)].sum()
        pairs = [(v, None) for v in self.wanted]
        pairs += [(v, o) for o, reads in enumerate(self.reads) for v in reads]
        rows = np.zeros((len(pairs) + 1, num_values + num_operators))
        low = np.zeros(len(pairs) + 1)
        for row, (v, reader) in enumerate(pairs):  # saved, or made again, if it is read
            rows[row, v] = rows[row, num_values + self.maker[v]] = 1
            if reader is None:
                low[row] = 1
            else:
                rows[row, num_values + reader] -= 1
        scale = max(nbytes.sum(), 1.0)
        rows[-1, :num_values] = -nbytes / scale
        low[-1] = -most / scale
        seconds = np.array(self.seconds)
        cost = np.concatenate([np.zeros(num_values), seconds / max(seconds.max(), 1e-30)])
        answer = milp(
            cost,
            constraints=LinearConstraint(rows, low, np.inf),
            integrality=np.ones(len(cost)),
            bounds=Bounds(0, 1),
            options={"time_limit": SECONDS_OF_LAYER, "mip_rel_gap": 1e-3},
        )
        if answer.x is None:
            return ()
        return tuple(int(v) for v in np.flatnonzero(answer.x[:num_values] > 0.5))
