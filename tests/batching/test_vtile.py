"""`vtile`, with the values of JAX's."""

import re

import pytest
import torch

from torchremat.batching import vtile
from torchremat.errors import AxisError, AxisTypeError


def test_a_tile_is_what_is_left_of_the_axis():
    shapes = []

    def fun(x):
        shapes.append(tuple(x.shape))
        return [x * 2]

    (out,) = vtile(fun, [0], [0], 3)(torch.arange(12.0))
    assert shapes[0] == (4,)
    assert torch.equal(out, 2 * torch.arange(12.0))


def test_partial_sums_lie_side_by_side():
    x = torch.arange(24.0).reshape(4, 6)
    (out,) = vtile(lambda x: [x.sum(1)], [1], [0], 2)(x)
    assert torch.equal(out, torch.cat([x[:, :3].sum(1), x[:, 3:].sum(1)]))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_arguments_that_are_not_cut_are_shared(axis):
    x, y = torch.randn(6, 6), torch.randn(1)
    a, b = vtile(lambda x, y: (x * y, y), [axis, None], [axis, None], 3)(x, y)
    assert torch.equal(a, x * y)
    assert torch.equal(b, y)


def test_no_tile_size_gives_tiles_of_one():
    (out,) = vtile(lambda x: [x.sum().expand(1)], [0], [0], None)(torch.arange(4.0))
    assert torch.equal(out, torch.arange(4.0))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: vtile(list, [0], [0], 5)(torch.ones(12)), "Cannot divide evenly"),
        (lambda: vtile(list, [None], [None], 2)(torch.ones(12)), "No mapped arguments?"),
        (lambda: vtile(list, [0, 0], [0], 2)(torch.ones(12)), "2 in_axes"),
        (lambda: vtile(lambda x: [x], [0], [0, 0], 2)(torch.ones(12)), "2 out_axes"),
        (lambda: vtile(lambda x: [x], [1], [0], 2)(torch.ones(12)), "out of bounds"),
    ],
)
def test_bad_input(call, text):
    with pytest.raises(AxisError, match=re.escape(text)):
        call()


def test_an_output_that_differs_from_tile_to_tile_needs_an_axis():
    with pytest.raises(AxisError, match="mapped output but out_axes is None"):
        vtile(lambda x: [x], [0], [None], 3)(torch.arange(6.0))


def test_the_function_returns_a_list():
    with pytest.raises(AxisTypeError, match="returned a Tensor"):
        vtile(lambda x: x, [0], [0], 3)(torch.arange(6.0))
