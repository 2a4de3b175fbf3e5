"""Scalars in large storages count as what kernels keep, and budgets hold with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchremat as tr
from torchremat.measure import LiveBytes
from torchremat.planning.memory.probed_storage import scalar_nbytes

LOSSES = {
    "mse": F.mse_loss,
    "summed mse": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "smooth l1": F.smooth_l1_loss,
    "soft margin": F.soft_margin_loss,
    "huber": F.huber_loss,
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "cross entropy": lambda x, y: F.cross_entropy(x, y.argmax(-1)),
    "norm": lambda x, y: torch.linalg.vector_norm(x - y),
    "mean": lambda x, y: (x - y).mean(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_storage_of_a_loss_is_that_of_its_kernel(loss, dtype):
    x, y = torch.randn(2, 64, 96, dtype=dtype)
    graph = tr.make_graph(loss)(x, y).graph_module.graph
    found = {
        node.target: scalar_nbytes(node, value, 0)
        for node in graph.nodes
        if node.op == "call_function"
        and isinstance(value := node.meta["val"], torch.Tensor)
        and value.dim() == 0
    }
    expected = loss(x, y).untyped_storage().nbytes()
    assert not found or expected in found.values()
    assert found or expected == dtype.itemsize


class Denoiser(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(48, 48), nn.GELU()) for _ in range(4))
        )
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.layers(x), y)


@pytest.mark.parametrize("loss", ["mse", "smooth l1", "soft margin", "bce"])
def test_the_peak_of_a_step_is_what_the_plan_says_and_within_the_budget(loss):
    x, y = torch.randn(2, 128, 48)
    model = Denoiser(LOSSES[loss])
    budget = int(0.85 * tr.estimate(model, x, y).peak_bytes)
    plan = tr.plan(model, x, y, budget=budget)
    tr.nn.wrap(model, tr.checkpoint_policies.from_plan(plan))
    model(x, y).backward()
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        model(x, y).backward()
    assert live.peak == plan.peak_bytes <= budget


def test_an_operator_that_gives_fewer_results_of_less():
    """One of one element has no second row."""

    def scaled_rows(x):
        return sum(row.sin() for row in torch.unbind_copy(x))

    x = torch.arange(3.0, requires_grad=True)
    scaled_rows(x).backward()
    expected, x.grad = x.grad, None
    tr.checkpoint(scaled_rows, policy="budget:1MiB")(x).backward()
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)
