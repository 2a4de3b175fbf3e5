"""Sets of values to save without an integer program: a minimum cut for each price of a byte.

For each known value v, read by p and made by o: y_v says that it is needed, r_o that o runs again.

    least     price x nbytes_v  if y_v and not r_o        v is saved
            + seconds_o         if r_o
    so that   y_v = 1           if an operator of the backward pass reads v
              r_p <= y_v        if p reads v

The higher the price, the less is saved. The cuts give the lower convex hull of seconds over bytes;
budgets between its corners are left to the local search.
"""

from collections.abc import Iterator

import numpy as np
from scipy import sparse  # type: ignore[import-untyped]
from scipy.sparse import csgraph  # type: ignore[import-untyped]

from torchremat.planning.problem.problem import Part, Problem
from torchremat.planning.problem.trial import Floats

# The capacity of an edge that no cut takes: the edges that may be cut sum to half of it at most.
# SciPy's maximum flow takes integers of 32 bits.
_ENDLESS = 1 << 29

# Nominal seconds of one minimum cut for each operator of the problem: measured.
SECONDS_OF_CUT = 5e-5


def cut_saved_sets(problem: Problem, prices: int = 24) -> Iterator[frozenset[int]]:
    """Sets of values to save, from nearly all to nearly none, each once.

    >>> from torchremat.planning.problem.problem import Operator, Part, Problem
    >>> forward = Operator((), (0,), 1.0, Part.FORWARD)
    >>> backward = Operator((0,), (1,), 1.0, Part.BACKWARD)
    >>> problem = Problem((forward, backward), (4, 4), gradients=frozenset({1}))
    >>> [sorted(saved) for saved in cut_saved_sets(problem)]
    [[0], []]
    """
    network = _Network(problem)
    found: set[frozenset[int]] = set()
    for exponent in np.linspace(-4.0, 4.0, prices):
        saved = network.cut(10.0**exponent)
        if saved not in found:
            found.add(saved)
            yield saved


class _Network:
    """Nodes: source, sink, one for each value, one for each operator that makes one."""

    def __init__(self, problem: Problem) -> None:
        self.values = sorted(problem.known - problem.outputs)
        self.producers = [problem.producers[v] for v in self.values]
        operators = sorted(set(self.producers))
        self.node_of_value = {v: 2 + i for i, v in enumerate(self.values)}
        self.node_of = {o: 2 + len(self.values) + i for i, o in enumerate(operators)}
        self.size = 2 + len(self.values) + len(operators)
        needed = [v for v in self.values if v in problem.needed]
        self.edges = [(0, self.node_of_value[v]) for v in needed]
        self.edges += [
            (self.node_of[o], self.node_of_value[u])
            for o in operators
            for u in problem.operators[o].reads
            if u in self.node_of_value
        ]
        once = [
            not problem.operators[o].repeatable and problem.operators[o].part is Part.FORWARD
            for o in operators
        ]
        seconds = np.array([problem.operators[o].seconds for o in operators])
        total = float(seconds.sum()) or 1.0
        self.seconds: Floats = np.where(once, 1.0, seconds / total)
        nbytes = np.array([problem.nbytes[v] for v in self.values], dtype=float)
        self.nbytes: Floats = nbytes / (float(nbytes.sum()) or 1.0)
        self.once = np.array(once, dtype=bool)

    def cut(self, price: float) -> frozenset[int]:
        """The saved values if all bytes together cost `price` times all seconds."""
        scale = _ENDLESS / 4 / max(1.0, price)
        run = np.where(self.once, _ENDLESS, np.round(self.seconds * scale))
        save = np.round(self.nbytes * price * scale)
        operator_nodes = [self.node_of[o] for o in self.producers]
        value_nodes = list(self.node_of_value.values())
        rows = [*(a for a, _ in self.edges), *value_nodes, *self.node_of.values()]
        columns = [*(b for _, b in self.edges), *operator_nodes, *([1] * len(self.node_of))]
        data = np.concatenate([np.full(len(self.edges), _ENDLESS), save, run]).astype(np.int32)
        graph = sparse.csr_matrix((data, (rows, columns)), shape=(self.size, self.size))
        flow = csgraph.maximum_flow(graph, 0, 1).flow
        residual = graph - flow
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        reached = set(csgraph.breadth_first_order(residual, 0, return_predecessors=False).tolist())
        return frozenset(
            v
            for v, o in zip(self.values, self.producers, strict=True)
            if self.node_of_value[v] in reached and self.node_of[o] not in reached
        )
