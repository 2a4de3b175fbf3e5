"""The methods that `scripts/bench_planning.py` compares plans with, written anew from papers."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, note
from hypothesis import strategies as st

from tests.planning.schedules import plain_schedule
from tests.planning.test_oracles import examples, least_seconds, problems
from torchremat.planning.problem.schedule_costs import costs_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

planning_dtr, planning_graphs, planning_revolve, planning_titan = map(
    importlib.import_module,
    ("planning_dtr", "planning_graphs", "planning_revolve", "planning_titan"),
)


@pytest.mark.parametrize("module", [planning_dtr, planning_graphs, planning_revolve])
def test_their_examples(module):
    assert doctest.testmod(module).failed == 0


@examples(100)
@given(problem=problems(), fraction=st.sampled_from([0.5, 0.7, 0.9, 1.0]))
def test_evictions_hold_what_the_schedule_needs_and_no_more_than_the_budget(problem, fraction):
    plain = costs_of(problem, plain_schedule(problem)).peak
    budget = int(fraction * plain)
    note(f"{problem!r}\nbudget {budget}")
    found = planning_dtr.evict_dynamically(problem, budget)
    if found is not None:
        schedule, most = found
        costs = costs_of(problem, schedule)
        assert costs.peak <= most <= budget
        assert costs.added_seconds >= 0
    if fraction == 1.0 and found is not None:
        assert found[0].backward == plain_schedule(problem).backward


@pytest.mark.parametrize("snapshots", [1, 2, 4, 9])
def test_revolve_adds_the_fewest_steps(snapshots):
    problem = planning_graphs.chain_of(30).problem
    schedule = planning_revolve.reverse_chain(problem, 30, snapshots)
    costs = costs_of(problem, schedule)
    moves = planning_revolve.fewest_moves(30, snapshots + 1) - 29
    assert costs.added_seconds == pytest.approx(1e-3 * moves)
    assert costs.peak <= (snapshots + 3) << 20


@pytest.mark.parametrize("name", ["layered-100", "steps-64"])
def test_policies_of_layers_save_less_and_recompute_more(name):
    graph = planning_graphs.GRAPHS[name]()
    found = [
        costs_of(
            graph.problem,
            planning_titan.save_longest_per_byte(graph.problem, graph.layer_of, share),
        )
        for share in (1.0, 0.5, 0.0)
    ]
    assert found[0].added_seconds == 0
    assert found[0].added_seconds <= found[1].added_seconds <= found[2].added_seconds


def test_programs_of_layers_end_near_the_budget():
    graph = planning_graphs.GRAPHS["steps-64"]()
    plain = costs_of(graph.problem, plain_schedule(graph.problem)).peak
    for fraction in (0.8, 0.5):
        budget = int(fraction * plain)
        schedule = planning_titan.save_by_programs(graph.problem, graph.layer_of, budget)
        costs = costs_of(graph.problem, schedule)
        assert costs.peak <= 1.02 * budget
        assert 0 < costs.added_seconds < 64e-3
    assert planning_titan.save_by_programs(graph.problem, graph.layer_of, plain // 10) is None


@examples(30)
@given(problem=problems(), share=st.sampled_from([0.0, 0.5, 1.0]))
def test_no_method_beats_the_shortest_path(problem, share):
    assume(all(op.repeatable and not op.draws for op in problem.operators))
    layer_of = {o: o // 2 for o in problem.forward}
    schedule = planning_titan.save_longest_per_byte(problem, layer_of, share)
    costs = costs_of(problem, schedule)
    assert costs.added_seconds >= least_seconds(problem, costs.peak) - 1e-9
