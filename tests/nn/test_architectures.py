"""Models that nobody here wrote train as without the wrapper: `tests/architectures.py` lists them.

Two steps of each, with dropout: outputs, gradients, buffers and the state of the random generator
are equal to the bit.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.architectures import ARCHITECTURES, IS_5, Architecture, Batch
from tests.helpers import assert_same, leaves_of
from torchremat import config
from torchremat.errors import ConcretizationError
from torchremat.measure import LiveBytes
from torchremat.nn import report, unwrap, wrap
from torchremat.remat.module_forward import remat_forward_of

pytest.importorskip("transformers")


def names(which: Callable[[Architecture], Any], wrapped: str) -> list[Any]:
    """The names of architectures as parameters of a test; those marked that are slow or fail."""
    return [
        pytest.param(name, marks=marks(a, wrapped)) for name, a in ARCHITECTURES.items() if which(a)
    ]


def marks(a: Architecture, wrapped: str) -> list[pytest.MarkDecorator]:
    """The marks of a test in which `layers` or the `whole` are wrapped."""
    return [pytest.mark.slow] if wrapped in a.slow else []


def step(model: nn.Module, batch: Batch, seed: int, **extra: Any) -> dict[str, Any]:
    """A forward pass and a backward, and all that they leave."""
    model.zero_grad()
    torch.manual_seed(seed)
    np.random.seed(seed)
    output = model(**batch, **extra)
    output.loss.backward()
    return {
        "outputs": [t.detach() for t in leaves_of(output.to_tuple())],
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "random state": torch.get_rng_state(),
    }


def assert_trains_as_plain(model: nn.Module, plain: nn.Module, a: Architecture) -> None:
    """Fail unless two steps of both leave the same."""
    models = (plain, model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for seed in (1, 2):
        batch = a.batch()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        expected, found = (step(m, batch, seed, **a.extra) for m in models)
        assert bool((before != expected["random state"]).any()) == a.draws
        assert_same(found, expected, "bits")
        for optimizer in optimizers:
            optimizer.step()


def check_trains_as_plain(a: Architecture, select: str | None, policy: str | None = None) -> None:
    """Fail unless a model with these parts wrapped trains as it does without."""
    plain = a.build()
    model = wrap(copy.deepcopy(plain), policy, select=select)
    num_wrapped = sum(remat_forward_of(m) is not None for m in model.modules())
    assert num_wrapped == (1 if select is None else a.num_wrapped)
    assert_trains_as_plain(model, plain, a)
    assert policy or any(row.decision == "recomputed" for row in report(model))


@pytest.mark.parametrize("name", names(lambda a: not a.layers_refused, "layers"))
@pytest.mark.sampled(3)
def test_wrapped_per_layer_it_trains_as_plain(name):
    check_trains_as_plain(ARCHITECTURES[name], ARCHITECTURES[name].layers)


@pytest.mark.parametrize("name", names(lambda a: not a.whole_refused, "whole"))
@pytest.mark.sampled(3)
def test_wrapped_whole_it_trains_as_plain(name):
    check_trains_as_plain(ARCHITECTURES[name], None)


@pytest.mark.parametrize("name", names(lambda a: a.parts, "layers"))
def test_with_those_parts_wrapped_that_can_be_it_trains_as_plain(name):
    check_trains_as_plain(ARCHITECTURES[name], ARCHITECTURES[name].parts)


@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet, batch norm", "mamba"])
@pytest.mark.sampled(2)
def test_with_its_dots_saved_it_trains_as_plain(name):
    check_trains_as_plain(ARCHITECTURES[name], ARCHITECTURES[name].layers, "dots")


@pytest.mark.parametrize("name", names(lambda a: a.layers_refused, "layers"))
def test_layers_that_depend_on_values_are_refused(name, monkeypatch):
    monkeypatch.setattr(config, "untraceable", "error")
    a = ARCHITECTURES[name]
    check_refused(a, a.layers, a.layers_refused)


@pytest.mark.parametrize("name", names(lambda a: a.layers_refused, "layers"))
def test_on_a_tape_layers_that_depend_on_values_train_as_plain(name):
    check_trains_on_a_tape(ARCHITECTURES[name], ARCHITECTURES[name].layers)


@pytest.mark.parametrize("name", names(lambda a: a.whole_refused, "whole"))
@pytest.mark.sampled(2)
def test_on_a_tape_models_that_depend_on_values_train_as_plain(name):
    check_trains_on_a_tape(ARCHITECTURES[name], None)


@pytest.mark.parametrize("name", names(lambda a: a.whole_refused, "whole"))
@pytest.mark.sampled(2)
def test_models_that_depend_on_values_are_refused_as_a_whole(name, monkeypatch):
    monkeypatch.setattr(config, "untraceable", "error")
    a = ARCHITECTURES[name]
    check_refused(a, None, a.whole_refused)


def check_trains_on_a_tape(a: Architecture, select: str | None) -> None:
    plain = a.build()
    model = wrap(copy.deepcopy(plain), select=select)
    assert_trains_as_plain(model, plain, a)
    assert any(row.way == "tape" and row.decision == "recomputed" for row in report(model))


def check_refused(a: Architecture, select: str | None, message: str) -> None:
    """Fail unless a step raises an error that names the line, and leaves the model as it was."""
    plain = a.build()
    model = wrap(copy.deepcopy(plain), select=select)
    with pytest.raises(ConcretizationError, match=message):
        model(**a.batch(), **a.extra)
    assert_trains_as_plain(unwrap(model), plain, a)


def test_a_module_that_a_forward_converts_keeps_its_parameters():
    class Converting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            self.linear.to(torch.float32)  # which it is
            return self.linear(x)

    plain = Converting()
    model = wrap(copy.deepcopy(plain))
    for m in (plain, model):
        m(torch.ones(2, 3)).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("per_layer", [False, True])
def test_attentions_that_a_layer_gives_out_beside_its_output_are_given_out(per_layer):
    """The library collects them by hooks, or by patching `forward` for the time of a call."""
    a = ARCHITECTURES["llama"]
    plain = a.build()
    model = wrap(copy.deepcopy(plain), select=a.layers if per_layer else None)
    batch = a.batch()
    for seed in (1, 2):
        found, expected = (step(m, batch, seed, output_attentions=True) for m in (model, plain))
        assert_same(found, expected)


@pytest.mark.skipif(not IS_5, reason="that release looks for fake tensors in another way")
def test_a_mask_that_hides_nothing_costs_nothing():
    """The library leaves it out where it may read it, and attention is another kernel then."""
    a = ARCHITECTURES["llama"]
    plain = a.build()
    model = wrap(copy.deepcopy(plain))
    for seed, length in enumerate((8, 6, 7, 5)):
        tokens = torch.randint(3, 60, (2, length))
        batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
        found, expected = (step(m, batch, seed, use_cache=False) for m in (model, plain))
        assert_same(found, expected, "bits")
    assert report(model).traces == 2
    peaks = []
    for m in (model, plain):
        with LiveBytes() as live:
            step(m, batch, 0, use_cache=False)
        peaks.append(live.peak)
    assert peaks[0] <= peaks[1]


@pytest.mark.skipif(not IS_5, reason="a loop over the experts hit cannot be traced")
def test_what_routers_say_is_given_out_by_a_model_wrapped_whole():
    """The library records it by hooks, and adds a loss that is made of it."""
    a = ARCHITECTURES["mixtral, experts in one product"]
    plain = a.build(output_router_logits=True)
    model = wrap(copy.deepcopy(plain))
    assert_trains_as_plain(model, plain, a)
    assert model(**a.batch()).aux_loss > 0


def test_a_forward_that_is_patched_for_the_time_of_a_call_is_traced_anew():
    model, x = wrap(nn.Sequential(nn.Linear(2, 2))), torch.ones(1, 2)
    linear = model[0]
    plain = linear(x)
    for factor in range(1, 6):
        linear.forward = lambda x, n=factor: n * nn.Linear.forward(linear, x)
        assert_same(model(x), factor * plain)
        del linear.forward
