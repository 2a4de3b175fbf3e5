"""`config.verify_recomputation` finds a planted difference, names it, and is off by default."""

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat.errors import RecomputationError

_library = torch.library.Library("torchremat_tests", "FRAGMENT")
_library.define("drifting(Tensor x) -> Tensor")
_calls = [0]


def _drifting(x):
    _calls[0] += 1
    return x * (1 + _calls[0] * 2**-10)


_library.impl("drifting", _drifting, "CPU")
_library.impl("drifting", torch.empty_like, "Meta")


class _Drifting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.ops.torchremat_tests.drifting(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Block(nn.Module):
    def forward(self, x):
        return _Drifting.apply(x.sin()).cos()


@pytest.fixture
def bitwise(monkeypatch):
    monkeypatch.setattr(tr.config, "verify_recomputation", "bitwise")


def test_a_planted_difference_is_named(bitwise):
    model = nn.Sequential(_Block())
    x = torch.randn(4, requires_grad=True)
    y = tr.checkpoint(model)(x).sum()
    with pytest.raises(
        RecomputationError, match=r"drifting.*in module '0' from test_verify.py:\d+ \(forward\)"
    ):
        y.backward()


def test_a_saved_value_is_not_replayed(bitwise):
    x = torch.randn(4, requires_grad=True)
    f = tr.checkpoint(
        _Block(), policy=tr.checkpoint_policies.save_ops("torchremat_tests::drifting")
    )
    f(x).sum().backward()


@pytest.mark.parametrize("policy", ["full", "dots", "none"])
def test_nothing_is_found_where_nothing_is_wrong(bitwise, policy):
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(3, 4, requires_grad=True)
    x.data[0, 0] = float("nan")
    tr.checkpoint(model, policy=policy)(x).sum().backward()


def test_off_nothing_more_is_kept():
    x = torch.randn(4, requires_grad=True)
    f = tr.checkpoint(_Block())
    f(x).sum().backward()
    (trace,) = f._trace_cache.traces
    assert [type(program).__name__ for program in trace.programs.values()] == ["FunctionProgram"]


def test_an_unknown_setting(monkeypatch):
    monkeypatch.setattr(tr.config, "verify_recomputation", "bits")
    with pytest.raises(ValueError, match="None or 'bitwise', but it is 'bits'"):
        tr.checkpoint(torch.sin)(torch.ones(2))
