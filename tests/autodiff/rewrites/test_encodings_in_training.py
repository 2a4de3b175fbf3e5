"""Encodings in training: sizes that change, writes in place, dropout, batch norm and autocast."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchremat as tr
from torchremat.autodiff.rewrites import encodings
from torchremat.autodiff.rewrites.encoding_ops import is_encoding
from torchremat.planning.step.traced_step import region_of


class Block(nn.Module):
    """A residual block whose activations mostly poolings and ReLU read in the backward pass."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.convolution(x)), inplace=self.writes)
        y = F.max_pool2d(y, 3, 1, 1)
        y = y.mul_(1.5) if self.writes else torch.where(y > 0.3, y, -y)
        return F.avg_pool2d(F.relu_(self.dropout(y)), 3, 1, 1) + x


class Network(nn.Module):
    """A few blocks, and a head that pools to one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Block(writes=i % 2 == 0) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(F.relu(x), 1).flatten(1))


def train(model: nn.Module, *, autocast: bool) -> list[Tensor]:
    """The losses of some steps, and all parameters and buffers after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    losses = []
    for batch, size in [(4, 16), (4, 16), (3, 16), (4, 20), (1, 16), (4, 16)]:
        x, target = torch.randn(batch, 3, size, size), torch.randint(0, 5, (batch,))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters()), *model.buffers()]


@pytest.fixture(autouse=True)
def small_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "LEAST_NBYTES", 64)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "how", ["everything_saveable", "full", "budget:60%", "layers: everything_saveable"]
)
@pytest.mark.sampled(3)
def test_training_has_the_bits_of_pytorch(how: str, autocast: bool) -> None:
    torch.manual_seed(0)
    plain = Network()
    model = copy.deepcopy(plain)
    policy = how.removeprefix("layers: ")
    if policy != how:
        model.blocks = nn.ModuleList(tr.nn.wrap(block, policy) for block in model.blocks)
        wrapped: nn.Module = model
    else:
        wrapped = tr.nn.wrap(model, policy)
    traced = region_of(plain, (torch.randn(4, 3, 16, 16),), {}).joint
    assert sum(map(is_encoding, traced.module.graph.nodes)) > 10
    found = train(wrapped, autocast=autocast)
    for a, b in zip(found, train(plain, autocast=autocast), strict=True):
        assert torch.equal(a, b)
