"""In this folder what cannot be one graph runs on a tape."""

import pytest

import torchremat as tr


@pytest.fixture(autouse=True)
def untraceable_runs_on_a_tape(monkeypatch):
    monkeypatch.setattr(tr.config, "untraceable", "tape")
