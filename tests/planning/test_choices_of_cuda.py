"""The kernels of a GPU that is not here are those that PyTorch's own build for CUDA chooses.

That build can be imported without a device, and its operators run forward on fake tensors of one.
`scripts/test_cuda_build.sh` installs it. Left out is attention, for which it asks the device.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchremat as tr
from torchremat import _torch

pytestmark = pytest.mark.cuda_build


@pytest.fixture(autouse=True)
def _needs_the_build():
    if torch.version.cuda is None or torch.cuda.is_available():
        pytest.skip("this is no build of PyTorch for CUDA without a GPU")


@contextmanager
def stand_on_cpu():
    with _torch.stand_for_gpu(_torch.Gpu("sm_90")), FakeTensorMode(), torch.device("cpu"):
        yield


@contextmanager
def be_on_cuda():
    with FakeTensorMode(), torch.device("cuda"):
        yield


def list_derivatives(result):
    """The names of the nodes of autograd behind a result, and its layout."""
    result = result[0] if isinstance(result, tuple) else result
    found, stack = [], [result.grad_fn]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        found.append(node.name().replace("_FusedRmsNormBackward", "FusedRmsNormBackward0"))
        stack += [other for other, _ in node.next_functions]
    return sorted(found), tuple(result.shape), result.stride(), result.dtype


def image(**options):
    return torch.randn(2, 8, 4, 4, requires_grad=True).to(**options)


def rows(**options):
    return torch.randn(3, 8, requires_grad=True).to(**options)


HALF, LAST = {"dtype": torch.float16}, {"memory_format": torch.channels_last}
BRAIN = {"dtype": torch.bfloat16}
CALLS = {
    "dropout": lambda: F.dropout(rows(), 0.1),
    "dropout of everything": lambda: F.dropout(rows(), 1.0),
    "dropout in place": lambda: F.dropout(rows() * 1, 0.1, inplace=True),
    "dropout in evaluation": lambda: F.dropout(rows() * 1, 0.1, training=False),
    "alpha dropout": lambda: F.alpha_dropout(rows(), 0.1, True),
    "dropout of channels": lambda: F.dropout2d(image(), 0.1),
    "lstm cell": lambda: nn.LSTMCell(8, 8)(rows()),
    "rnn cell": lambda: nn.RNNCell(8, 8)(rows()),
    "rms norm of two dtypes": lambda: nn.RMSNorm(8)(rows(**BRAIN)),
    "batch norm": lambda: nn.BatchNorm2d(8)(image()),
    "batch norm of halves": lambda: nn.BatchNorm2d(8)(image(**HALF)),
    "batch norm with half weights": lambda: nn.BatchNorm2d(8, **HALF)(image(**HALF)),
    "batch norm in bfloat16": lambda: nn.BatchNorm2d(8)(image(**BRAIN)),
    "batch norm with channels last": lambda: nn.BatchNorm2d(8)(image(**LAST)),
    "batch norm of rows": lambda: nn.BatchNorm1d(8)(rows()),
    "batch norm of sequences": lambda: nn.BatchNorm1d(8)(image().flatten(2)),
    "batch norm in evaluation": lambda: nn.BatchNorm2d(8).eval()(image()),
    "batch norm without weights": lambda: nn.BatchNorm2d(8, affine=False)(image()),
    "batch norm of batches": lambda: nn.BatchNorm2d(8, track_running_stats=False)(image()),
    "instance norm": lambda: nn.InstanceNorm2d(8)(image()),
    "group norm": lambda: nn.GroupNorm(2, 8)(image()),
    "layer norm": lambda: nn.LayerNorm(8)(rows()),
    "linear": lambda: nn.Linear(8, 4)(rows()[None]),
    "convolution": lambda: nn.Conv2d(8, 8, 3)(image()),
    "convolution of channels last": lambda: nn.Conv2d(8, 8, 3)(image(**LAST)),
    "transposed convolution": lambda: nn.ConvTranspose2d(8, 8, 3)(image()),
    "embedding": lambda: nn.Embedding(5, 8)(torch.zeros(3, dtype=torch.long)),
    "bag": lambda: nn.EmbeddingBag(5, 8)(torch.zeros(3, 2, dtype=torch.long)),
    "interpolation": lambda: F.interpolate(image(), scale_factor=2, mode="bilinear"),
    "max pooling": lambda: F.max_pool2d(image(), 2),
    "adaptive pooling": lambda: F.adaptive_avg_pool2d(image(), 2),
    "prelu": lambda: nn.PReLU()(rows()),
    "cross entropy": lambda: F.cross_entropy(rows(), torch.zeros(3, dtype=torch.long)),
    "softmax in float32": lambda: F.softmax(rows(**HALF), -1, dtype=torch.float32),
    "norm": lambda: rows().norm(),
    "distances": lambda: torch.cdist(rows(), rows()),
    "cumulative sum": lambda: rows().cumsum(0),
    "median": lambda: rows().median(),
    "sort": lambda: rows().sort(),
    "unfold": lambda: F.unfold(image(), 2),
    "shuffle": lambda: F.pixel_shuffle(image(), 2),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", CALLS)
def test_the_choice_is_that_of_the_build(name):
    with stand_on_cpu():
        stood = list_derivatives(CALLS[name]())
    with be_on_cuda():
        expected = list_derivatives(CALLS[name]())
    assert stood == expected


@contextmanager
def cast_by(device):
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()


def targets(x):
    return torch.zeros_like(x).sigmoid()


CASTS = {
    **{
        name: lambda x, name=name: getattr(torch, name)(x)
        for name in (
            "exp",
            "log",
            "log1p",
            "expm1",
            "rsqrt",
            "reciprocal",
            "sinh",
            "cosh",
            "tan",
            "acos",
            "asin",
            "sin",
            "sigmoid",
            "tanh",
            "relu",
            "erf",
            "sqrt",
            "abs",
            "sum",
            "mean",
            "prod",
            "logsumexp_all",
            "norm",
            "std",
            "amax",
        )
        if hasattr(torch, name)
    },
    "linear": lambda x: F.linear(x, torch.randn(8, 8, requires_grad=True)),
    "bilinear": lambda x: torch.bmm(x[None], torch.randn(1, 8, 3)),
    "convolution": lambda x: F.conv1d(x[None], torch.randn(4, 3, 3)),
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: F.log_softmax(x, -1),
    "softmin": lambda x: F.softmin(x, -1),
    "layer norm": lambda x: F.layer_norm(x, (8,), torch.ones(8), torch.zeros(8)),
    "group norm": lambda x: F.group_norm(x[None].transpose(1, 2), 2),
    "rms norm": lambda x: F.rms_norm(x, (8,)),
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "power": lambda x: x.pow(3),
    "reversed power": lambda x: 2**x,
    "cumulative sum": lambda x: x.cumsum(0),
    "cumulative product": lambda x: x.cumprod(0),
    "logarithm of sums": lambda x: x.logsumexp(-1),
    "sum along a dim": lambda x: x.sum(0),
    "sum in a dtype": lambda x: x.sum(0, dtype=torch.bfloat16),
    "mean squared error": lambda x: F.mse_loss(x, targets(x)),
    "absolute error": lambda x: F.l1_loss(x, targets(x)),
    "smooth error": lambda x: F.smooth_l1_loss(x, targets(x)),
    "divergence": lambda x: F.kl_div(x, targets(x), reduction="batchmean"),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, targets(x)),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.long)),
    "cosine": lambda x: F.cosine_similarity(x, x + 1),
    "distances": lambda x: torch.cdist(x, x),
    "concatenation": lambda x: torch.cat([x, torch.ones(3, 8)]),
    "difference": lambda x: torch.addcmul(x, x, torch.ones(3, 8)),
    "prelu": lambda x: F.prelu(x, torch.ones(1)),
    "gru cell": lambda x: nn.GRUCell(8, 8, bias=False)(x),
}


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_there(name, dtype):
    if name == "gru cell":
        pytest.skip("PyTorch has no rule of shapes for it")
    with stand_on_cpu(), cast_by("cpu"):
        stood = list_derivatives(CASTS[name](rows(dtype=dtype)))
    with be_on_cuda(), cast_by("cuda"):
        expected = list_derivatives(CASTS[name](rows(dtype=dtype)))
    assert stood == expected


def test_rms_norm_has_the_fused_derivative():
    with be_on_cuda():
        assert nn.RMSNorm(8)(rows()).grad_fn.name() == "FusedRmsNormBackward0"
    with stand_on_cpu():
        assert "FusedRmsNorm" in nn.RMSNorm(8)(rows()).grad_fn.name()


def test_fake_tensors_of_the_build_are_planned():
    with FakeTensorMode(), torch.device("cuda"):
        model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
        x = torch.randn(2, 16, 32, requires_grad=True)
    plan = tr.plan(lambda x: model(x).sum(), x, budget="80%", device="h100")
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
        x = torch.randn(2, 16, 32, requires_grad=True)
    assert (
        plan.to_json()
        == tr.plan(lambda x: model(x).sum(), x, budget="80%", device="h100").to_json()
    )
