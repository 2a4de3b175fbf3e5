"""Shared by the tests of the command: a model in a file, and the command run on it."""

import pytest
from click.testing import CliRunner, Result

from torchremat.cli.app import main

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def make():
    return Net(), (torch.randn(256, 16),)

def make_wrapped():
    import torchremat
    return torchremat.nn.wrap(Net(), "full", select="layers.*"), (torch.randn(256, 16),)

def make_other_each_time():
    calls = []
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            calls.append(1)
            return x + len(calls)
        @staticmethod
        def backward(ctx, g):
            return g
    return lambda x: Counting.apply(x).sum(), (torch.ones(1),)

def make_with_branch():
    def branching(x):
        if x.sum() > 0:
            return x.sin()
        return x.cos()
    return branching, (torch.ones(3),)

def make_with_error():
    def failing(x):
        raise KeyError("hidden_size")
    return failing, (torch.ones(3),)
"""


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """The current folder is an empty one with `model.py`."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str) -> Result:
    """The command in this process: `.exit_code`, `.stdout`, `.stderr`."""
    return CliRunner().invoke(main, list(args), prog_name="torchremat")


def output_of(*args: str) -> str:
    """What the command prints; it must succeed."""
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.stdout
