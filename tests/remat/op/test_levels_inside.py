"""Transformations of `torch.func` inside a checkpoint, of what it closes over."""

import pytest
import torch

import torchremat as tr

FUNCTIONS = {
    "grad": lambda x, w: torch.func.grad(lambda w: ((x @ w) ** 2).sum())(w),
    "vmap": lambda x, w: torch.func.vmap(lambda w: x @ w, 1)(w),
    "tr.vmap": lambda x, w: tr.vmap(lambda w: x @ w, 1)(w),
    "jvp": lambda x, w: torch.func.jvp(lambda w: (x @ w) ** 2, (w,), (w,))[1],
    "jacrev": lambda x, w: torch.func.jacrev(lambda w: ((x @ w) ** 2).sum())(w),
    "hessian": lambda x, w: torch.func.hessian(lambda w: ((x @ w) ** 3).sum())(w),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "make",
    [tr.checkpoint, lambda f: lambda x: tr.eval_graph(tr.make_graph(f)(x), x)],
    ids=["checkpoint", "make_graph"],
)
def test_a_level_around_what_is_closed_over_keeps_its_gradient(name, make):
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def gradients(fun):
        return torch.autograd.grad(fun(x).pow(2).sum(), (x, w))

    plain = gradients(lambda x: FUNCTIONS[name](x, w))
    torch.testing.assert_close(gradients(make(lambda x: FUNCTIONS[name](x, w))), plain)
