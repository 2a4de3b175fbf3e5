"""The memory that a node of autograd's graph needs beside what it reads and writes."""

import pytest
import torch
from torch.nn import functional as F

from torchremat.measure import LiveBytes
from torchremat.planning.tapes.tape_problem import besides_of, node_name

IMAGE = (4, 8, 32, 32)
INDEX = torch.arange(7, -1, -1)

ONE_KERNEL = {
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, 31), IMAGE),
    "average pooling": (lambda x: F.avg_pool2d(x, 3, 1), IMAGE),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), IMAGE),
    "convolution": (lambda x: F.conv2d(x, torch.ones(8, 8, 1, 1)), IMAGE),
    "elu": (F.elu, IMAGE),
    "exp": (torch.exp, IMAGE),
    "gelu": (F.gelu, IMAGE),
    "glu": (lambda x: F.glu(x, 1), IMAGE),
    "group norm": (lambda x: F.group_norm(x, 4), IMAGE),
    "hardswish": (F.hardswish, IMAGE),
    "layer norm": (lambda x: F.layer_norm(x, (32,)), IMAGE),
    "leaky relu": (F.leaky_relu, IMAGE),
    "log": (lambda x: torch.log(x), IMAGE),
    "log sigmoid": (F.logsigmoid, IMAGE),
    "log softmax": (lambda x: F.log_softmax(x, -1), IMAGE),
    "max pooling": (lambda x: F.max_pool2d(x, 3, 1), IMAGE),
    "mish": (F.mish, IMAGE),
    "negation": (torch.neg, IMAGE),
    "padding": (lambda x: F.pad(x, (1, 1)), IMAGE),
    "reflection": (lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), IMAGE),
    "relu": (F.relu, IMAGE),
    "roll": (lambda x: x.roll(1, -1), IMAGE),
    "sigmoid": (torch.sigmoid, IMAGE),
    "silu": (F.silu, IMAGE),
    "softmax": (lambda x: F.softmax(x, -1), IMAGE),
    "softplus": (F.softplus, IMAGE),
    "tanh": (torch.tanh, IMAGE),
    "tril": (torch.tril, IMAGE),
    "upsampling": (lambda x: F.interpolate(x, size=(33, 33), mode="bilinear"), IMAGE),
}
TWO_KERNELS = {
    "abs": (torch.abs, IMAGE),
    "gather": (lambda x: x.gather(1, torch.zeros(IMAGE, dtype=torch.int64)), IMAGE),
    "index": (lambda x: x[:, INDEX], IMAGE),
    "index select": (lambda x: x.index_select(1, INDEX), IMAGE),
    "log1p": (torch.log1p, IMAGE),
    "product": (lambda x: x * torch.ones(IMAGE), IMAGE),
    "sine": (torch.sin, IMAGE),
    "square root": (torch.sqrt, IMAGE),
    "where": (lambda x: torch.where(x > 1, x, torch.ones(IMAGE)), IMAGE),
}
OTHERS = {
    "cosine": (torch.cos, IMAGE),
    "quotient": (lambda x: x / torch.ones_like(x), IMAGE),
    "power": (lambda x: x**3, IMAGE),
}
CASES = {**ONE_KERNEL, **TWO_KERNELS, **OTHERS}


def measure(function, shape):
    """The name of the node, and the bytes besides as a part of the largest that it has."""
    x = torch.rand(shape, requires_grad=True)
    y = function(x)
    cotangent = torch.ones_like(y).contiguous()
    with LiveBytes() as memory:
        (gradient,) = torch.autograd.grad(y, x, cotangent)
    besides = memory.peak - gradient.untyped_storage().nbytes()
    return node_name(y.grad_fn), besides / max(x.nbytes, y.nbytes)


@pytest.mark.parametrize("name", CASES)
def test_a_node_needs_no_more_than_is_assumed(name):
    node, besides = measure(*CASES[name])
    assert besides <= besides_of(node) + 0.3
    assert besides_of(node) == (0 if name in ONE_KERNEL else 1 if name in TWO_KERNELS else 2)
