"""Decisions that are tried: what is left out early is what would not have been taken."""

from hypothesis import given
from hypothesis import strategies as st

from tests.planning.test_oracles import examples, problems
from torchremat.planning.problem.forward_order import ForwardOrder
from torchremat.planning.problem.problem import Part, Schedule
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
def test_one_operator_of_either_pass_runs_where_the_forward_peak_is_least(problem, data):
    saved = data.draw(st.frozensets(st.sampled_from(sorted(problem.known))))
    order = ForwardOrder(problem).order(saved)
    extra = [o for o in order if problem.operators[o].part is Part.EITHER_PASS]
    if len(extra) != 1:
        return
    (o,) = extra
    made = {v: i for i, p in enumerate(problem.forward) for v in problem.operators[p].writes}
    least = max((made[v] + 1 for v in problem.operators[o].reads), default=0)

    def peak_at(place):
        forward = (*problem.forward[:place], o, *problem.forward[place:])
        kept = tuple(sorted(v for v in saved if v in made or v in problem.operators[o].writes))
        return max(count_live(problem, Schedule(kept, forward, ())))

    peaks = {place: peak_at(place) for place in range(least, len(problem.forward) + 1)}
    assert peaks[order.index(o)] == min(peaks.values())
