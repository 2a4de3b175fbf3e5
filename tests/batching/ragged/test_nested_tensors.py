"""A ragged `vmap` inside another is a loop in a loop."""

import pytest
import torch

import torchremat as tr
from torchremat.batching import Pile, pile_axis

NUMBERS = Pile.from_list([torch.tensor(x) for x in ([2, 0, 3], [1], [4, 2])])
FUNCTIONS = {
    "sum": lambda m: torch.arange(m).sum(),
    "softmax": lambda m: (torch.arange(m).double().softmax(0) * torch.arange(m)).sum(),
    "cumsum": lambda m: torch.arange(m).cumsum(0).sum(),
    "square": lambda m: (torch.ones(m, m) * m).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes_in_the_values_of_a_pile(name):
    f = FUNCTIONS[name]
    outer = tr.vmap(lambda ns: tr.vmap(f)(ns), in_axes=pile_axis, out_axes=pile_axis)
    for ours, numbers in zip(outer(NUMBERS), NUMBERS, strict=True):
        torch.testing.assert_close(ours, torch.stack([f(int(n)) for n in numbers]))


def test_sizes_in_the_values_of_sizes():
    outer = tr.vmap(lambda n: tr.vmap(FUNCTIONS["sum"])(torch.arange(n)), out_axes=pile_axis)
    assert [x.tolist() for x in outer(torch.tensor([3, 1, 0, 4]))] == [
        [0, 0, 1],
        [0],
        [],
        [0, 0, 1, 3],
    ]
