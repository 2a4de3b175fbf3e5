"""Solutions that another process found are what they were, and of the same problem."""

import pytest
import torch

from torchremat.core.upper_rooms import load_rooms
from torchremat.planning import plan
from torchremat.planning.search import shared_solve


def chain(x, w):
    for _ in range(4):
        x = torch.tanh(x @ w)
    return x.square().mean()


@pytest.fixture
def others(monkeypatch):
    """Another process that has made what it is asked for, by what it was asked."""
    made = {}

    def told(describe, make):
        return made.get(describe()) or made.setdefault(describe(), make())

    load_rooms("shared plans")  # or the first plan would put the real function there
    monkeypatch.setattr(shared_solve._Others, "share", staticmethod(told))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    return made


def test_what_another_found_is_the_plan(others, monkeypatch):
    x, w = torch.randn(80, 16), torch.randn(16, 16, requires_grad=True)
    own = plan(chain, x, w, budget="70%")
    assert len(others) == 1
    monkeypatch.setattr("torchremat.planning.planner.solve_orders", None)  # nobody searches again
    monkeypatch.setattr("torchremat.planning.planner._solve", None)
    taken = plan(chain, x, w, budget="70%")
    assert taken.to_json() == own.to_json()


@pytest.mark.parametrize(
    "other", [{"budget": "80%"}, {"solver": "local"}, {"x": torch.randn(81, 16)}]
)
def test_another_question_has_another_answer(others, other):
    x, w = torch.randn(80, 16), torch.randn(16, 16, requires_grad=True)
    plan(chain, x, w, budget="70%")
    asked = {"budget": "70%"} | other
    plan(chain, asked.pop("x", x), w, **asked)
    assert len(others) == 2
