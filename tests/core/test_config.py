"""Settings: only those that exist can be assigned."""

import pytest

from torchremat import config
from torchremat.errors import OptionError


def test_a_misspelt_setting_is_refused_with_the_nearest_name():
    with pytest.raises(OptionError, match="no setting 'verify_recomputatoin'; nearest: 'verify_re"):
        config.verify_recomputatoin = "bitwise"
    assert not hasattr(config, "verify_recomputatoin")


def test_every_setting_can_be_assigned(monkeypatch):
    for name in config.__all__:
        monkeypatch.setattr(config, name, getattr(config, name))
