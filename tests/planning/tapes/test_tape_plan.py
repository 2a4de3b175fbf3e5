"""Sets of saved values of a tape: against all sets of small problems."""

from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchremat.planning.problem.problem import Operator, Part, Problem
from torchremat.planning.tapes.tape_plan import Crossing, TapeLimits, TapePlanner


def chain_of(sizes, seconds):
    """Each operator reads the one before; the backward pass reads all of them from the last on."""
    count = len(sizes)
    forward = [
        Operator((i - 1,) if i else (), (i,), seconds[i], Part.FORWARD) for i in range(count)
    ]
    backward = []
    for i in reversed(range(count)):
        cotangent = count + len(backward)
        reads = (i, cotangent - 1) if backward else (i,)
        backward.append(Operator(reads, (cotangent,), 0.0, Part.BACKWARD))
    return Problem((*forward, *backward), (*sizes, *(1 for _ in backward)))


problems = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=7).map(
    lambda pairs: chain_of([a for a, _ in pairs], [float(b) for _, b in pairs])
)


def all_sets(problem):
    values = sorted(problem.needed)
    sets = chain.from_iterable(combinations(values, n) for n in range(len(values) + 1))
    return map(frozenset, sets)


@settings(deadline=None, max_examples=40)
@given(problems, st.floats(0.4, 1.0))
def test_limits_are_kept_and_answers_are_near_the_best(problem, part):
    planner = TapePlanner(problem)
    limits = TapeLimits(peak=int(part * planner.plain.costs.peak))
    found = planner.find(limits)
    trials = [planner.evaluate(saved) for saved in all_sets(problem)]
    best = min(trials, key=lambda trial: limits.rank_of(trial, problem))
    assert limits.rank_of(best, problem) <= limits.rank_of(found, problem)
    if not limits.excess_of(found, problem):
        assert found.costs.peak <= limits.peak


def test_what_fits_is_saved():
    planner = TapePlanner(chain_of([4, 4, 4], [1.0, 1.0, 1.0]))
    assert planner.find(TapeLimits(peak=planner.plain.costs.peak)) is planner.plain


def test_a_long_chain_is_divided_by_walls():
    """Without walls, the backward pass would recompute all at once, and gain nothing."""
    planner = TapePlanner(chain_of([8] * 64, [1.0] * 64))
    plain = planner.plain.costs.peak
    least = planner.find(TapeLimits(is_least=True))
    assert least.costs.peak < 0.3 * plain
    within = planner.find(TapeLimits(peak=plain // 2))
    assert within.costs.peak <= plain // 2
    assert within.costs.added_seconds < least.costs.added_seconds


def test_saved_bytes_are_limited():
    problem = chain_of([8] * 16, [1.0] * 16)
    found = TapePlanner(problem).find(TapeLimits(saved=40))
    assert 0 < sum(problem.nbytes[v] for v in found.decisions.saved) <= 40


def test_only_what_is_available_is_saved():
    problem = chain_of([8] * 8, [1.0] * 8)
    found = TapePlanner(problem, frozenset({1, 5})).find(TapeLimits(peak=60))
    assert found.decisions.saved <= {1, 5}


def test_walls_stand_where_few_bytes_cross():
    """Wide and narrow values in turn: at a narrow one, nothing else crosses."""
    crossing = Crossing(chain_of([9, 1, 9, 1, 9, 1, 9, 1], [1.0] * 8))
    assert all(v % 2 for v in crossing.values_at(crossing.places(3)))
    assert not Crossing(chain_of([9, 1, 9], [1.0] * 3), lambda _: False).places(2)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_walls_are_apart(count):
    places = Crossing(chain_of([4] * 40, [1.0] * 40)).places(count)
    assert len(places) == count
    assert all(b - a >= 40 / (count + 1) / 2 for a, b in pairwise(places))
