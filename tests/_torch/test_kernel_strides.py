"""Fake results have the strides of real ones, whatever the order in which dimensions lie."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import assert_same
from torchremat import checkpoint
from torchremat._torch.fake_proxy import new_fake_mode
from torchremat._torch.kernel_strides import _RULES
from torchremat.nn import report, wrap

OTHERS = {
    "aten._fft_r2c.default",
    "aten._sparse_mm_reduce_impl.default",
    "aten.ldexp.Tensor",
    "aten.max_pool3d_with_indices_backward.default",
    "aten.max_unpool2d.default",
    "aten.native_dropout_backward.default",
    "aten.normal.Tensor_Tensor",
    "aten.pow.Scalar",
}
"""Operators whose strides no simple rule says: a fake result of theirs may have others."""

# what reaches an operator of the table: under the name of the operator, or of what calls it
CALLERS = {
    "_batch_norm_with_update", "_native_batch_norm_legit", "native_batch_norm", "copysign",
    "nn.functional.batch_norm", "nn.functional.channel_shuffle", "nn.functional.cross_entropy",
    "nn.functional.glu", "nn.functional.huber_loss", "nn.functional.logsigmoid", "div",
    "nn.functional.max_pool3d",
    "nn.functional.mse_loss", "nn.functional.smooth_l1_loss", "nn.functional.nll_loss",
    "nn.functional.pad", "native_layer_norm", "logaddexp", "logical_and", "xlogy", "heaviside",
}  # fmt: skip


class Comparison(TorchDispatchMode):
    """Runs each operator on fake tensors, too, and notes those whose strides differ."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()
        self.differ: set[str] = set()
        self._fake_mode = new_fake_mode()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(func)
        try:  # before it runs, as `transpose_` changes its argument
            fakes = pytree.tree_map_only(Tensor, self._fake_mode.from_tensor, (args, kwargs))
        except Exception:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        try:
            with self._fake_mode:
                fake = func(*fakes[0], **fakes[1])
        except Exception:  # it depends on values, or cannot be faked
            return result
        self.ran.add(name)
        pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(fake), strict=True)
        for real, made in pairs:
            is_laid_out = isinstance(real, Tensor) and real.layout == torch.strided
            if is_laid_out and real.numel() > 1 and _strides(real) != _strides(made):
                self.differ.add(name)
        return result


def _strides(tensor: Tensor) -> list[int]:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in sizes if size > 1]


def _in_other_order(tensor: Any, source: int, target: int) -> Any:
    """The same values, of which dimension `source` lies in memory where `target` does."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dim() < 2:
        return tensor
    moved = tensor.detach().movedim(source, target).contiguous().movedim(target, source)
    return moved.requires_grad_(tensor.requires_grad)


def _run_samples(op: Any, comparison: Comparison) -> None:
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
        for source, target in ((0, 0), (0, -1), (1, -1)):
            _run_sample(op, sample, source, target, comparison)


def _run_sample(op: Any, sample: Any, source: int, target: int, comparison: Comparison) -> None:
    args, kwargs = pytree.tree_map(
        lambda leaf: _in_other_order(leaf, source, target),
        ((sample.input, *sample.args), sample.kwargs),
    )
    leaves = pytree.tree_leaves((args, kwargs))
    inputs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    try:
        with comparison:
            out = pytree.tree_leaves(op(*args, **kwargs))
            losses = [t.abs().sum() for t in out if isinstance(t, Tensor) and t.requires_grad]
            if losses:
                torch.autograd.grad(losses, inputs, allow_unused=True)
    except Exception:
        return  # plain PyTorch does not take the sample in this order


def _sweep(names: set[str] | None) -> Comparison:
    comparison = Comparison()
    torch.manual_seed(0)
    for op in op_db:
        if torch.float32 in op.dtypes and (names is None or op.name in names):
            _run_samples(op, comparison)
    return comparison


@pytest.mark.slow
def test_operators_of_the_table_have_the_strides_of_their_kernels():
    comparison = _sweep(CALLERS)
    assert len(comparison.ran & {str(op) for op in _RULES}) >= 20
    assert not comparison.differ - OTHERS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_other_operator_has_other_strides_than_its_rule():
    comparison = _sweep(None)
    assert {str(op) for op in _RULES} - comparison.ran == set()
    assert comparison.differ <= OTHERS


class _NormOverTranspose(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2).reshape(-1, 4).square()


@pytest.mark.parametrize("policy", [None, "dots", "budget:least"])
def test_batch_norm_over_a_transpose_is_one_graph(policy):
    x = torch.randn(4, 6, 8)
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = _NormOverTranspose()
        if wrapped:
            wrap(model, policy)
        for _ in range(2):
            model(x).sum().backward()
        results.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert_same(results[1], results[0], "bits")
    assert {row.way for row in report(model)} == {"graph"}


def test_what_is_a_copy_in_plain_pytorch_is_one_in_a_graph():
    def write(x):
        y = nn.functional.batch_norm(x.transpose(1, 2), None, None, training=True)
        y.transpose(1, 2).reshape(-1)[0] = 7.0  # the reshape copies, so y is as it was
        return y * x.transpose(1, 2)

    x = torch.randn(4, 6, 8, requires_grad=True)
    assert_same(checkpoint(write)(x), write(x), "bits")


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 1, 1), (1, 1, 4, 5), (2, 3, 4, 5, 6)])
def test_channels_that_come_last_stay_last(shape):
    channels_last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    function = nn.functional.batch_norm

    def normalise(x):
        y = function(x, None, None, training=True)
        assert y.stride() == strides
        return y.square()

    for memory_format in (torch.contiguous_format, channels_last):
        x = torch.randn(shape).contiguous(memory_format=memory_format).requires_grad_()
        if math.prod(shape) // shape[1] > 1:
            strides = function(x, None, None, training=True).stride()
            assert_same(checkpoint(normalise)(x), normalise(x), "bits")
