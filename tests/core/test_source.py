"""The name of a function, for people."""

import functools

from torch import nn

import torchremat as tr
from torchremat.core.source import name_of


def three_layers(x):
    return x.sin().sin().sin()


class Net(nn.Module):
    pass


def test_name_of():
    assert name_of(functools.partial(tr.checkpoint(three_layers))) == "three_layers"
    assert name_of(Net()) == "Net"
