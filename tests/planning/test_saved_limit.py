"""`memory_budget(saved=...)`: a limit on what the forward pass keeps, judged by what runs."""

import copy
import itertools
import pickle

import pytest
import torch

import torchremat as tr
from tests.helpers import assert_same
from tests.planning.models import MODELS
from tests.planning.test_budget_policy import step
from torchremat.checkpoint_policies import memory_budget
from torchremat.errors import BudgetError, PolicyError
from torchremat.planning.planner import add_saved_limit, drop_limit_operator
from torchremat.planning.problem.problem import Operator, Part, Problem
from torchremat.planning.problem.replay import Decisions, replay_of
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.solver import solve


@pytest.mark.parametrize("fraction", [0.7, 0.4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_no_more_is_saved_and_bits_are_plain_pytorchs(name, fraction):
    make_model, make_input = MODELS[name]
    torch.manual_seed(0)
    plain = make_model()
    limited, x = copy.deepcopy(plain), make_input()
    limit = int(fraction * tr.plan(plain, x, budget=1.0).saved_bytes)
    fun = tr.checkpoint(limited, policy=memory_budget(saved=limit))
    fun(x)  # traced and planned
    limited.load_state_dict(plain.state_dict())
    found, _, middle = step(limited, fun, x)
    assert_same(found, step(plain, plain, x)[0])
    output = found[0].nbytes
    assert middle <= limit + output


def chain():
    """x -> a -> b -> c -> d, of which the derivatives of all are needed."""
    sizes = (4, 6, 5, 3)
    seconds = (1.0, 5.0, 2.0, 4.0)
    forward = [
        Operator((v - 1,) if v else (), (v,), seconds[v], Part.FORWARD) for v in range(len(sizes))
    ]
    backward = [
        Operator((v, *((len(sizes) + i - 1,) if i else ())), (len(sizes) + i,), 1.0, Part.BACKWARD)
        for i, v in enumerate(reversed(range(len(sizes))))
    ]
    return Problem((*forward, *backward), (*sizes, 1, 1, 1, 1))


@pytest.mark.parametrize("limit", range(0, 19, 2))
def test_added_is_the_least_that_the_limit_allows(limit):
    problem, room = chain(), 1000
    values = range(4)
    sets = [set(s) for n in range(5) for s in itertools.combinations(values, n)]
    best = min(
        costs_of(problem, replay_of(problem, Decisions(frozenset(s))).schedule).added_seconds
        for s in sets
        if sum(problem.nbytes[v] for v in s) <= limit
    )
    found = solve(add_saved_limit(problem, room, limit), room)
    schedule = drop_limit_operator(problem, found.schedule)
    assert sum(problem.nbytes[v] for v in schedule.saved) <= limit
    assert costs_of(problem, schedule).added_seconds == pytest.approx(best)


def test_both_limits_hold():
    make_model, make_input = MODELS["gpt"]
    model, x = make_model(), make_input()
    plan = tr.plan(model, x, budget=1.0)
    policy = memory_budget("90%", saved=plan.saved_bytes // 2)
    fun = tr.checkpoint(model, policy=policy)
    fun(x)
    _, peak, middle = step(model, fun, x)
    assert peak <= 0.9 * plan.peak_bytes
    assert middle <= plan.saved_bytes // 2 + 4


def test_what_must_be_kept_is_named_when_it_is_more():
    def f(x):
        return torch.topk(x.sin(), 300).values.exp().sum()

    x = torch.randn(1000, requires_grad=True)
    with pytest.raises(BudgetError, match="must not be recomputed have to be saved"):
        tr.checkpoint(f, policy=memory_budget(saved=1))(x)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (memory_budget(saved="2MiB"), "saved:2MiB"),
        (memory_budget(saved=0), "saved:0B"),
        (memory_budget("1GiB", saved=300), None),
    ],
)
def test_limits_are_spelt_printed_and_pickled(policy, text):
    assert policy.spelling == text
    if text is not None:
        assert tr.policy(text).spelling == text
    assert eval(repr(policy), {"memory_budget": memory_budget}) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_limits_that_are_none_are_refused():
    with pytest.raises(PolicyError, match="limits nothing"):
        memory_budget()
    with pytest.raises(TypeError, match="is not a number of bytes"):
        memory_budget(saved="50%")
    with pytest.raises(ValueError, match="has no unit"):
        memory_budget(saved="8")
    with pytest.raises(ValueError, match="positive"):
        memory_budget(saved=-1)
