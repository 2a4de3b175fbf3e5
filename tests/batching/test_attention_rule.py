"""Fused attention on the CPU under `vmap` is one kernel, equal to a loop over the examples."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

import torchremat as tr

MASKS = {
    "none": (None, None),
    "shared": ((4, 6), None),
    "shared, by batch": ((2, 1, 4, 6), None),
    "one each": ((3, 4, 6), 0),
    "one each, by head": ((3, 1, 5, 4, 6), 0),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (1, None, None), (None, 2, 0)])
def test_it_equals_a_loop_and_warns_of_none(name, in_axes):
    torch.manual_seed(0)
    shape, mask_axis = MASKS[name]
    sizes = [[2, 5, 4, 8], [2, 5, 6, 8], [2, 5, 6, 8]]
    for size, axis in zip(sizes, in_axes, strict=True):
        if axis is not None:
            size.insert(axis, 3)
    tensors = [torch.randn(size, requires_grad=True) for size in sizes]
    mask = None if shape is None else torch.randn(shape)

    def fun(q, k, v, m):
        return attention(q, k, v, attn_mask=m)

    def example(i):
        picked = [x if a is None else x.select(a, i) for x, a in zip(tensors, in_axes, strict=True)]
        return fun(*picked, mask if mask_axis is None else mask[i])

    found = tr.vmap(fun, (*in_axes, mask_axis))(*tensors, mask)
    expected = torch.stack([example(i) for i in range(3)])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), tensors),
        torch.autograd.grad(expected.square().sum(), tensors),
    )


def test_gradients_of_each_example():
    q = torch.randn(3, 1, 2, 5, 8)

    def loss(q):
        return attention(q, q, q, is_causal=True).square().sum()

    found = tr.vmap(torch.func.grad(loss))(q)
    expected = torch.stack([torch.func.grad(loss)(x) for x in q])
    torch.testing.assert_close(found, expected)
