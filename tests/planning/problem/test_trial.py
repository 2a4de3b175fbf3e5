"""Decisions that are tried: what is left out early is what would not have been taken."""

from hypothesis import given
from hypothesis import strategies as st

from tests.planning.test_oracles import examples, problems
from torchremat.planning.problem.forward_order import ForwardOrder, _Places
from torchremat.planning.problem.problem import Schedule
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.schedule_costs import count_live
from torchremat.planning.problem.trial import Evaluator


@examples(300)
@given(problem=problems(), data=st.data())
def test_a_try_for_less_is_a_try_that_is_asked_afterwards(problem, data):
    saved = data.draw(st.frozensets(st.sampled_from(sorted(problem.known))))
    budget, seconds = data.draw(st.integers(4, 60)), data.draw(st.integers(0, 30))
    decisions = Decisions(saved | Evaluator(problem, budget).fixed)
    expected = Evaluator(problem, budget)(decisions)
    found = Evaluator(problem, budget).try_for_less(decisions, seconds)
    is_taken = expected.fits and expected.costs.added_seconds < seconds
    assert found == (expected if is_taken else None)


@examples(300)
@given(problem=problems(), data=st.data())
def test_operators_of_either_pass_run_where_the_forward_peak_is_least(problem, data):
    """One after the other: each at a place with the least peak, given those before it."""
    saved = data.draw(st.frozensets(st.sampled_from(sorted(problem.known))))
    order = ForwardOrder(problem).order(saved)
    operators, left = problem.operators, set(problem.forward)
    for o in sorted(set(order) - left):
        before = [p for p in order if p in left]
        left.add(o)
        chosen = [p for p in order if p in left]
        made = {v: i for i, p in enumerate(before) for v in operators[p].writes}
        kept = tuple(v for v in saved if v in made or v in operators[o].writes)

        def peak_of(forward, kept=kept):
            return max(count_live(problem, Schedule(kept, tuple(forward), ())))

        least = max((made[v] + 1 for v in operators[o].reads), default=0)
        places = range(least, len(before) + 1)
        assert chosen.index(o) in places
        assert peak_of(chosen) == min(peak_of([*before[:i], o, *before[i:]]) for i in places)


@examples(300)
@given(problem=problems(), data=st.data())
def test_what_is_known_of_an_order_holds_after_operators_were_added(problem, data):
    saved = data.draw(st.frozensets(st.sampled_from(sorted(problem.known))))
    finder = ForwardOrder(problem)
    places = _Places(problem, saved, finder._live, finder._made, finder._last)
    for o in sorted(finder._find_extra(saved)):
        places.insert(o)
        order = tuple(places.order)
        made = {v: i for i, p in enumerate(order) for v in problem.operators[p].writes}
        assert {v: places.made[v] for v in made} == made
        schedule = Schedule(tuple(saved & made.keys()), order, ())
        assert places.live.tolist() == count_live(problem, schedule)
