"""Steps of `bench_planning.py` that are numbers from the start: chains, and random networks.

`steps-64` are 64 equal steps, of which the backward pass reads the input of each. `layered-100` is
a random network of 100 operators, drawn as Gagrani et al. (2022) draw layered graphs. It has a
backward pass: each backward operator reads what its operator has read and written, and takes twice
as long.
"""

import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torchremat.planning.problem.problem import Operator, Part, Problem

NODE_VARIABILITY = 0.75
EDGE_DENSITY = 0.2
SKIP_DENSITY = 0.14
"""As in the graphs that Bartan et al. (2023) took from that paper."""


@dataclass(frozen=True)
class Graph:
    """A step in numbers.

    Attributes:
        layer_of: for each operator of the forward pass, its layer, for peers that want one.
        equal_steps: how many equal steps it is a chain of; 0 for other steps.
    """

    problem: Problem
    layer_of: Mapping[int, Hashable]
    equal_steps: int = 0


def chain_of(count: int) -> Graph:
    """`count` equal steps; the last value is an output.

    >>> [op.reads for op in chain_of(2).problem.operators]
    [(), (0,), (), (2, 0), (3,)]
    """
    seconds, nbytes = 1e-3, 1 << 20
    run = [Operator((v - 1,) if v else (), (v,), seconds, Part.FORWARD) for v in range(count)]
    back = [Operator((), (count,), seconds, Part.BACKWARD)]
    for i, step in enumerate(reversed(range(count))):
        reads = (count + i, step - 1) if step else (count + i,)
        back.append(Operator(reads, (count + i + 1,), seconds, Part.BACKWARD))
    problem = Problem((*run, *back), (nbytes,) * (2 * count + 1), gradients=frozenset({2 * count}))
    return Graph(problem, {o: o * 8 // count for o in range(count)}, count)


def random_network(num_operators: int, width: float, seed: int) -> Graph:
    """A random layered network; layers have about `width` times the root of `num_operators`."""
    draw = random.Random(seed)
    layers = _draw_layers(num_operators, width, draw)
    reads: dict[int, set[int]] = {o: set() for o in range(num_operators)}
    for i, layer in enumerate(layers[1:], 1):
        for o in layer:
            near = layers[i - 1]
            reads[o].update(p for p in near if draw.random() < EDGE_DENSITY)
            reads[o].add(draw.choice(near))
            for far in layers[: i - 1]:
                if draw.random() < SKIP_DENSITY / i:
                    reads[o].add(draw.choice(far))
    nbytes = [int(draw.choice((1, 4, 8)) * draw.uniform(0.5, 1.5) * (1 << 20)) for _ in reads]
    seconds = [draw.uniform(0.2, 1.8) * 1e-3 for _ in reads]
    layer_of = {o: i for i, layer in enumerate(layers) for o in layer}
    return Graph(_with_backward(reads, nbytes, seconds), layer_of)


def _draw_layers(num_operators: int, width: float, draw: random.Random) -> list[list[int]]:
    mean = max(2.0, width * num_operators**0.5 * 2)
    layers: list[list[int]] = []
    start = 0
    while start < num_operators:
        size = max(1, round(mean * draw.uniform(1 - NODE_VARIABILITY, 1 + NODE_VARIABILITY)))
        layers.append(list(range(start, min(start + size, num_operators))))
        start += size
    return layers


def _with_backward(
    reads: Mapping[int, set[int]], nbytes: list[int], seconds: list[float]
) -> Problem:
    """The step of a network in which operator i writes value i; the last ones make the loss."""
    count = len(reads)
    sizes = list(nbytes)
    ends = sorted(set(reads) - set().union(*reads.values()))
    operators = [
        Operator(tuple(sorted(reads[o])), (o,), seconds[o], Part.FORWARD) for o in range(count)
    ]
    given: dict[int, list[int]] = {o: [] for o in range(count)}
    for o in ends:
        given[o].append(_add(sizes, nbytes[o]))
    last = [v for o in ends for v in given[o]]
    operators.append(Operator(tuple(ends), tuple(last), 1e-4, Part.BACKWARD))
    gradients = set()
    for o in reversed(range(count)):
        parts = []
        for p in sorted(reads[o]):
            parts.append(_add(sizes, nbytes[p]))
            given[p].append(parts[-1])
        parts.append(_add(sizes, 1 << 16))
        gradients.add(parts[-1])
        found = (*given[o], *sorted(reads[o]), o)
        operators.append(Operator(found, tuple(parts), 2 * seconds[o], Part.BACKWARD))
    return Problem(tuple(operators), tuple(sizes), gradients=frozenset(gradients))


def _add(sizes: list[int], nbytes: int) -> int:
    sizes.append(nbytes)
    return len(sizes) - 1


GRAPHS: dict[str, Callable[[], Graph]] = {
    "steps-64": lambda: chain_of(64),
    "steps-145": lambda: chain_of(145),
    "steps-462": lambda: chain_of(462),
    "layered-25": lambda: random_network(25, 0.27, 1),
    "layered-100": lambda: random_network(100, 0.27, 1),
    "layered-250": lambda: random_network(250, 0.43, 1),
    "layered-1000": lambda: random_network(1000, 0.31, 1),
}
