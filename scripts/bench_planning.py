#!/usr/bin/env python
"""The planner side by side with its peers, on the same graphs, under one simulator and cost model.

Tables and figures show, at each peak of memory that a peer reaches, the time that our plan adds. It
is given over the peer's time and over the proved lower bound. Further tables show the least peak,
fractions of the peak without rematerialisation, and Checkmate's program as an oracle on small
graphs.

    python scripts/bench_planning.py --quick                       some models, 3 minutes
    python scripts/bench_planning.py --jobs 2 --json out.json      all of them, two hours
    python scripts/bench_planning.py --from out.json --docs        docs/measured/planning.*
    python scripts/bench_planning.py --models gpt-4 unet-2 --seconds 10 --device h100 --fused

The models are on the meta device: nothing is computed. Times are those of a roofline. The default
is a device of 150 TFLOP/s and 1.5 TB/s that launches for nothing, so that small models stand for
large ones. Some steps are numbers from the start: chains, and random networks.
"""

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkmate import checkmate
from planning_coarse import coarsened
from planning_graphs import GRAPHS, Graph
from planning_models import MODELS as TOYS
from planning_models import Model
from planning_peers import Peer, graph_of, methods_of, peers_of
from planning_published import PUBLISHED
from planning_real_sizes import REAL_SIZES
from planning_report import print_report, write_docs

from tests.planning.schedules import least_peak_bound, plain_schedule
from torchremat.planning.cost_model import CostModel
from torchremat.planning.costs.device_rates import Rates
from torchremat.planning.problem.orders import orders_of
from torchremat.planning.problem.problem import Problem, Schedule
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.search.solver_options import Solution, SolverOptions
from torchremat.planning.solver import solve, solve_orders
from torchremat.planning.step.problem_builder import NumericStep
from torchremat.planning.step.traced_step import region_of

MODELS: dict[str, Model] = {**TOYS, **PUBLISHED, **REAL_SIZES}
FRACTIONS = (0.75, 0.5, 0.35, 0.25)
NEAR = 0.005
"""Peaks that differ by no more share the plan for the least, where this adds no more than peers."""
SPARED = 1e-6
"""A peer that spares no more of the plain peak is not compared: no integer program is as exact."""
ORACLE_OPERATORS = 40
ROOFLINE = Rates(
    "150 TFLOP/s, 1.5 TB/s",
    *[150e12] * 6,
    pointwise=1e18,
    bytes_per_second=1.5e12,
    launch_seconds=1e-30,
    compute_fraction=1.0,
    memory_fraction=1.0,
)

Record = dict[str, Any]


class Bench:
    """A model, or a graph that is numbers from the start, with our plans for it."""

    def __init__(self, name: str, cost: CostModel, seconds: float | None) -> None:
        self.name = name
        self.cost = cost
        self.options = SolverOptions(seconds=seconds)
        self.step: NumericStep | None = None
        self.blocks: tuple[str, ...] = ()
        started = time.perf_counter()
        if name in GRAPHS:
            self.graph = GRAPHS[name]()
        else:
            self.graph = self._trace(MODELS[name])
        self.trace_seconds = time.perf_counter() - started
        self.problem = self.graph.problem
        self.plain = plain_schedule(self.problem)
        self.peak = costs_of(self.problem, self.plain).peak
        self._plans: dict[int, tuple[Solution, float]] = {}

    def _trace(self, model: Model) -> Graph:
        module, args = model.build()
        self.step = NumericStep.of(region_of(module, args, {}).joint, self.cost.seconds)
        self.blocks = model.blocks
        return graph_of(self.step, model.blocks)

    def peers(self, *, quick: bool) -> Iterator[Peer]:
        if self.step is not None:
            quick = quick or MODELS[self.name].large
            yield from peers_of(self.step, self.blocks, quick=quick)
        yield from methods_of(self.graph, self.peak)

    @property
    def num_nodes(self) -> int:
        if self.step is None:
            return len(self.problem.operators)
        return len(self.step.joint.module.graph.nodes)

    @cached_property
    def orders(self) -> tuple[Problem, ...]:
        """The problem in the orders in which we may run its backward pass."""
        return orders_of(self.problem)

    @property
    def least_peak(self) -> int:
        """The least peak of any plan so far."""
        return min(solution.least_peak for solution, _ in self._plans.values())

    @cached_property
    def _flops(self) -> list[int]:
        if self.step is None:
            return [0] * len(self.problem.operators)
        return [0 if call is None else self.cost.flops(call) for call in self.step.calls]

    def plan(self, budget: int) -> tuple[Solution, float]:
        """Our plan, and the seconds of one core that it took, whatever else runs."""
        if budget not in self._plans:
            started = time.process_time()
            solution = solve_orders(self.orders, budget, self.options)
            self._plans[budget] = solution, time.process_time() - started
        return self._plans[budget]

    def ours(self, budget: int) -> Record:
        """Our plan as a record; a failure is printed, and counts as a budget that is not met."""
        try:
            solution, took = self.plan(budget)
        except Exception as error:
            print(f"  {self.name} at {budget} bytes: {error!r}", file=sys.stderr, flush=True)
            return {
                "budget": budget,
                "bound_seconds": 0.0,
                "plan_seconds": 0.0,
                "least_peak": self.peak,
                "added_seconds": None,
                "error": repr(error),
            }
        record = {
            "budget": budget,
            "bound_seconds": solution.lower_bound_seconds,
            "plan_seconds": took,
            "least_peak": solution.least_peak,
        }
        if solution.schedule is None:
            return {**record, "added_seconds": None}
        record |= self.figures(solution.schedule)
        assert record["peak"] <= budget, (self.name, record)
        return record

    def beside(self, peer: Record, budget: int) -> Record:
        """Our plan for a budget up to a peer's peak, or for that peak if this is to be fair.

        A plan for less memory that adds no more than the peer settles the comparison.
        """
        ours = self.ours(budget)
        if ours["added_seconds"] is None or ours["added_seconds"] > peer["added_seconds"]:
            return self.ours(peer["peak"])
        return ours

    def figures(self, schedule: Schedule) -> Record:
        """The costs of a schedule."""
        costs = costs_of(self.problem, schedule)
        counts = Counter([*schedule.forward, *schedule.backward])
        return {
            "peak": costs.peak,
            "saved": sum(self.problem.nbytes[v] for v in schedule.saved),
            "added_seconds": costs.added_seconds,
            "added_flops": sum((n - 1) * self._flops[o] for o, n in counts.items()),
            "repeated": sum(n - 1 for n in counts.values()),
        }

    def peer(self, peer: Peer) -> Record:
        """A peer as a record, checked against a simulation of its own graphs."""
        figures = self.figures(peer.schedule)
        if peer.graphs_peak not in (None, figures["peak"]):
            print(f"  {self.name} {peer.name}: its graphs have a peak of {peer.graphs_peak}")
        if peer.most_bytes is not None:
            figures["peak"] = max(figures["peak"], peer.most_bytes)
        return {"name": peer.name, "plan_seconds": peer.seconds, **figures}


def measure(name: str, cost: CostModel, seconds: float | None, quick: bool) -> Record:
    """Everything about one model."""
    started = time.perf_counter()
    bench = Bench(name, cost, seconds)
    peers = [bench.peer(peer) for peer in bench.peers(quick=quick)]
    lower = [p for p in peers if p["peak"] < (1 - SPARED) * bench.peak]
    budget_of = shared_budgets(p["peak"] for p in lower)
    for peer in lower:
        peer["ours"] = bench.beside(peer, budget_of[peer["peak"]])
    floor = order_floor(bench.problem)
    problem = bench.problem
    budgets = [{"fraction": f, **bench.ours(round(f * bench.peak))} for f in FRACTIONS]
    bench.ours(min(map(order_floor, bench.orders)))
    return {
        "model": name,
        "nodes": bench.num_nodes,
        "operators": len(problem.operators),
        "trace_seconds": bench.trace_seconds,
        "plain": bench.figures(bench.plain),
        "forward_seconds": problem.seconds_of(problem.forward),
        "peers": peers,
        "budgets": budgets,
        "floor": floor,
        "least_bound": min(least_peak_bound(p, bench.least_peak) for p in bench.orders),
        "least_ours": bench.least_peak,
        "seconds": time.perf_counter() - started,
    }


def shared_budgets(peaks: Iterable[int]) -> dict[int, int]:
    """For each peak one that is no larger, and hardly smaller."""
    budgets: dict[int, int] = {}
    last = 0
    for peak in sorted(peaks):
        if peak > last * (1 + NEAR):
            last = peak
        budgets[peak] = last
    return budgets


def order_floor(problem: Problem) -> int:
    """The peak that no choice in the given orders gets below, of what each operator needs itself.

    These are its inputs and outputs, and the values alive then whatever is decided: outputs and
    gradients, cotangents, and values that need cotangents. In the forward pass they include the
    inputs of the rest of it.
    """
    forward = costs_of(problem, Schedule((), problem.forward, _chain(problem)))
    wanted: set[int] = set()
    held = problem.outputs | problem.gradients
    made = {v for o in (*problem.forward, *problem.backward) for v in problem.operators[o].writes}
    floor = max(forward.live[: len(problem.forward)], default=0)
    for o in reversed(problem.backward):
        op = problem.operators[o]
        alive = wanted | (made & held) | set(op.reads) | set(op.writes)
        total = problem.constant + problem.backward_constant + op.nbytes_inside
        floor = max(floor, total + sum(problem.nbytes[v] for v in alive))
        wanted = (wanted - set(op.writes)) | (set(op.reads) - problem.known)
        made -= set(op.writes)
    return floor


def _chain(problem: Problem) -> tuple[int, ...]:
    """A backward pass that recomputes everything; only its forward pass is of interest."""
    late = [o for o, op in enumerate(problem.operators) if o not in set(problem.forward)]
    return (*problem.forward, *late)


def consult(name: str, fraction: float, cost: CostModel, seconds: float) -> Record:
    """Our plan and Checkmate's optimum for one model, made coarse, and one budget."""
    bench = Bench(name, cost, None)
    problem = coarsened(bench.problem, ORACLE_OPERATORS)
    peak = costs_of(problem, plain_schedule(problem)).peak
    budget = round(fraction * peak)
    started = time.process_time()
    ours = solve(problem, budget)
    took = time.process_time() - started
    optimum = checkmate(problem, budget, seconds=seconds)
    if optimum.schedule is not None:
        costs = costs_of(problem, optimum.schedule)
        assert costs.peak <= budget * (1 + 1e-6), (name, costs.peak, budget)
        assert abs(costs.added_seconds - optimum.added_seconds) <= 1e-6 * peak, name
    return {
        "model": name,
        "fraction": fraction,
        "operators": [len(bench.problem.operators), len(problem.operators)],
        "ours_seconds": None if ours.schedule is None else ours.added_seconds,
        "least_peak": ours.least_peak / peak,
        "bound_seconds": ours.lower_bound_seconds,
        "plan_seconds": took,
        "optimum_seconds": None if optimum.schedule is None else optimum.added_seconds,
        "optimum_bound_seconds": optimum.bound,
        "is_proved": optimum.is_proved,
        "is_prompt_optimum": optimum.is_prompt_optimum,
        "oracle_seconds": optimum.seconds,
    }


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    every = [*MODELS, *GRAPHS]
    parser.add_argument("--models", nargs="*", metavar="NAME", help=", ".join(every))
    parser.add_argument("--quick", action="store_true", help="some models, one of torch's solvers")
    parser.add_argument("--seconds", type=float, help="for each of our plans; else by its size")
    parser.add_argument("--device", help="whose roofline: h100, a100, cpu, ...")
    parser.add_argument("--fused", action="store_true", help="as a compiler fuses pointwise work")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--oracle", type=float, metavar="SECONDS", help="for each; 0: none")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--resume", action="store_true", help="keep what is in the file of --json")
    parser.add_argument(
        "--from", dest="sources", nargs="+", metavar="FILE", help="figures of earlier runs"
    )
    parser.add_argument("--docs", action="store_true", help="write docs/measured/planning.*")
    options = parser.parse_args()
    unknown = set(options.models or ()).difference(every)
    if unknown:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    if options.docs and importlib.util.find_spec("matplotlib") is None:
        parser.error("--docs draws with matplotlib, which is not installed")
    results = join_runs(options.sources) if options.sources else run(options)
    print_report(results)
    if options.docs:
        write_docs(results, Path(__file__).resolve().parents[1] / "docs" / "measured")
    return 0


def join_runs(files: Iterable[str]) -> Record:
    """The figures of runs on one device. Where two have the same model, the later file counts."""
    runs = [json.loads(Path(file).read_text()) for file in files]
    if len({found["device"] for found in runs}) > 1:
        raise SystemExit("the runs are for different devices")
    models = {m["model"]: m for found in runs for m in found["models"]}
    oracles = {(o["model"], o["fraction"]): o for found in runs for o in found["oracles"]}
    return {
        **runs[0],
        "models": [models[name] for name in (*MODELS, *GRAPHS) if name in models],
        "oracles": list(oracles.values()),
        "not_run": [name for name in (*MODELS, *GRAPHS) if name not in models],
        "seconds": sum(found["seconds"] for found in runs),
        "command": "\n    ".join(dict.fromkeys(found["command"] for found in runs)),
    }


def run(options: argparse.Namespace) -> Record:
    """All figures, written to the file of `--json` as they come."""
    cost = CostModel.of(options.device or ROOFLINE)
    cost = cost.fused() if options.fused else cost
    names = options.models or [n for n, m in MODELS.items() if m.quick or not options.quick]
    if not options.models and not options.quick:
        names += GRAPHS
    oracle = options.oracle if options.oracle is not None else 5.0 if options.quick else 40.0
    results: Record = {"device": f"{cost!r}", "models": [], "oracles": [], "seconds": 0.0}
    file = Path(options.json) if options.json else None
    if options.resume and file is not None and file.exists():
        results = json.loads(file.read_text())
    words = (Path(word).name if "/" in word else word for word in sys.argv[1:])
    results["command"] = shlex.join(["python", f"scripts/{Path(__file__).name}", *words])
    done = {record["model"] for record in results["models"]}
    consulted = {(record["model"], record["fraction"]) for record in results["oracles"]}
    model_of = partial(measure, cost=cost, seconds=options.seconds, quick=options.quick)
    oracle_of = partial(consult, cost=cost, seconds=oracle)
    small = [n for n in names if n in MODELS and MODELS[n].oracle]
    asked = [(n, f) for n in small for f in FRACTIONS if oracle]
    work: list[tuple[str, Callable[..., Record], list[tuple]]] = [
        ("models", model_of, [(n,) for n in names if n not in done]),
        ("oracles", oracle_of, [call for call in asked if call not in consulted]),
    ]
    started = time.perf_counter() - results["seconds"]
    for key, function, calls in work:
        for record in _spread(function, calls, options.jobs):
            results[key].append(record)
            results["seconds"] = time.perf_counter() - started
            if file is not None:
                file.write_text(json.dumps(results, indent=1))
    return results


def _spread(function: Callable[..., Record], calls: list[tuple], jobs: int) -> Iterable[Record]:
    """The results of `calls`, said as they come."""
    if jobs == 1:
        for call in calls:
            print(f"... {' '.join(map(str, call))}", file=sys.stderr, flush=True)
            yield function(*call)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for call, future in [(call, pool.submit(function, *call)) for call in calls]:
            print(f"... {' '.join(map(str, call))}", file=sys.stderr, flush=True)
            yield future.result()


if __name__ == "__main__":
    sys.exit(main())
