"""Operators that select, and those that add in any order, are saved unless a policy insists."""

import pickle

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import torchremat as tr
from tests.helpers import assert_same, derivatives
from torchremat.autodiff.replay_rules import reason_to_save

D = torch.double
SELECTING = {
    "topk": lambda x: x.topk(2).values,
    "sort": lambda x: x.sort(descending=True).values,
    "argsort": lambda x: torch.gather(x, 1, x.argsort(1)),
    "argmax": lambda x: torch.gather(x, 1, x.argmax(1, keepdim=True)),
    "max": lambda x: x.max(1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "searchsorted": lambda x: x * torch.searchsorted(torch.linspace(-2, 2, 9, dtype=D), x),
    "nonzero_static": lambda x: x[torch.nonzero_static(x > 0, size=3)[:, 0]],
}
policies = tr.checkpoint_policies


@pytest.mark.parametrize("policy", ["full", "dots", "none"])
@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.sampled(3)
def test_what_selects_is_saved(name, policy):
    def fun(x):
        return SELECTING[name](x.sin()).exp()

    x = torch.randn(4, 5, dtype=D, requires_grad=True)
    ours = tr.checkpoint(fun, policy=policy)
    assert_same(derivatives(ours, [x], [x]), derivatives(fun, [x], [x]))
    report = tr.explain(ours, x)
    selected = [row for row in report if row.dtype == torch.int64]
    assert selected
    assert {row.decision for row in selected} == {"saved"}
    if policy == "full":
        assert all(row.reason.startswith("it selects") for row in selected)


def wrap(policy):
    return lambda op, *avals, **params: policy(op, *avals, **params)


TOPK = policies.recompute_ops("aten.topk")


@pytest.mark.parametrize(
    "policy",
    [
        TOPK & policies.nothing_saveable,
        lambda op, *avals, **params: tr.Recompute,
        lambda op, *avals, **params: tr.Recompute() if "topk" in str(op) else False,
        wrap(TOPK & policies.nothing_saveable),
        ~~(TOPK & policies.nothing_saveable),
        pickle.loads(pickle.dumps(TOPK)) & wrap(policies.nothing_saveable),
        policies.from_selective(lambda ctx, op, *args, **kwargs: tr.Recompute()) | "full",
    ],
)
def test_a_policy_that_insists_is_followed(policy):
    def fun(x):
        return x.sin().topk(2).values.exp()

    x = torch.randn(4, 5, dtype=D, requires_grad=True)
    ours = tr.checkpoint(fun, policy=policy)
    assert tr.explain(ours, x).total == 0
    assert_same(derivatives(ours, [x], [x]), derivatives(fun, [x], [x]))


@pytest.mark.parametrize(
    "policy",
    [
        wrap(policies.nothing_saveable),
        ~~policies.nothing_saveable,
        ~policies.everything_saveable,
        lambda op, *avals, **params: tr.NotSaved,
        policies.from_selective([]),
        policies.save_ops("aten.exp") & wrap(policies.save_ops("aten.exp")),
    ],
)
@pytest.mark.parametrize("name", ["topk", "sort", "argmax"])
def test_a_policy_that_does_not_insist_leaves_it_to_the_library(name, policy):
    def fun(x):
        return SELECTING[name](x.sin()).exp()

    x = torch.randn(4, 5, dtype=D, requires_grad=True)
    reasons = {row.reason for row in tr.explain(fun, x, policy=policy) if row.dtype == torch.int64}
    assert reasons == {"it selects among values, and a replay might select others"}


class Experts(nn.Module):
    """A mixture of experts: two of four for each token, by weights that a router gives."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter_add(-1, chosen, weights)
        outputs = torch.stack([expert(x).relu() for expert in self.experts], -1)
        return x + F.dropout((outputs * gates[..., None, :]).sum(-1), 0.1)


@pytest.mark.parametrize("policy", ["full", "dots", "none", "ops:aten.relu"])
@pytest.mark.parametrize("select", [None, Experts])
@pytest.mark.sampled(3)
def test_a_mixture_of_experts_trains_as_plain(policy, select):
    runs = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(Experts(), Experts(), Experts()).double()
        if wrapped:
            tr.nn.wrap(net, policy=policy, select=select)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        losses = []
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = net(torch.randn(3, 6, 8, dtype=D)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        runs.append([losses, list(net.parameters()), torch.get_rng_state()])
    assert_same(*runs)


def test_atomics_are_a_matter_of_the_device():
    graph = fx.Graph()
    x = graph.placeholder("x")
    add = graph.call_function(torch.ops.aten.index_add.default, (x, 0, x, x))
    add.meta["val"] = torch.empty(3)
    assert reason_to_save(add) is None
    add.meta["val"] = torch.empty(3, device="meta")  # stands for any but the CPU
    assert "atomics" in reason_to_save(add)
    torch.use_deterministic_algorithms(True)
    try:
        assert reason_to_save(add) is None
    finally:
        torch.use_deterministic_algorithms(False)
