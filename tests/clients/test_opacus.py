"""Opacus: gradients of each example by its hooks, and an optimizer that adds noise to them.

Its hooks keep what each layer reads until the backward pass is through that. So a wrapped layer has
little left to save less of, and recomputes beside what is kept.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchremat as tr
from tests.clients.harness import MARKS, check_client, run_steps

pytestmark = MARKS
WIDTH, LENGTH, VOCABULARY = 32, 32, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_private(model):
    """The model and the optimizer that Opacus makes; batches come from the test."""
    from opacus import PrivacyEngine

    rows = torch.utils.data.TensorDataset(torch.zeros(32, LENGTH, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(rows, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(5),
    )
    return private, optimizer


@pytest.mark.parametrize("is_whole", [False, True])
def test_private_training(is_whole):
    def train(way, recorder):
        torch.manual_seed(0)
        model = Model()
        if way != "plain":
            tr.nn.wrap(model, way, select=None if is_whole else "layers.*")
        private, optimizer = make_private(model)

        def loss_of(step):
            generator = torch.Generator().manual_seed(step % 2)
            tokens = torch.randint(VOCABULARY, (8, LENGTH), generator=generator)
            return F.cross_entropy(private(tokens).flatten(0, 1), tokens.flatten())

        run_steps(list(model.parameters()), loss_of, recorder, optimizer=optimizer)
        return dict(model.named_parameters())

    name = "whole model" if is_whole else "each layer"
    most = 1.4 if is_whole else 1.02  # what it keeps is recomputed besides
    check_client(f"Opacus, {name}", train, ways=("plain", "full", "dots"), most=most)
