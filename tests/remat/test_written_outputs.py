"""A value that is saved and handed out may not be written to before the backward pass."""

import pytest
import torch

import torchremat as tr


@pytest.mark.parametrize("policy", ["names:out", "none", "ops:aten.exp"])
@pytest.mark.parametrize("hand_on", [lambda y: y, lambda y: tr.checkpoint_name(y, "out")])
@pytest.mark.filterwarnings("ignore::torchremat.UnmatchedWarning")
def test_a_write_to_an_output_that_is_saved_raises(policy, hand_on):
    fun = tr.checkpoint(lambda x: hand_on(torch.exp(x)), policy=policy)
    x = torch.ones(3, requires_grad=True)
    kept = any(r.source != "from the argument x" for r in tr.saved_residuals(fun, x))
    y = fun(x)
    y.add_(1)
    if kept:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.exp(torch.ones(3)))
