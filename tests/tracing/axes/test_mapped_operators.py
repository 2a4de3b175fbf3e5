"""Operators under `vmap` of a checkpoint, beside `torch.vmap` of plain functions and a loop."""

import pytest
import torch

import torchremat as tr
from torchremat.errors import NotAvailableError

torch.manual_seed(0)
X = torch.randn(4, 3, 3, dtype=torch.float64)
FUNCTIONS = {
    "column_stack": lambda x: torch.column_stack([x.sin(), x[0], x]),
    "chain_matmul": lambda x: torch.linalg.multi_dot([x.sin(), x, x]),
    "cov": lambda x: torch.cov(x.sin()),
    "corrcoef": lambda x: torch.corrcoef(x.sin()),
    "as_strided of a value": lambda x: x.sin().as_strided((2, 2), (1, 3)),
    "as_strided of an input": lambda x: x.as_strided((2, 2), (1, 4), 1),
}
AROUND = {
    "vmap": lambda f: tr.vmap(f),
    "grad": lambda f: tr.vmap(tr.grad(lambda x: f(x).pow(2).sum())),
    "jacrev": lambda f: tr.vmap(tr.jacrev(f)),
    "grad of torch.func": lambda f: torch.vmap(torch.func.grad(lambda x: f(x).pow(2).sum())),
    "a checkpoint": lambda f: tr.checkpoint(tr.vmap(tr.grad(lambda x: f(x).pow(2).sum()))),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_mapped_inside_a_checkpoint(name, around):
    function = FUNCTIONS[name]
    found = AROUND[around](tr.checkpoint(function))(X)
    one = torch.func.grad(lambda x: function(x).pow(2).sum())
    one = {"vmap": function, "jacrev": torch.func.jacrev(function)}.get(around, one)
    torch.testing.assert_close(found, torch.stack([one(x.clone()) for x in X]))


def test_examples_are_scattered_as_they_are_strided():
    def fun(x, y):
        return torch.as_strided_scatter(x, y, (2, 2), (1, 2), 1)

    x, y = torch.randn(2, 4), torch.randn(3, 2, 2)
    for given in (x, x.t().contiguous().t()):
        expected = torch.stack([fun(given, b) for b in y])
        assert torch.equal(tr.vmap(fun, (None, 0))(given, y), expected)


@pytest.fixture
def library():
    library = torch.library.Library("mapped_operators", "DEF")
    yield library
    library._destroy()


@pytest.mark.parametrize(
    "around", [tr.vmap, lambda f: tr.vmap(tr.checkpoint(f)), lambda f: torch.vmap(tr.checkpoint(f))]
)
def test_an_operator_that_cannot_be_mapped_is_refused_by_line(library, around):
    library.define("sines(Tensor[] x) -> Tensor[]")
    library.impl("sines", lambda x: [y.sin() for y in x], "CompositeExplicitAutograd")
    sines = torch.ops.mapped_operators.sines
    with pytest.raises(
        NotAvailableError,
        match=r"mapped_operators::sines, at test_mapped_operators.py:\d+ .* has no batching rule",
    ):
        around(lambda x: sines([x, x])[0])(X)


def test_the_error_of_an_operator_in_a_loop_is_its_own(library):
    library.define("fails(Tensor x) -> Tensor")
    library.impl("fails", lambda x: x.shape[99], "CPU")
    library.impl("fails", torch.empty_like, "Meta")
    fails = torch.ops.mapped_operators.fails
    with pytest.raises(IndexError), pytest.warns(UserWarning, match="autograd kernel"):
        tr.vmap(tr.grad(lambda x: tr.checkpoint(fails)(x).sum()))(X)
