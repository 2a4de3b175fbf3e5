"""The peers of `bench_planning.py`, each as a schedule of one and the same joint graph.

    torch.compile     the partitioner of PyTorch, given our joint graph: what it saves, and the
                      operators of its backward graph in their order
    eager             torch.utils.checkpoint and selective checkpointing of blocks: all of a block
                      is recomputed, up to the last value that is wanted, before the first of
                      its backward operators
    methods           of papers and of torchtitan, written anew: `planning_dtr.py`,
                      `planning_titan.py`, `planning_revolve.py`

Names of nodes say which operator is which.
"""

import fnmatch
import logging
import operator
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from planning_dtr import evict_dynamically
from planning_graphs import Graph
from planning_revolve import reverse_chain
from planning_titan import save_by_programs, save_longest_per_byte
from torch import fx
from torch._functorch import config, partitioners
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from tests.planning.schedules import plain_schedule
from torchremat.autodiff.joint import Joint
from torchremat.graph.nodes import base_of, call_of, is_item, results_of
from torchremat.graph.notes import note_roles, notes_of
from torchremat.planning.memory.simulate import simulate
from torchremat.planning.problem.problem import Part, Schedule
from torchremat.planning.step.problem_builder import NumericStep

aten = torch.ops.aten
BUDGETS = (0.9, 0.75, 0.5, 0.35, 0.25, 0.1)
"""Besides 1.0 and 0.0, where every solver says the same."""
FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Of the plain peak: the budgets of methods that are given one."""
SHARES = (0.9, 0.75, 0.5, 0.35, 0.25, 0.1, 0.0)
"""Of the bytes that a layer saves: the settings of torchtitan's greedy policy."""
SNAPSHOTS = (2, 3, 5, 8, 12, 20, 50)
SOLVERS = ("dp", "dp_knapsack_sliding_hirschberg", "greedy", "ilp", "dynamic_memory_budget_dp")
_JOINT_NAME = "name_in_joint"

MATMULS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution}
ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}


@dataclass(frozen=True)
class Peer:
    """The schedule of a peer.

    Attributes:
        name: of the peer, with its setting.
        schedule: what it saves, and its order of operators.
        seconds: the time that it took to plan; `None` where others' work was reused.
        graphs_peak: the peak by `simulate`, which reads the peer's own graphs, if it has such.
        most_bytes: what the peer holds at most, if that is more than its schedule needs.
    """

    name: str
    schedule: Schedule
    seconds: float | None = None
    graphs_peak: int | None = None
    most_bytes: int | None = None


def peers_of(step: NumericStep, blocks: tuple[str, ...], *, quick: bool = False) -> Iterator[Peer]:
    """Every peer on the graph of `step`, whose checkpointed submodules are `blocks`."""
    yield from compiled_peers(step, quick=quick)
    if blocks:
        yield from eager_peers(step, blocks)


def graph_of(step: NumericStep, blocks: tuple[str, ...]) -> Graph:
    """The numbers of a step, with its layers."""
    forward = step.problem.forward
    return Graph(step.problem, {o: _block_of(step.calls[o], blocks) for o in forward})


# --- methods that need no more than numbers ------------------------------------------------------


def methods_of(graph: Graph, plain_peak: int) -> Iterator[Peer]:
    """DTR, torchtitan's policies and, for chains of equal steps, REVOLVE."""
    problem = graph.problem
    for fraction in FRACTIONS:
        started = time.perf_counter()
        run = evict_dynamically(problem, round(fraction * plain_peak))
        if run is not None:
            seconds = time.perf_counter() - started
            yield Peer(f"DTR {fraction}", run[0], seconds, most_bytes=run[1])
    for share in SHARES:
        started = time.perf_counter()
        schedule = save_longest_per_byte(problem, graph.layer_of, share)
        yield Peer(f"torchtitan greedy {share}", schedule, time.perf_counter() - started)
    for fraction in FRACTIONS:
        started = time.perf_counter()
        found = save_by_programs(problem, graph.layer_of, round(fraction * plain_peak))
        if found is not None:
            yield Peer(f"torchtitan ilp {fraction}", found, time.perf_counter() - started)
    for snapshots in SNAPSHOTS if graph.equal_steps else ():
        started = time.perf_counter()
        schedule = reverse_chain(problem, graph.equal_steps, snapshots)
        yield Peer(f"REVOLVE {snapshots}", schedule, time.perf_counter() - started)


# --- torch.compile -------------------------------------------------------------------------------


def compiled_peers(step: NumericStep, *, quick: bool = False) -> Iterator[Peer]:
    """PyTorch's partitioner, by default, aggressive, and under each of its budgets and solvers."""
    yield Peer("default_partition", plain_schedule(step.problem))
    module, num_outputs = partitioner_input(step.joint)
    partition = _Partition(step, module, num_outputs)
    yield partition.run("budget 1.0", activation_memory_budget=1.0)
    yield partition.run("aggressive", activation_memory_budget=1.0, aggressive_recomputation=True)
    yield partition.run("budget 0.0", activation_memory_budget=0.0)
    for solver in SOLVERS[:1] if quick else SOLVERS:
        for budget in BUDGETS:
            try:
                yield partition.run(
                    f"{solver} {budget}",
                    activation_memory_budget=budget,
                    activation_memory_budget_solver=solver,
                )
            except (ImportError, RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
                print(f"  torch's solver {solver} is left out: {type(error).__name__}: {error}")
                break


def partitioner_input(joint: Joint) -> tuple[fx.GraphModule, int]:
    """The joint graph as `torch._functorch.partitioners` want it, and its number of outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [(f"primals_{i}", n) for i, n in enumerate(joint.inputs, 1)]
    inputs += [(f"tangents_{i}", n) for i, n in enumerate(joint.cotangents, 1) if n is not None]
    for name, node in inputs:
        copies[node] = graph.placeholder(name)
        copies[node].meta = {**node.meta, _JOINT_NAME: node.name}
    for node in joint.module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {**node.meta, _JOINT_NAME: node.name}
    written = [value for _, value in joint.mutations]
    results = [*joint.outputs, *written, *joint.gradients]
    graph.output(tuple(copies[r] if isinstance(r, fx.Node) else r for r in results))
    return fx.GraphModule(joint.module, graph), len(joint.outputs) + len(written)


class _Partition:
    """Runs of the partitioner on one graph; minimum cuts and flops that they share are cached."""

    def __init__(self, step: NumericStep, module: fx.GraphModule, num_outputs: int) -> None:
        self.step = step
        self.module = module
        self.num_outputs = num_outputs
        self.calls = {call.name: o for o, call in enumerate(step.calls) if call is not None}
        self.nodes = {node.name: node for node in step.joint.module.graph.nodes}
        self._cuts: dict[object, object] = {}
        self._flops: dict[fx.Node, float] = {}

    def run(self, name: str, **settings: object) -> Peer:
        """The partitioner's schedule under `settings`."""
        forward, backward, seconds = self.graphs(**settings)
        step = self.step
        saved = {
            v
            for node in backward.graph.find_nodes(op="placeholder")
            for v in values_of(step, [self.nodes[node.meta[_JOINT_NAME]]])
        }
        first = self._operators(forward)
        made = {v for o in first for v in step.problem.operators[o].writes}
        # cotangents arrive, and gradients are read, in operators that are no nodes
        arrival, end = (o for o, call in enumerate(step.calls) if call is None)
        order = (arrival, *self._operators(backward), end)
        schedule = Schedule(tuple(sorted(saved & made)), first, order)
        return Peer(name, schedule, seconds, self._simulated(forward, backward))

    def _simulated(self, forward: fx.GraphModule, backward: fx.GraphModule) -> int:
        """The peak of two graphs of the partitioner."""
        joint = self.step.joint
        num_residuals = len(results_of(forward)) - self.num_outputs
        outputs = ["output"] * len(joint.outputs) + ["write"] * len(joint.mutations)
        cotangents = {ct.name for ct in joint.cotangents if ct is not None}
        note_roles(forward, [*outputs, *["residual"] * num_residuals])
        names = [n.meta[_JOINT_NAME] for n in backward.graph.find_nodes(op="placeholder")]
        note_roles(backward, ["cotangent" if name in cotangents else "residual" for name in names])
        return simulate(forward, backward).peak

    def graphs(self, **settings: object) -> tuple[fx.GraphModule, fx.GraphModule, float | None]:
        """Its two graphs, and the time that it took unless parts were known."""
        known = len(self._cuts)
        cut, flops = partitioners.solve_min_cut, partitioners.estimate_runtime
        partitioners.solve_min_cut = self._cut
        partitioners.estimate_runtime = self._flops_of
        logging.getLogger(partitioners.__name__).setLevel(logging.ERROR)
        started = time.perf_counter()
        try:
            with (
                config.patch(
                    cse=False, activation_memory_budget_runtime_estimator="flops", **settings
                ),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                forward, backward = partitioners.min_cut_rematerialization_partition(
                    self.module, (), num_fwd_outputs=self.num_outputs
                )
        finally:
            partitioners.solve_min_cut, partitioners.estimate_runtime = cut, flops
        seconds = time.perf_counter() - started
        return forward, backward, None if known else seconds

    def _cut(self, graph, info, options, dont_ban=None):
        key = (repr(options), frozenset(n.name for n in dont_ban or ()))
        if key not in self._cuts:
            self._cuts[key] = _SOLVE_MIN_CUT(graph, info, options, dont_ban)
        saved, banned = self._cuts[key]
        return list(saved), banned

    def _flops_of(self, node: fx.Node) -> float:
        if node not in self._flops:
            self._flops[node] = _flops_of(node)
        return self._flops[node]

    def _operators(self, module: fx.GraphModule) -> tuple[int, ...]:
        names = (node.meta.get(_JOINT_NAME) for node in module.graph.nodes if _calls(node))
        return tuple(self.calls[name] for name in names if name in self.calls)


_SOLVE_MIN_CUT = partitioners.solve_min_cut


def _flops_of(node: fx.Node) -> float:
    """The figure of torch's estimator "flops"; our values may be of several fake modes."""

    def materialised(value: object) -> object:
        tensor = value.meta["val"] if isinstance(value, fx.Node) else None
        if not isinstance(tensor, torch.Tensor):
            return value
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map(materialised, (node.args, node.kwargs))
    with FlopCounterMode(display=False) as mode:
        node.target(*args, **kwargs)
    return max(mode.get_total_flops(), 1)


def _calls(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def values_of(step: NumericStep, nodes: Iterable[fx.Node]) -> Iterator[int]:
    """The values in whose memory `nodes` lie; inputs and constants are none."""
    numbers = _numbers(step)
    for node in nodes:
        base = base_of(node)
        index = base.args[1] if is_item(base) else 0
        number = numbers.get((call_of(base), index))
        if number is not None:
            yield number


_NUMBERS: dict[int, tuple[NumericStep, dict]] = {}


def _numbers(step: NumericStep) -> dict:
    """The value that each output of each call is."""
    if id(step) not in _NUMBERS:
        found = {}
        for o, call in enumerate(step.calls):
            if call is not None:
                outputs = call.meta["val"]
                outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
                tensors = [i for i, t in enumerate(outputs) if isinstance(t, torch.Tensor)]
                writes = step.problem.operators[o].writes
                found.update({(call, i): v for i, v in zip(tensors, writes, strict=True)})
        _NUMBERS.clear()
        _NUMBERS[id(step)] = step, found
    return _NUMBERS[id(step)][1]


# --- eager ---------------------------------------------------------------------------------------

Keeps = Callable[[fx.Node, int], bool]
"""Whether the result of an operator in a block is kept; given how many matmuls came before."""


def eager_peers(step: NumericStep, blocks: tuple[str, ...]) -> Iterator[Peer]:
    """`torch.utils.checkpoint` per block, and the selective ones."""
    policies: dict[str, Keeps] = {
        "checkpoint": lambda node, count: False,
        "selective matmuls": lambda node, count: _packet(node) in MATMULS | ATTENTION,
        "selective every-second": lambda node, count: (
            _packet(node) in ATTENTION or (_packet(node) in MATMULS and count % 2 == 1)
        ),
    }
    for name, keeps in policies.items():
        started = time.perf_counter()
        schedule = eager_schedule(step, blocks, keeps)
        yield Peer(name, schedule, time.perf_counter() - started)


def eager_schedule(step: NumericStep, blocks: tuple[str, ...], keeps: Keeps) -> Schedule:
    """The eager schedule with a checkpoint of each of `blocks`; `keeps` names saved values."""
    problem = step.problem
    block_of = {o: _block_of(step.calls[o], blocks) for o in problem.forward}
    plain = plain_schedule(problem)
    kept = _kept_in_blocks(step, block_of, keeps)
    entering, leaving = _across(step, block_of)
    interior = {
        v for o, block in block_of.items() if block is not None for v in problem.operators[o].writes
    }
    saved = {v for v in plain.saved if v not in interior or v in leaving} | entering | kept
    late = [o for o, op in enumerate(problem.operators) if op.part is not Part.FORWARD]
    there = saved | problem.outputs
    order: list[int] = []
    for o in late:
        for v in problem.operators[o].reads:
            if v not in there and problem.producers[v] in block_of:
                block = block_of[problem.producers[v]]
                again = _again(step, block_of, block, kept, set(plain.saved))
                order += again
                there = there | {u for a in again for u in problem.operators[a].writes}
        order.append(o)
        there.update(problem.operators[o].writes)
    return Schedule(tuple(sorted(saved)), problem.forward, tuple(order))


def _again(step, block_of, block, kept, wanted) -> list[int]:
    """The operators of a block, up to the last whose value is wanted, without those saved."""
    problem = step.problem
    mine = [o for o in problem.forward if block_of[o] == block]
    ends = [i for i, o in enumerate(mine) if (set(problem.operators[o].writes) & wanted) - kept]
    prefix = mine[: max(ends, default=-1) + 1]
    return [o for o in prefix if not set(problem.operators[o].writes) <= kept]


def _block_of(node: fx.Node | None, blocks: tuple[str, ...]) -> str | None:
    """The checkpointed submodule that runs `node`."""
    path = (notes_of(node).module or "").split(".") if node is not None else []
    for i in range(1, len(path) + 1):
        name = ".".join(path[:i])
        depth = i - 1
        if any(p.count(".") == depth and fnmatch.fnmatchcase(name, p) for p in blocks):
            return name
    return None


def _kept_in_blocks(step: NumericStep, block_of: dict[int, str | None], keeps: Keeps) -> set[int]:
    kept: set[int] = set()
    counts: dict[str, int] = {}
    for o, block in block_of.items():
        node = step.calls[o]
        if block is None or node is None:
            continue
        count = counts.get(block, 0)
        if keeps(node, count):
            kept.update(step.problem.operators[o].writes)
        counts[block] = count + (_packet(node) in MATMULS)
    return kept


def _across(step: NumericStep, block_of: dict[int, str | None]) -> tuple[set[int], set[int]]:
    """The values that enter a block from outside it, and those that leave one."""
    problem = step.problem
    entering, leaving = set(), set(problem.outputs)
    for o, block in block_of.items():
        for v in problem.operators[o].reads:
            source = block_of.get(problem.producers[v])
            if source != block:
                if block is not None:
                    entering.add(v)
                if source is not None:
                    leaving.add(v)
    return entering, leaving


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)
