"""Lets libraries be imported before any of their models is asked for."""

from tests.zoo.torchvision_operators import declare_torchvision_operators

declare_torchvision_operators()
