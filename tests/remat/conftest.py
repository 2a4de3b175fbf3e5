"""A pool of the host's memory with nothing in it."""

import gc

import pytest

from torchremat import config
from torchremat.measure import host_stats, reset_host_counts


@pytest.fixture
def small_values(frozen, monkeypatch):
    """Values of any size are offloaded, and nobody else's are in the pool."""
    monkeypatch.setattr(config, "least_offload_nbytes", 0)
    gc.collect()
    reset_host_counts()
    assert host_stats().nbytes == 0
