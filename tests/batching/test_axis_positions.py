"""Where the mapped axis is, and how it is moved."""

import pytest
import torch

from torchremat.batching import bdim_at_front, broadcast, matchaxis, moveaxis
from torchremat.errors import AxisError

X = torch.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize("src", [0, 1, -1])
@pytest.mark.parametrize("dst", [0, 2, -2])
def test_moveaxis(src, dst):
    assert torch.equal(moveaxis(X, src, dst), X.movedim(src, dst))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_what_is_repeated_is_the_same_all_along(axis):
    out = broadcast(X, 5, axis)
    assert all(torch.equal(out.select(axis, i), X) for i in range(5))
    assert out.data_ptr() == X.data_ptr()


@pytest.mark.parametrize("axis", [0, 1, None])
def test_bdim_at_front(axis):
    expected = X.expand(7, 2, 3, 4) if axis is None else X.movedim(axis, 0)
    assert torch.equal(bdim_at_front(X, axis, 7), expected)


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [(0, 0, X), (0, 2, X.movedim(0, 2)), (None, None, X), (None, 1, X.unsqueeze(1))],
)
def test_matchaxis(src, dst, expected):
    assert torch.equal(matchaxis(None, 1, src, dst, X), expected)


def test_matchaxis_sums_only_if_asked():
    assert torch.equal(matchaxis("i", 2, 0, None, X, sum_match=True), X.sum(0))
    with pytest.raises(AxisError, match=r"\(axis_name=i\) but out_axes is None"):
        matchaxis("i", 2, 0, None, X)


@pytest.mark.parametrize("call", [lambda: moveaxis(X, 3, 0), lambda: broadcast(X, 2, 4)])
def test_axes_that_are_not_there(call):
    with pytest.raises(AxisError, match="out of bounds"):
        call()


def test_numbers_are_broadcast():
    assert broadcast(2.0, 3, 0).tolist() == [2.0] * 3
    assert broadcast(X, sz=5, axis=1).shape == (2, 5, 3, 4)
