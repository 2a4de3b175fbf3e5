"""Each test begins without traces of other tests, whose models may still be alive."""

import pytest

from torchremat.remat import module_forward
from torchremat.remat.sharing.adoption import KnownTraces


@pytest.fixture(autouse=True)
def without_known_traces(monkeypatch):
    monkeypatch.setattr(module_forward, "_known_traces", KnownTraces())
