"""`torch.nn.functional.grouped_mm` in traces: laid out as its kernels do, and trained as plain."""

import pytest
import torch
from torch.nn.functional import grouped_mm

import torchremat as tr
from tests.helpers import assert_same
from torchremat import _torch

ENDS = torch.tensor([2, 3, 3, 8], dtype=torch.int32)
MATRICES = {
    "groups of rows": ((8, 16), (4, 5, 16), ENDS),
    "groups of columns": ((4, 5, 16), (8, 16), ENDS),
    "groups of the sum": ((6, 8), (16, 8), ENDS),
    "a batch": ((4, 6, 16), (4, 5, 16), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_a_fake_result_is_laid_out_as_the_real_one(name, dtype):
    a_shape, b_shape, ends = MATRICES[name]
    a, b = torch.randn(a_shape).to(dtype), torch.randn(b_shape).to(dtype).mT
    real = grouped_mm(a, b, offs=ends)
    mode = _torch.new_fake_mode()
    with mode:
        fake = grouped_mm(
            *(t if t is None else mode.from_tensor(t) for t in (a, b)),
            offs=None if ends is None else mode.from_tensor(ends),
        )
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


@pytest.mark.parametrize("policy", ["full", "dots"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_trained_as_without_a_checkpoint(dtype, policy):
    def f(x, w):
        return grouped_mm(grouped_mm(x, w.mT, offs=ENDS).tanh(), w, offs=ENDS)

    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((8, 16), (4, 24, 16))]
    found = []
    for fun in (f, tr.checkpoint(f, policy=policy)):
        y = fun(*leaves)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    assert_same(found[1], found[0])


@pytest.mark.parametrize(
    ("a", "b", "ends", "message"),
    [
        (torch.ones(8, 16), torch.ones(4, 8, 8), ENDS, "contraction dimension"),
        (torch.ones(8, 16), torch.ones(4, 16, 8), None, "offsets are needed"),
        (torch.ones(8, 16), torch.ones(4, 16, 8).half(), ENDS, "of one dtype"),
    ],
)
def test_wrong_matrices_are_refused_in_a_trace(a, b, ends, message):
    with pytest.raises(RuntimeError, match=message):
        tr.checkpoint(lambda a: torch._grouped_mm(a, b, offs=ends))(a.requires_grad_())
