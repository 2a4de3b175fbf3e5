"""`vmap` of PyTorch's operators, on its own samples: equal to a loop, values and gradients."""

import pytest
import torch
from torch.utils import _pytree as pytree

import torchremat as tr

pytest.importorskip("expecttest", reason="PyTorch's own tests need it")
from tests.op_samples import OPS, samples

COPIES = 3
STANDARD = """
add addmm amax atan2 bmm cat cdist clamp cumsum diagonal div einsum expand fft.fft flip gather
index_put index_select linalg.inv linalg.norm log_softmax logsumexp masked_fill matmul
max.reduction_with_dim mean mm mul native_layer_norm nn.functional.conv2d nn.functional.embedding
nn.functional.gelu nn.functional.group_norm nn.functional.linear nn.functional.max_pool2d
nn.functional.mse_loss nn.functional.pad nn.functional.scaled_dot_product_attention norm permute
pow prod repeat reshape roll scatter_add sigmoid sin softmax sort split squeeze stack std sub sum
svd t tanh transpose tril unfold unsqueeze var where
"""
# PyTorch's own vmap differs from a loop: in the gradient, or as as_strided looks past one example
AS_TORCH_FUNC = """
as_strided as_strided.partial_views as_strided_copy as_strided_scatter
nn.functional.linear_cross_entropy.chunked
"""
# a loop draws other numbers; sparse tensors cannot be stacked
LEFT_OUT = """
sparse.mm.reduce sparse.sampled_addmm
bernoulli cauchy exponential geometric log_normal normal normal.in_place normal.number_mean
nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d
nn.functional.feature_alpha_dropout.with_train nn.functional.feature_alpha_dropout.without_train
nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.rrelu
rand_like randn_like svd_lowrank pca_lowrank uniform empty_like new_empty new_empty_strided
nn.functional.multi_head_attention_forward
"""


def parameters():
    """The standard operators, and all others, marked slow."""
    standard, left_out = STANDARD.split(), LEFT_OUT.split()
    for name in OPS:
        if name not in left_out:
            yield pytest.param(name, marks=() if name in standard else pytest.mark.slow)


def loop(function, args):
    """The outputs for each example, stacked."""
    results = [function(*example) for example in zip(*args, strict=True)]
    return [torch.stack(column) for column in zip(*map(tensors_of, results), strict=True)]


def tensors_of(result):
    return [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def differentiated(outputs, leaves):
    chosen = [x for x in outputs if x.requires_grad]
    total = sum((x.abs() if x.is_complex() else x).sum() for x in chosen)
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if chosen else []
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=False)]


def batched(sample):
    """Examples that differ: the sample's tensors, repeated, floating ones scaled a little."""
    scales = torch.linspace(0.9, 1.0, COPIES, dtype=torch.float64)
    args, leaves = [], []
    for tensor, chosen in zip(sample.tensors, sample.is_differentiated, strict=True):
        value = tensor.detach().expand(COPIES, *tensor.shape)
        if value.is_floating_point() and chosen:
            value = value * scales.to(value.dtype).reshape(-1, *[1] * tensor.dim())
        value = value.clone()
        args.append(value.requires_grad_() if chosen else value)
        leaves += [args[-1]] if chosen else []
    return args, leaves


def expect(name, function, args, leaves):
    """The outputs, and the gradients of `leaves`, as PyTorch maps `function`, and as a loop."""
    mapped = tensors_of(torch.func.vmap(function)(*args))
    expected = mapped if name in AS_TORCH_FUNC.split() else loop(function, args)
    return expected, differentiated(expected, leaves)


@pytest.mark.filterwarnings("ignore")  # operators without a rule, deprecated ones
@pytest.mark.parametrize("name", list(parameters()))
@pytest.mark.sampled(3)
def test_it_equals_a_loop(name):
    for sample in samples(name, 2):
        args, leaves = batched(sample)
        mapped = tr.vmap(sample.function)
        try:
            expected, gradients = expect(name, sample.function, args, leaves)
        except Exception as error:
            # what PyTorch cannot map fails here too, unless a trace can check what it branches on
            try:
                differentiated(tensors_of(mapped(*args)), leaves)
            except type(error):
                continue
            expected = loop(sample.function, args)
            gradients = differentiated(expected, leaves)
        for _ in range(3):
            found = tensors_of(mapped(*args))
            torch.testing.assert_close(found, expected, equal_nan=True)
            grads = differentiated(found, leaves)
            torch.testing.assert_close(grads, gradients, equal_nan=True)
