"""Which leaves are donated."""

import itertools

import pytest

from torchremat.api_util import donation_vector, rebase_donate_argnums

TREES = ({"a": 1, "b": 2}, {"c": 3, "d": 4}, 5)


@pytest.mark.parametrize(
    "numbers", [p for size in range(4) for p in itertools.permutations(range(3), size)]
)
@pytest.mark.parametrize("kwargs", [{}, {"k": 6}])
def test_each_leaf_is_as_its_argument(numbers, kwargs):
    expected = [i in numbers for i in (0, 0, 1, 1, 2)] + [False] * len(kwargs)
    assert donation_vector(numbers, TREES, kwargs) == tuple(expected)


def test_keyword_arguments_are_donated_by_name():
    kwargs = {"p": (1, 2), "q": 3}
    assert donation_vector((), (0,), kwargs, ("p",)) == (False, True, True, False)
    assert donation_vector(0, (0,), kwargs, "q") == (True, False, False, True)


def test_a_negative_position_counts_from_the_end():
    assert donation_vector(-1, TREES, {}) == (False, False, False, False, True)


@pytest.mark.parametrize(
    ("donated", "static", "expected"),
    [
        ((), (), ()),
        ((), (1, 2, 3), ()),
        ((0,), (2, 3), (0,)),
        ((0, 1), (2, 3), (0, 1)),
        ((2, 3), (0, 1), (0, 1)),
        ((3, 4), (0, 1), (1, 2)),
        ((3, 2), (1, 0), (0, 1)),
        ((3,), (0, 1), (1,)),
        ((3, 3, 3), (0, 1), (1,)),
    ],
)
def test_positions_move_by_the_static_ones_before_them(donated, static, expected):
    assert rebase_donate_argnums(donated, static) == expected


@pytest.mark.parametrize(
    ("donated", "static"), [((0,), (0,)), ((0, 1), (1, 2)), ((0, 1, 2), (0, 1, 2))]
)
def test_nothing_is_static_and_donated(donated, static):
    with pytest.raises(ValueError, match="cannot intersect"):
        rebase_donate_argnums(donated, static)
