"""Chains: the optimum of Griewank and Walther, shortest paths on small ones, and real models."""

import math

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn

import torchremat as tr
from tests.planning.test_oracles import examples, least_peak, least_seconds
from torchremat.planning.chains.chain import find_chains
from torchremat.planning.chains.chain_optimum import ChainOptimum, decide
from torchremat.planning.problem.problem import Operator, Part, Problem
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.search.solver_options import SolverOptions
from torchremat.planning.solver import solve

FORWARD, EITHER_PASS, BACKWARD = Part.FORWARD, Part.EITHER_PASS, Part.BACKWARD


class Builder:
    """A step that grows by one operator with one result at a time."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.nbytes: list[int] = []

    def add(self, part: Part, reads: list[int], nbytes: int = 1, seconds: float = 1.0) -> int:
        self.operators.append(Operator(tuple(reads), (len(self.nbytes),), seconds, part))
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1

    def build(self, gradient: int) -> Problem:
        gradients = frozenset({gradient})
        return Problem(tuple(self.operators), tuple(self.nbytes), gradients=gradients)


def equal_steps(count: int) -> Problem:
    """`count` steps, of which the first reads the input; the last value is the output's."""
    builder = Builder()
    values: list[int] = []
    for _ in range(count):
        values.append(builder.add(FORWARD, values[-1:]))
    cotangent = builder.add(BACKWARD, [])
    for step in reversed(range(count)):
        cotangent = builder.add(BACKWARD, [cotangent, *values[max(0, step - 1) : step]])
    return builder.build(cotangent)


def fewest_moves(steps: int, snapshots: int) -> int:
    """Forward steps to reverse a chain, by the formula of Griewank and Walther (2000).

    One snapshot is the input of the chain.
    """
    repeats = 0
    while math.comb(snapshots + repeats, snapshots) < steps:
        repeats += 1
    return repeats * steps - math.comb(snapshots + repeats, repeats - 1) if repeats else 0


@pytest.mark.parametrize("steps", [2, 3, 10, 50])
def test_plans_of_equal_steps_meet_the_binomial_optimum_and_so_does_the_bound(steps):
    problem = equal_steps(steps)
    for snapshots in range(1, steps):
        solution = solve(problem, snapshots + 2)  # and two cotangents
        optimum = fewest_moves(steps, snapshots) - (steps - 1)
        assert solution.added_seconds == optimum
        assert solution.lower_bound_seconds == pytest.approx(optimum)
        assert costs_of(problem, solution.schedule).peak <= snapshots + 2


def chain(steps: int, cotangent: int) -> Problem:
    """A chain of values of 3 bytes, each read, whose steps differ in time."""
    builder = Builder()
    values: list[int] = []
    for step in range(steps):
        values.append(builder.add(FORWARD, values[-1:], 3, float(1 + step % 3)))
    cotangents: list[int] = []
    for value in reversed(values):
        cotangents = [builder.add(BACKWARD, [*cotangents, value], cotangent)]
    return builder.build(*cotangents)


@st.composite
def chains_with_sides(draw) -> Problem:
    """Chains whose values differ in size, with others beside them; some are read, in any order."""
    builder = Builder()
    chain: list[int] = []
    read: list[list[int]] = []
    for _ in range(draw(st.integers(2, 4))):
        size = 3 + draw(st.sampled_from([0, 0, 1, 2]))
        chain.append(builder.add(FORWARD, chain[-1:], size))
        read.append([chain[-1]])
        if draw(st.booleans()):
            size = 3 + draw(st.sampled_from([-2, 0, 1]))
            read.append([builder.add(EITHER_PASS, chain[-1:], size)])
    joined = draw(st.permutations(read)) if draw(st.booleans()) else read[::-1]
    cotangents: list[int] = []
    for values in joined:
        size = draw(st.integers(1, 3))
        reads = values if draw(st.booleans()) else []
        cotangents = [builder.add(BACKWARD, [*cotangents, *reads], size)]
    return builder.build(*cotangents)


@pytest.mark.parametrize("cotangent", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [2, 3, 4, 5, 6])
def test_the_optimum_of_a_chain_is_the_shortest_path(steps, cotangent):
    problem = chain(steps, cotangent)
    least = least_peak(problem)
    for budget in range(least, least + 10):
        optimum = least_seconds(problem, budget)
        (found,) = find_chains(problem)
        answer = ChainOptimum(found, budget)
        assert answer.seconds == pytest.approx(optimum)
        evaluator = Evaluator(problem, budget)
        alone = {demand.value: frozenset({demand.value}) for demand in found.demands}
        trial = evaluator(decide(problem, found, answer.pebbles(), evaluator.fixed, alone))
        assert trial.fits
        assert trial.costs.added_seconds == pytest.approx(optimum)


@examples(150)
@given(problem=chains_with_sides(), more=st.integers(0, 9))
def test_the_optimum_of_a_chain_is_a_bound_of_a_step_that_has_more(problem, more):
    budget = least_peak(problem) + more
    optimum = least_seconds(problem, budget)
    note(f"{problem!r}\nbudget {budget}, optimum {optimum}")
    for chain in find_chains(problem):
        assert ChainOptimum(chain, budget).seconds <= optimum + 1e-9


def test_a_budget_without_room_for_a_chain_has_no_optimum():
    (chain,) = find_chains(equal_steps(6))
    assert ChainOptimum(chain, 2).seconds == math.inf


def test_a_chain_too_long_for_tables_is_planned_without_them():
    problem = equal_steps(700)
    solution = solve(problem, 400, SolverOptions(is_prompt=True))
    assert solution.schedule is not None
    assert solution.lower_bound_seconds <= solution.added_seconds


def test_a_residual_network_has_no_chain():
    builder = Builder()
    x = builder.add(FORWARD, [])
    made = []
    for _ in range(8):
        inner = builder.add(FORWARD, [x])
        x = builder.add(FORWARD, [x, inner])
        made += [inner, x]
    cotangent = builder.add(BACKWARD, [])
    for value in reversed(made):
        cotangent = builder.add(BACKWARD, [cotangent, value])
    assert not list(find_chains(builder.build(cotangent)))


def test_a_plan_is_proved_best_where_the_backward_pass_reads_what_is_beside_the_chain():
    def forward(x):
        for _ in range(30):
            x = torch.sin(x)
        return x.sum()

    plan = tr.plan(forward, torch.randn(512, 32, requires_grad=True), budget=0.2)
    assert plan.gap < 1e-6
    assert plan.recompute_seconds > 0


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_plans_of_plain_networks_are_proved_best(activation):
    """The bits are those of plain autograd."""
    layers = [m for _ in range(24) for m in (nn.Linear(32, 32), activation())]
    model, x = nn.Sequential(*layers), torch.randn(512, 32)
    plan = tr.plan(lambda x: model(x).sum(), x, budget=0.2)
    assert plan.gap < 1e-6
    assert plan.recompute_seconds > 0
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    policy = tr.checkpoint_policies.from_plan(plan)
    tr.checkpoint(lambda x: model(x).sum(), policy=policy)(x).backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
