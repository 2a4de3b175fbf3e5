"""Softmax within segments is PyTorch's softmax of each slice."""

from itertools import pairwise

import pytest
import torch

from torchremat.batching.ragged.rules.softmax_op import segment_softmax

LENGTHS = {"short": [3, 0, 1, 4], "long": [700, 0, 1, 900], "none": [0, 0]}


def by_loop(x, offsets, log):
    function = torch.log_softmax if log else torch.softmax
    ends = offsets.tolist()
    return torch.cat([function(x[a:b], 0) for a, b in pairwise(ends)])


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_are_those_of_a_loop(name, dtype, log):
    offsets = torch.tensor([0, *LENGTHS[name]]).cumsum(0)
    x = (torch.randn(int(offsets[-1]), 12, dtype=torch.float64) * 5).to(dtype)
    torch.testing.assert_close(segment_softmax(x, offsets, log=log), by_loop(x, offsets, log))


@pytest.mark.parametrize("log", [False, True])
def test_derivatives_are_right_to_second_order(log):
    offsets = torch.tensor([0, 3, 3, 5])
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def f(x):
        return segment_softmax(x, offsets, log=log)

    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, x)


def test_it_maps_over_batches_of_data_and_of_offsets():
    offsets = torch.tensor([[0, 3, 3, 5], [0, 1, 2, 5]])
    x = torch.randn(2, 5, 2)
    ours = torch.func.vmap(segment_softmax)(x, offsets)
    torch.testing.assert_close(
        ours, torch.stack([segment_softmax(*p) for p in zip(x, offsets, strict=True)])
    )
    shared = torch.func.vmap(segment_softmax, in_dims=(0, None))(x, offsets[0])
    torch.testing.assert_close(shared[1], segment_softmax(x[1], offsets[0]))


def test_an_overflow_needs_more_than_a_large_number():
    x = torch.tensor([1000.0, 1000.0, -torch.inf, 3.0])
    offsets = torch.tensor([0, 3, 4])
    torch.testing.assert_close(segment_softmax(x, offsets), torch.tensor([0.5, 0.5, 0.0, 1.0]))
