"""What every test shares: reproducible random programs and numbers, one thread."""

import gc
import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings

# A trace takes tens of milliseconds, so a deadline an example would measure the machine.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("local", **_COMMON)
settings.register_profile("ci", derandomize=True, **_COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "local")

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before marks choose what runs
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is `sampled(step)`, every `step`th case alone runs without test_slow.sh."""
    counts: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and item.get_closest_marker("slow") is None:
            name = item.nodeid.partition("[")[0]
            if counts[name] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            counts[name] += 1


def pytest_collection_finish() -> None:
    """What is imported by now stays: no run of the collector need go through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def left_by_others() -> None:
    """What the tests of other files left is left out too: a run took seconds by the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Random numbers are the same in each test, whatever ran before it."""
    torch.manual_seed(0)
    return 0


@pytest.fixture(scope="module")
def frozen():
    """What other tests left, a second's work for the collector, is left out of its runs."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_collector(frozen):
    """Nothing may wait for the cyclic collector: what it would free counts as alive."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
