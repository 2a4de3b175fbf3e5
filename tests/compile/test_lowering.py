"""Graphs of checkpoints handed to inductor: the same values, and recomputation that stays."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchremat as tr
from tests.compile.models import Convolutions, Transformer, gradients_of, held_nbytes
from tests.helpers import one_in
from torchremat.compile.lowering import lower
from torchremat.errors import OptionError
from torchremat.graph.codegen import source_of


def assert_close(ours: list[Tensor], plain: list[Tensor]) -> None:
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- prevent_cse ---------------------------------------------------------------------------------


def two_products(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.mm(torch.sin(torch.mm(x, w)), w)).sum()


def products_in(prevent_cse: Any, w_is: str = "argument") -> int:
    """How many `mm` the compiled gradient and value of `two_products` has, both in one graph."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    f = tr.checkpoint(two_products, prevent_cse=prevent_cse)
    if w_is == "closed over":
        f = tr.checkpoint(lambda x: two_products(x, w), prevent_cse=prevent_cse)
    args = (x, w) if w_is == "argument" else (x,)
    jitted = tr.jit(torch.func.grad_and_value(f))
    assert_close(list(jitted(*args)), list(torch.func.grad_and_value(f)(*args)))
    return jitted.lower(*args).as_text().count("extern_kernels.mm(")


def test_what_is_computed_again_is_there_unless_it_may_be_merged() -> None:
    forward, again, backward = 2, 2, 2
    assert products_in(True) == forward + again + backward
    assert products_in(False) == forward + backward


def test_it_is_asked_of_each_argument() -> None:
    # with x free to be merged, x @ w is once there only if w is, too
    assert products_in((False, False)) == 4
    assert products_in((False, True)) == 6
    assert products_in((True, False)) == 6


def test_what_is_closed_over_stays_apart() -> None:
    assert products_in((False,), "closed over") == 6


def test_a_tree_that_does_not_fit_the_arguments_is_told() -> None:
    f = tr.checkpoint(two_products, prevent_cse=(True, True, False))
    with pytest.raises(ValueError, match="prevent_cse specification must be a tree prefix"):
        f(torch.ones(2, 2), torch.ones(2, 2))


# --- wrap(compile=) ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "compile"), one_in(3, ["full", "dots", "budget:90%"], ["inductor", "aot_eager"])
)
def test_a_wrapped_module_is_compiled(policy: str, compile: str) -> None:
    torch.manual_seed(0)
    model = Transformer(layers=2, width=16)
    plain, x = copy.deepcopy(model), torch.randn(4, 32, 16)
    eager = tr.nn.wrap(copy.deepcopy(model), policy, select="layers.*")
    tr.nn.wrap(model, policy, select="layers.*", compile=compile)
    assert_close(gradients_of(model, model, x), gradients_of(plain, plain, x))
    assert held_nbytes(model, model, x) <= held_nbytes(eager, eager, x)


def test_buffers_are_written_once() -> None:
    model, x = Convolutions(), torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    tr.nn.wrap(model, "full", compile="inductor")
    assert_close(gradients_of(model, model, x), gradients_of(twin, twin, x))
    assert_close(list(model.buffers()), list(twin.buffers()))


def test_masks_are_those_that_pytorch_draws() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    tr.nn.wrap(model, "full", compile="inductor")
    ours = gradients_of(lambda x: model(x).sum(), model, x)
    state = torch.get_rng_state()
    assert_close(ours, gradients_of(lambda x: twin(x).sum(), twin, x))
    assert torch.equal(state, torch.get_rng_state())


def test_derivatives_of_higher_order_are_compiled_too() -> None:
    linear = tr.nn.wrap(nn.Linear(4, 1), "full", compile="inductor")
    x = torch.randn(3, 4, requires_grad=True)

    def penalty(f: Any) -> list[Tensor]:
        (g,) = torch.autograd.grad(torch.tanh(f(x)).sum(), x, create_graph=True)
        return list(torch.autograd.grad(g.square().sum(), [x, *linear.parameters()]))

    ours = penalty(linear)
    assert_close(ours, penalty(tr.nn.unwrap(linear)))


def test_a_cotangent_may_lie_otherwise_than_when_it_was_traced() -> None:
    linear = nn.Linear(4, 6)
    x = torch.randn(5, 4)
    plain = torch.autograd.grad(linear(x).T.contiguous().cos().sum(), [*linear.parameters()])
    tr.nn.wrap(linear, "full", compile="inductor")
    linear(x).sum().backward()
    ours = torch.autograd.grad(linear(x).T.contiguous().cos().sum(), [*linear.parameters()])
    assert_close(list(ours), list(plain))


def test_fake_tensors_and_watching_modes_see_operators() -> None:
    model = tr.nn.wrap(nn.Linear(8, 8), "full", compile="inductor")
    x = torch.randn(4, 8)
    model(x).sum().backward()
    assert tr.explain(model, x).total == 0
    counter = torch.utils.flop_counter.FlopCounterMode(display=False)
    with counter:
        model(x)
    assert counter.get_total_flops() == 2 * 4 * 8 * 8


def test_what_inductor_compiled_is_compiled_in_a_checkpoint() -> None:
    model, x = Transformer(layers=1), torch.randn(2, 8, 16)
    f = tr.checkpoint(torch.compile(model), policy="dots")
    plain = gradients_of(model, model, x)
    assert_close(gradients_of(f, model, x), plain)
    assert "def call" in source_of(f.last_program.forward.run)


def test_no_such_backend_is_told() -> None:
    with pytest.raises(OptionError, match="nearest: 'inductor'"):
        tr.nn.wrap(nn.Linear(2, 2), compile="inducter")
    with pytest.raises(ValueError, match="is not a backend"):
        lower(tr.make_graph(torch.sin)(torch.ones(2)).graph_module, "xla")


def test_convolutions_train() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Sigmoid(), nn.Conv2d(3, 2, 1), nn.Sigmoid())
    x = torch.randn(2, 2, 6, 6)
    plain = gradients_of(lambda x: model(x).sum(), model, x)
    jitted = tr.jit(model)
    assert_close(gradients_of(lambda x: jitted(x).sum(), model, x), plain)


def test_a_third_derivative() -> None:
    f = tr.jit(lambda x: torch.tanh(x * x))
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def third(f: Any) -> Tensor:
        y = f(x).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y

    torch.testing.assert_close(third(f), third(lambda x: torch.tanh(x * x)))
