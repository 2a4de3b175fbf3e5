"""A pool of the host's memory with nothing in it."""

import gc

import pytest

from torchremat.measure import host_stats, reset_host_counts


@pytest.fixture
def empty_pool(frozen):
    """Nobody else's values are in the pool."""
    gc.collect()
    reset_host_counts()
    assert host_stats().nbytes == 0
