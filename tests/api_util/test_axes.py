"""Trees of axes: prefixes are spread over leaves, and what is not a prefix is shown."""

import re
from collections import OrderedDict, namedtuple

import pytest
from torch.utils import _pytree

from torchremat.api_util import flatten_axes

Point = namedtuple("Point", "x y")


def spread(axes, tree, **options):
    return flatten_axes("in_axes", _pytree.tree_structure(tree), axes, **options)


@pytest.mark.parametrize(
    ("axes", "tree", "expected"),
    [
        (0, {"a": [1, 2], "b": 3}, [0, 0, 0]),
        ({"a": 0, "b": 1}, {"a": [1, 2], "b": 3}, [0, 0, 1]),
        ({"b": 1, "a": 0}, {"a": [1, 2], "b": 3}, [0, 0, 1]),
        ({"a": [0, None], "b": None}, {"a": [1, 2], "b": 3}, [0, None, None]),
        (None, (1, (2, 3)), [None] * 3),
        ((0, None), (1, (2, 3)), [0, None, None]),
        (Point(0, 1), Point((1, 2), 3), [0, 0, 1]),
        ((0, ()), (1, ()), [0]),
        ((0, 1), (1, ()), [0]),
    ],
)
def test_an_axis_is_for_all_leaves_below_it(axes, tree, expected):
    assert spread(axes, tree) == expected


@pytest.mark.parametrize(
    ("axes", "tree", "details"),
    [
        ({"a": 0, "b": (1, 2)}, {"a": 1, "b": 2}, ["different types at in_axes['b']"]),
        (
            {"a": [0, 1], "b": (2, 3)},
            {"a": 1, "b": 2},
            ["different types at in_axes['a']", "different types at in_axes['b']"],
        ),
        ({"a": None, "b": (0, 1)}, {"a": 1, "b": 2}, ["the full pytree has a leaf"]),
        ([0, 1], (1, 2), ["of type list, but the full pytree has a subtree of type tuple"]),
        ((0, 1), (1, 2, 3), ["different numbers of children at in_axes"]),
        ({"a": 0}, {"b": 1}, ["different keys or metadata at in_axes"]),
        ({"a": 0}, OrderedDict(a=1), ["of type dict, but the full pytree has a subtree of type"]),
    ],
)
def test_every_place_where_it_is_no_prefix_is_told(axes, tree, details):
    with pytest.raises(ValueError) as caught:
        spread(axes, tree)
    message = str(caught.value)
    assert message.startswith(
        "in_axes specification must be a tree prefix of the corresponding value, got specification"
    )
    assert f"Mismatch details ({len(details)} found)" in message
    assert all(detail in message for detail in details)
    assert not re.search("_Leaf|object at", message)


@pytest.mark.parametrize("tupled_args", [False, True])
def test_a_tuple_that_is_missing_round_the_only_argument_is_suggested(tupled_args):
    with pytest.raises(ValueError) as caught:
        spread([0, 1], ([1, 2],), tupled_args=tupled_args)
    assert ("wrapped in a singleton tuple" in str(caught.value)) == tupled_args


def test_errors_may_leave_out_keyword_arguments():
    with pytest.raises(ValueError, match=r"got specification \(0,\) for value tree"):
        spread(((0,), {}), ((1, 2), {}), kws=True)
