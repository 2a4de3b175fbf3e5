"""A pool of the host's memory with nothing in it."""

import gc

import pytest

import torchremat as tr
from torchremat.measure import host_stats, reset_host_counts


@pytest.fixture
def no_tapes(monkeypatch):
    """What cannot be one graph is refused, in modules too."""
    monkeypatch.setattr(tr.config, "untraceable", "error")


@pytest.fixture
def empty_pool(frozen):
    """Nobody else's values are in the pool."""
    gc.collect()
    reset_host_counts()
    assert host_stats().nbytes == 0
