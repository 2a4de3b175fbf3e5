"""The callback for `lightning` and `pytorch_lightning`: fits are as without."""

import copy
import doctest
import importlib

import pytest
import torch
from torch import nn

from torchremat.errors import OptionError, UnmatchedWarning
from torchremat.integrations.training_only import find_training_forward

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# both warn of few workers, no logger and what of PyTorch they use
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=PACKAGES)
def library(request):
    return pytest.importorskip(request.param, reason=f"{request.param} is not installed")


@pytest.fixture
def integration(library):
    from torchremat.integrations import lightning

    return importlib.reload(lightning)


def make_module(library, **parts):
    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
            self.model = nn.Sequential(*layers)
            self.losses = []
            for name, part in parts.items():
                setattr(self, name, part)

        def training_step(self, batch, index):
            if index == self.__dict__.get("fails_at"):
                raise ValueError("the data ends here")
            loss = self.model(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    return Module()


def fit(library, module, *callbacks):
    trainer = library.Trainer(
        max_steps=4,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(data, 256))
    return trainer


def is_wrapped(module):
    return any(find_training_forward(m) is not None for m in module.modules())


@pytest.mark.parametrize(
    "options", [{"budget": "80%"}, {"policy": "full"}, {"policy": "full", "select": "model.*"}]
)
def test_a_fit_is_as_without(library, integration, options):
    plain = make_module(library)
    module = copy.deepcopy(plain)
    fit(library, plain)
    callback = integration.RematCallback(**options)
    trainer = fit(library, module, callback)
    assert module.losses == plain.losses
    assert callback.peak_bytes > 0
    assert callback.report.by_decision()["recomputed"] > 0
    assert trainer.callback_metrics["remat_peak_bytes"] == callback.peak_bytes
    assert not is_wrapped(module)


def test_a_fit_that_fails_leaves_the_module_as_it_was(library, integration):
    module = make_module(library, fails_at=2)
    with pytest.raises(ValueError, match="the data ends here"):
        fit(library, module, integration.RematCallback("full"))
    assert not is_wrapped(module)


def test_which_module_is_the_model_must_be_clear(library, integration):
    module = make_module(library, head=nn.Linear(2, 2))
    with pytest.raises(OptionError, match="in it are model, head: name what to checkpoint"):
        fit(library, module, integration.RematCallback("full"))
    fit(library, module, integration.RematCallback("full", select="model"))


@pytest.mark.filterwarnings("always::torchremat.UnmatchedWarning")
def test_what_has_no_effect_is_said(library, integration):
    module = make_module(library, head=nn.Linear(2, 2))
    with pytest.warns(UnmatchedWarning, match="had no effect in the first step"):
        fit(library, module, integration.RematCallback("full", select="head"))


def test_the_examples_in_the_docstrings(integration):
    assert doctest.testmod(integration).failed == 0


def test_without_the_library_it_is_named(monkeypatch):
    for name in (*PACKAGES, "lightning", "torchremat.integrations.lightning"):
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)
    for name in (*PACKAGES, "lightning"):
        monkeypatch.setitem(importlib.sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install lightning"):
        importlib.import_module("torchremat.integrations.lightning")
