"""Values that compare as equal and are of another kind, and values beside tensors in a list."""

import copy

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same

# `before == after` for each
EQUAL = [
    (2, 2.0),
    (0.0, -0.0),
    (1, True),
    ((1, 2), (1.0, 2)),
    ([1], [True]),
    ({"a": 0}, {"a": False}),
]


class Filling(nn.Module):
    def __init__(self, option):
        super().__init__()
        self.option = option

    def forward(self, x):
        leaf = self.option
        if not isinstance(leaf, (int, float)):
            (leaf, *_) = leaf.values() if isinstance(leaf, dict) else leaf
        filled = torch.full((4,), leaf)
        is_odd = isinstance(leaf, bool) + filled.is_floating_point()
        return x * (1.0 + is_odd) + (1 / filled).clamp(-3, 3)


@pytest.mark.parametrize(("before", "after"), EQUAL, ids=repr)
def test_values_that_are_equal_and_of_another_kind(before, after):
    plain, x = Filling(before), torch.randn(3, 4)
    layer = tr.nn.wrap(copy.deepcopy(plain), "dots")
    outputs = []
    for value in (before, after, before):
        layer.option = plain.option = copy.deepcopy(value)
        assert_same(layer(x), plain(x))
        outputs.append(plain(x))
    assert not torch.equal(outputs[0], outputs[1])
    assert layer.forward.traces.num_made == 2


class Things(nn.Module):
    def __init__(self):
        super().__init__()
        self.things = [torch.ones(4), 1, {"power": 1}, lambda y: y + self.shift]
        self.shift = 0.5

    def forward(self, x):
        tensor, number, options, function = self.things
        return function(x * tensor * number ** options["power"])


@pytest.mark.parametrize(
    "change",
    [
        lambda things: things.__setitem__(0, torch.full((4,), 3.0)),
        lambda things: things.__setitem__(1, 3),
        lambda things: things[2].update(power=0.5),
        lambda things: things.__setitem__(3, torch.sin),
    ],
)
def test_what_stands_beside_a_tensor_in_a_list(change):
    plain, x = Things(), torch.randn(3, 4)
    layer = tr.nn.wrap(Things(), "dots")
    for model in (plain, layer):
        model.things[1] = 2
    assert_same(layer(x), plain(x))
    for model in (plain, layer):
        change(model.things)
    for _ in range(2):
        assert_same(layer(x), plain(x))
    assert layer.forward.traces.num_made <= 2
