"""`take_rows` moves rows, with holes, and back in its derivative."""

import torch

from torchremat.batching.ragged.layouts.take_rows_op import take_rows

INDEX = torch.tensor([2, -1, 0, -1])
INVERSE = torch.tensor([2, -1, 0])


def test_rows_that_are_none_are_zero_if_asked_for():
    x = torch.tensor([1.0, 2.0, 3.0])
    assert take_rows(x, INDEX, INVERSE, zero=True).tolist() == [3, 0, 1, 0]
    assert take_rows(x, INDEX, INVERSE)[[0, 2]].tolist() == [3, 1]
    assert take_rows(x[:0], INDEX * 0 - 1, INVERSE[:0]).tolist() == [0, 0, 0, 0]


def test_derivatives_of_every_kind_are_right():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def f(x):
        return take_rows(x, INDEX, INVERSE, zero=True)

    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, x)


def test_what_stands_in_a_hole_comes_into_no_gradient():
    x = torch.ones(3, requires_grad=True)
    cotangent = torch.tensor([1.0, torch.nan, 2.0, torch.inf])
    (grad,) = torch.autograd.grad(take_rows(x, INDEX, INVERSE), x, cotangent)
    assert grad.tolist() == [2, 0, 1]


def test_it_maps_over_batches_of_data_and_of_indices():
    x = torch.randn(2, 3)
    rows = torch.func.vmap(lambda x: take_rows(x, INDEX, INVERSE, zero=True))(x)
    torch.testing.assert_close(rows[1], take_rows(x[1], INDEX, INVERSE, zero=True))
    index, inverse = torch.stack([INDEX, INDEX.flip(0)]), torch.tensor([[2, -1, 0], [1, -1, 3]])
    both = torch.func.vmap(lambda *a: take_rows(*a, zero=True))(x, index, inverse)
    torch.testing.assert_close(both[1], take_rows(x[1], index[1], inverse[1], zero=True))
