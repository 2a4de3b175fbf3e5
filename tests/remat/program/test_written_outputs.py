"""A value that is saved and handed out may not be written to before the backward pass."""

import pytest
import torch

import torchremat as tr


def exp(x):
    return torch.exp(x)


def named_exp(x):
    return tr.checkpoint_name(torch.exp(x), "out")


@pytest.mark.parametrize(
    ("policy", "fun"),
    [
        ("names:out", named_exp),
        ("none", exp),
        ("none", named_exp),
        ("ops:aten.exp", exp),
        ("ops:aten.exp", named_exp),
    ],
)
def test_a_write_to_an_output_that_is_saved_raises(policy, fun):
    y = tr.checkpoint(fun, policy=policy)(torch.ones(3, requires_grad=True))
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("fun", [exp, named_exp])
def test_a_write_to_an_output_that_is_computed_again_is_harmless(fun):
    x = torch.ones(3, requires_grad=True)
    y = tr.checkpoint(fun, policy="full")(x)
    y.add_(1)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.exp(torch.ones(3)))
