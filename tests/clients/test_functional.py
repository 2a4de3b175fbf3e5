"""`torch.func` over wrapped modules, and optimizers that call the model again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import torchremat as tr
from tests.clients.harness import MARKS, WAYS, check_client, run_steps

pytestmark = MARKS
WIDTH, HEADS, LENGTH = 32, 4, 32
# PyTorch's checkpoint is refused under torch.func
WITHOUT_OWN = tuple(way for way in WAYS if way != "own")
# a budget is planned for one member or example, of which the gradients are most
FUNCTIONAL_WAYS = (*WITHOUT_OWN[:-1], "budget:90%")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Viewing(nn.Module):
    """As nanoGPT writes it: `.contiguous().view(...)` after the heads."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.mix(self.norm(x)).split(width, dim=2)
        q, k, v = (p.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Checkpointed(nn.Module):
    """PyTorch's own checkpoint around a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def make_model(kind, way, seed=0):
    torch.manual_seed(seed)
    layers = [layer for _ in range(3) for layer in (kind(), Mixing())]
    if way == "own":
        return nn.Sequential(*map(Checkpointed, layers))
    model = nn.Sequential(*layers)
    if way.startswith("budget"):
        return tr.nn.wrap(model, way)
    return model if way == "plain" else tr.nn.wrap(model, way, select="*")


def values_of(model):
    """By number: a layer that holds the checkpointed one has other names."""
    return {str(i): p for i, p in enumerate(model.parameters())}


def make_input(step, count=4):
    return torch.randn(count, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step % 2))


def train_functional(gradients_of, parameters, recorder, steps=6):
    for step in range(steps):
        recorder.step_begins()
        gradients, losses = gradients_of(parameters, step)
        recorder.passes_end()
        recorder.losses += losses.tolist()
        parameters = {n: p - 0.01 * gradients[n] for n, p in parameters.items()}
        recorder.step_ends()
    return parameters


@pytest.mark.parametrize("kind", [Attention, Viewing])
def test_ensemble(kind):
    def train(way, recorder):
        models = [make_model(kind, way, seed) for seed in range(3)]
        parameters, buffers = stack_module_state(models)
        parameters = {n: p.detach() for n, p in parameters.items()}

        def gradients_of(parameters, step):
            x = make_input(step)

            def loss_of(p, b):
                loss = functional_call(models[0], (p, b), (x,)).square().mean()
                return loss, loss

            return vmap(grad(loss_of, has_aux=True))(parameters, buffers)

        return train_functional(gradients_of, parameters, recorder)

    name = "nn.MultiheadAttention" if kind is Attention else ".contiguous().view"
    check_client(f"torch.func ensemble, {name}", train, steps=6, ways=FUNCTIONAL_WAYS)


@pytest.mark.parametrize("kind", [Attention, Viewing])
def test_gradients_of_each_example(kind):
    def train(way, recorder):
        model = make_model(kind, way)
        parameters = {n: p.detach() for n, p in model.named_parameters()}

        def loss_of(p, example):
            loss = functional_call(model, p, (example[None],)).square().mean()
            return loss, loss

        def gradients_of(parameters, step):
            each, losses = vmap(grad(loss_of, has_aux=True), (None, 0))(
                parameters, make_input(step)
            )
            return {n: g.mean(0) for n, g in each.items()}, losses

        return train_functional(gradients_of, parameters, recorder)

    name = "nn.MultiheadAttention" if kind is Attention else ".contiguous().view"
    check_client(f"torch.func per-sample, {name}", train, steps=6, ways=FUNCTIONAL_WAYS)


def test_lbfgs():
    """Its closure runs the model up to 20 times a step."""

    def train(way, recorder):
        model = make_model(Viewing, way)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, line_search_fn="strong_wolfe")
        for step in range(4):

            def closure():
                optimizer.zero_grad()
                loss = model(make_input(step, 8)).square().mean()
                loss.backward()
                recorder.passes_end()
                recorder.losses.append(loss.item())
                return loss.detach()

            recorder.step_begins()
            optimizer.step(closure)
            recorder.step_ends()
        return values_of(model)

    check_client("LBFGS", train, steps=4, warm=2)


def test_loop():
    """A loop of PyTorch: what the others are measured against."""

    def train(way, recorder):
        model = make_model(Viewing, way)
        run_steps(
            list(model.parameters()),
            lambda step: model(make_input(step, 8)).square().mean(),
            recorder,
        )
        return values_of(model)

    check_client("loop of PyTorch", train)
