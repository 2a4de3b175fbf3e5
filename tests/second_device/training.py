"""Training steps on the second device, and what they leave to compare."""

import torch
from torch import nn

from tests.helpers import assert_same

DEVICE = "late"


def build_encoder(device=DEVICE, *, layers=3, width=32, dropout=0.1):
    """Attention, products, layer norms and dropout."""
    torch.manual_seed(1)
    return nn.Sequential(
        *[
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, "gelu", batch_first=True)
            for _ in range(layers)
        ]
    ).to(device)


def build_convolutions(device=DEVICE):
    """Convolutions, batch norms, whose buffers are written to, and max-pooling."""
    torch.manual_seed(1)

    def block(n, m):
        return nn.Sequential(
            nn.Conv2d(n, m, 3, padding=1), nn.BatchNorm2d(m), nn.ReLU(), nn.MaxPool2d(2)
        )

    head = [nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 8)]
    return nn.Sequential(block(3, 8), block(8, 16), *head).to(device)


MODELS = {
    "encoder": (build_encoder, (4, 16, 32)),
    "convolutions": (build_convolutions, (4, 3, 8, 8)),
}


def make_input(shape, device=DEVICE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device)


def train(model, *args, steps=3, autocast=None):
    """Losses, parameters, buffers and the states of the generators, after some steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
            loss = model(*args).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    states = [torch.late.get_rng_state(i) for i in range(torch.late.device_count())]
    return [losses, [t.detach().cpu() for t in model.state_dict().values()], states]


def assert_trained_alike(build, wrapped, *args, **options):
    """Train a model that `build` made, as it is and as `wrapped` gives it."""
    assert_same(train(wrapped(build()), *args, **options), train(build(), *args, **options))
