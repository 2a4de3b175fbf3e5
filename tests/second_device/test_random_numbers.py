"""Numbers that are drawn on the device: those of plain PyTorch, and the generators go on alike."""

import pytest
import torch

import torchremat as tr
from tests.helpers import assert_same

pytestmark = pytest.mark.parametrize("late", ["copies last"], indirect=True)
"""No copy runs beside the operators here."""

DRAWS = {
    "rand_like": lambda x: x * torch.rand_like(x),
    "normal_": lambda x: x * torch.empty_like(x).normal_(),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: x[:, torch.multinomial(x[0].softmax(0), 8)],
    "binomial": lambda x: x * torch.binomial(torch.full_like(x, 5.0), x.sigmoid().detach()),
    "beta": lambda x: torch.distributions.Beta(x.exp(), x.exp() + 1).rsample(),
    "poisson": lambda x: x * torch.poisson(x.exp().detach()),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.3),
    "on both": lambda x: x * torch.rand_like(x) * torch.rand(8, device="cpu").to("late"),
}


def _run(f, x):
    torch.manual_seed(7)
    y = f(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x)
    return y, slope, torch.rand(3, device="late"), torch.rand(3, device="late:1"), torch.rand(3)


@pytest.mark.parametrize("policy", ["full", "dots", "none"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws(late, name, policy):
    x = torch.randn(6, 8).to("late").requires_grad_()
    f = DRAWS[name]
    wrapped = tr.checkpoint(f, policy=policy)
    for _ in range(2):  # with a new trace, and with that
        assert_same(_run(wrapped, x), _run(f, x))


def test_a_function_that_seeds_the_device_is_refused(late):
    def f(x):
        torch.late.manual_seed(3)
        return x * torch.rand_like(x)

    x = torch.ones(4, device="late", requires_grad=True)
    before = late.get_rng_state()
    with pytest.raises(tr.errors.EffectError, match=r"seeds the default generator of late:0"):
        tr.checkpoint(f)(x)
    assert torch.equal(late.get_rng_state(), before)
