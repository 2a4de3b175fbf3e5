"""What differs for an empty element cannot be asked in Python: one graph serves all elements."""

import pytest
import torch

import torchremat as tr
from torchremat.batching import Pile, pile_axis
from torchremat.errors import RaggedError

ASKING = {
    "above none": lambda x: x.sum() if x.shape[0] > 0 else x.sum() + 1,
    "none": lambda x: x.sum() if x.shape[0] == 0 else x.sum() + 1,
    "not none": lambda x: x.sum() if x.shape[0] != 0 else x.sum() + 1,
    "at least one": lambda x: x.sum() if x.shape[0] >= 1 else x.sum() + 1,
    "truth": lambda x: x.sum() if x.numel() else x.sum() + 1,
    "length": lambda x: x.sum() if len(x) else x.sum() + 1,
    "another": lambda x: x.sum() if x.shape[0] > 2 else x.sum() + 1,
}


@pytest.mark.parametrize("name", ASKING)
def test_asking_is_refused_with_the_line(name):
    pile = Pile.from_list([torch.ones(n) for n in (2, 0, 3)])
    with pytest.raises(RaggedError, match=r"test_empty_elements.py:\d+"):
        tr.vmap(ASKING[name], pile_axis)(pile)


@pytest.mark.parametrize(
    "same",
    [
        lambda x, y: x.shape == y.shape,
        lambda x, y: x.shape[0] == y.shape[0],
        lambda x, y: x.shape[0] + 1 > y.shape[0],
    ],
)
def test_what_is_so_for_every_size_may_be_asked(same):
    x, y = (Pile.from_list([torch.ones(n) for n in (2, 0, 3)]) for _ in range(2))
    out = tr.vmap(lambda x, y: (x + y).sum() if same(x, y) else x.sum(), pile_axis)(x, y)
    assert out.tolist() == [4.0, 0.0, 6.0]
