"""Reports of modules that ran on a tape."""

import json

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat.measure import LiveBytes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        y = tr.checkpoint_name(self.fc(x).sin(), "hidden")
        return self.out(y) if y.sum() > -100 else y


def make():
    return nn.ModuleDict({"a": Block(), "b": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})


def test_rows_say_which_way():
    model = tr.nn.wrap(make(), "names:hidden", select=Block)
    tr.nn.wrap(model.b)
    x = torch.ones(2, 4, requires_grad=True)
    with LiveBytes() as live:
        y = model.a(x)
    model.b(x)
    report = tr.nn.report(model)
    assert {row.way for row in report} == {"graph", "tape"}
    taped = [row for row in report if row.way == "tape"]
    hidden = next(row for row in taped if row.name == "hidden")
    assert (hidden.decision, hidden.op, hidden.nbytes) == ("saved", "sin", 32)
    assert hidden.source.function == "forward"
    assert "hidden" in hidden.reason
    assert {row.name for row in taped if row.decision == "parameter"} <= {
        "a.fc.weight", "a.fc.bias", "a.out.weight",
    }  # fmt: skip
    (again,) = [row for row in taped if row.decision == "recomputed"]
    assert (again.name, again.module, again.shape) == ("a.fc.addmm", "a.fc", (2, 4))
    assert sum(row.nbytes for row in taped if row.decision == "saved") == live.live - 32
    assert "on a tape" in str(report)
    assert json.loads(report.to_json())["rows"][-1]["way"] in ("graph", "tape")
    y.sum().backward()


def test_the_last_call_counts():
    model = tr.nn.wrap(Block())
    x = torch.ones(2, 4, requires_grad=True)
    model(x)
    assert all(row.way == "tape" for row in tr.nn.report(model))
    with torch.no_grad():
        model(x)
    assert all(row.way == "tape" for row in tr.nn.report(model))


def test_a_name_that_is_not_there_warns():
    model = tr.nn.wrap(Block(), "names:hiden")
    with pytest.warns(tr.errors.UnmatchedWarning, match="nearest: 'hidden'"):
        model(torch.ones(2, 4))
