"""Lightning's Trainer, with the callback of torchremat."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.clients.harness import MARKS, check_client

pytestmark = MARKS
STEPS = 10


class Block(nn.Module):
    """With PyTorch's own checkpointing where `own` is set."""

    own = False

    def __init__(self, width=64, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def add(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))

    def forward(self, x):
        return checkpoint(self.add, x, use_reentrant=False) if self.own else self.add(x)


def make_batches(sizes):
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(size, 24, 16, generator=generator),
            torch.randint(0, 4, (size,), generator=generator),
        )
        for size in sizes
    ]
    return torch.utils.data.DataLoader(batches, batch_size=None)


def make_module(recorder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            blocks = [Block() for _ in range(4)]
            self.model = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 4))

        def loss_of(self, batch):
            x, target = batch
            return F.cross_entropy(self.model(x).mean(1), target)

        def training_step(self, batch, index):
            loss = self.loss_of(batch)
            recorder.losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            recorder.losses.append(self.loss_of(batch).item())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    return Module()


def make_recording(recorder):
    import lightning

    class Recording(lightning.Callback):
        def on_train_batch_start(self, *args):
            recorder.step_begins()

        def on_before_optimizer_step(self, *args):
            recorder.passes_end()

        def on_train_batch_end(self, *args):
            recorder.step_ends()

    return Recording()


def make_policy(way):
    from torchremat.integrations.lightning import RematCallback

    if way.startswith("budget"):
        return [RematCallback(budget=way.removeprefix("budget:"))]
    return [RematCallback(way, select=Block)] if way not in ("plain", "own") else []


VARIANTS = {
    "fixed size": {},
    "bf16": {"precision": "bf16-mixed"},
    "clipped gradients": {"gradient_clip_val": 0.1},
    "validation": {"val_check_interval": 2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_lightning(name, monkeypatch):
    import lightning

    options = dict(VARIANTS[name])
    batches = make_batches([8] * 5)

    def train(way, recorder):
        monkeypatch.setattr(Block, "own", way == "own")
        module = make_module(recorder)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=[*make_policy(way), make_recording(recorder)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            **options,
        )
        validation = make_batches([8]) if "val_check_interval" in options else None
        trainer.fit(module, batches, validation)
        return {**module.state_dict(), "random stream": torch.get_rng_state()}

    check_client(f"Lightning, {name}", train, steps=STEPS, warm=5)
