"""Steps that are planned for a GPU that is not here take the kernels that PyTorch takes there."""

import operator
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import torchremat as tr
from torchremat import _torch
from torchremat.errors import BudgetError

HALF = torch.bfloat16


def names_of(graph):
    """The operators of a graph that compute something, without overloads."""
    calls = (node for node in graph.graph.nodes if node.op == "call_function")
    return [str(n.target).split(".")[1] for n in calls if n.target is not operator.getitem]


def plan_on_meta(fun, *args, device="h100", **options):
    return tr.plan(fun, *args, budget="100%", device=device, **options)


def heads(dtype=HALF, length=64, dim=64, num=4, keys=None):
    shape = (2, num, length, dim)
    q = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    shape = (2, num, keys or length, dim)
    k, v = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for _ in range(2))
    return q, k, v


FUSED = ("cudnn", "flash", "efficient")


def kernel_of(fun, *args, device="h100"):
    """The fused kernel of attention that a step takes, or `math`."""
    names = names_of(plan_on_meta(fun, *args, device=device).forward_graph)
    found = [n for n in names if n.startswith("_scaled_dot_product_")]
    if not found:
        return "math"
    (name,) = found
    return next(kind for kind in FUSED if kind in name)


def attend(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options).sum()


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        ("h100", HALF, "cudnn"),
        ("b200", torch.float16, "cudnn"),
        ("a100", HALF, "flash"),
        ("5090", HALF, "flash"),
        ("mi300x", HALF, "flash"),
        ("h100", torch.float32, "efficient"),
        ("mi300x", torch.float32, "efficient"),
        ("v100", torch.float16, "efficient"),
        ("v100", HALF, "math"),
        ("t4", torch.float32, "efficient"),
        ("a100", torch.float64, "math"),
    ],
)
def test_attention_takes_the_kernel_of_the_gpu(device, dtype, kernel):
    assert kernel_of(attend(is_causal=True), *heads(dtype), device=device) == kernel


@pytest.mark.parametrize(
    ("device", "change", "kernel"),
    [
        ("a100", {"dim": 20}, "flash"),  # it is padded
        ("a100", {"dim": 256}, "flash"),
        ("h100", {"dim": 256}, "flash"),
        ("4090", {"dim": 256}, "flash"),  # without dropout its backward kernel fits
        ("4090", {"dim": 208}, "efficient"),
        ("a100", {"dim": 264}, "efficient"),
        ("a100", {"dim": 258}, "math"),
        ("a100", {"keys": 32}, "efficient"),  # flash aligns a causal mask with the end
    ],
)
def test_sizes_decide(device, change, kernel):
    assert kernel_of(attend(is_causal=True), *heads(**change), device=device) == kernel


def test_a_mask_goes_to_a_kernel_that_takes_one():
    q, k, v = heads()
    mask = torch.empty(64, 64, dtype=torch.bool, device="meta")

    def step(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum()

    assert kernel_of(step, q, k, v, mask, device="a100") == "efficient"
    assert kernel_of(step, q, k, v, mask) == "cudnn"
    learned = torch.empty(64, 64, dtype=HALF, device="meta", requires_grad=True)
    assert kernel_of(step, q, k, v, learned) == "efficient"


def test_groups_of_heads():
    q, k, v = heads()
    k, v = (t[:, :2] for t in (k, v))
    grouped = attend(is_causal=True, enable_gqa=True)
    assert kernel_of(grouped, q, k, v, device="a100") == "flash"


def test_the_settings_of_the_user_hold():
    inputs, step = heads(), attend(is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_of(step, *inputs) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        assert kernel_of(step, *inputs) == "flash"
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match="no kernel of attention that is enabled .* on sm_70"),
    ):
        kernel_of(step, *inputs, device="v100")
    asked = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(asked, set_priority=True):
        assert kernel_of(step, *inputs) == "efficient"
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel_of(step, *inputs) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_fused_kernel_saves_no_scores():
    q, k, v = heads(length=2048)
    plan = plan_on_meta(attend(is_causal=True), q, k, v)
    rows = 2 * 4 * 2048
    assert plan.baseline.saved_bytes == rows * 64 * 2 + rows * 4 + 2 * 8  # and the state of a draw


class HalfSoftmax(nn.Module):
    """It is computed in float32 without a copy of its argument."""

    def forward(self, x):
        return F.softmax(x.half(), -1, dtype=torch.float32)


def on_meta(build):
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize(
    ("build", "shape", "forward", "backward"),
    [
        (lambda: nn.Dropout(0.1), (16, 32), "native_dropout", "native_dropout_backward"),
        (
            lambda: nn.BatchNorm2d(32),
            (4, 32, 8, 8),
            "functional_cudnn_batch_norm",
            "cudnn_batch_norm_backward",
        ),
        (
            lambda: nn.BatchNorm1d(32),
            (16, 32),
            "_native_batch_norm_legit_functional",
            "native_batch_norm_backward",
        ),
        (lambda: nn.RMSNorm(32), (16, 32), "rsqrt", "_fused_rms_norm_backward"),
        (lambda: HalfSoftmax(), (16, 32), "_softmax", "_softmax_backward_data"),
        (
            lambda: nn.LSTMCell(32, 32),
            (16, 32),
            "_thnn_fused_lstm_cell",
            "_thnn_fused_lstm_cell_backward_impl",
        ),
        (
            lambda: nn.LSTMCell(32, 32, bias=False),
            (16, 32),
            "_thnn_fused_lstm_cell",
            "_thnn_fused_lstm_cell_backward_impl",
        ),
        (
            lambda: nn.GRUCell(32, 32),
            (16, 32),
            "_thnn_fused_gru_cell",
            "_thnn_fused_gru_cell_backward",
        ),
        (lambda: nn.LSTM(32, 16, 2), (5, 3, 32), "_cudnn_rnn", "flat_aten__cudnn_rnn_backward"),
        (lambda: nn.GRU(32, 16), (5, 3, 32), "_cudnn_rnn", "flat_aten__cudnn_rnn_backward"),
        (lambda: nn.RNN(32, 16), (5, 3, 32), "_cudnn_rnn", "flat_aten__cudnn_rnn_backward"),
    ],
)
def test_layers_take_the_kernels_of_the_gpu(build, shape, forward, backward):
    module, x = on_meta(build), torch.empty(shape, device="meta", requires_grad=True)

    def step(x):
        result = module(x)
        return (result if isinstance(result, torch.Tensor) else result[0]).sin().sum()

    plan = plan_on_meta(step, x)
    assert forward in names_of(plan.forward_graph)
    assert backward in names_of(plan.backward_graph)


@pytest.mark.parametrize("width", [32, 256])
def test_dropout_is_replayed_from_the_state_of_the_generator_of_a_gpu(width):
    """It has 16 bytes. That of the CPU has 5,056, more than the smaller mask."""
    x = torch.empty(width, width, device="meta", requires_grad=True)

    def step(x):
        for _ in range(6):
            x = F.dropout(x.sin(), 0.1)
        return x.sum()

    plan = tr.plan(step, x, budget="least", device="h100")
    saved = [node.name for node in plan.forward_graph.graph.output_node().args[0] if node]
    assert sum(name.startswith("generator_state") for name in saved) >= 4
    assert plan.peak_bytes < 4 * x.nbytes


def test_what_adds_in_any_order_is_saved():
    """On a GPU `index_add` gives other roundings each time, and is not run again."""
    x = torch.empty(64, 32, device="meta", requires_grad=True)
    index = torch.empty(64, dtype=torch.long, device="meta")

    def step(x, index):
        sums = torch.zeros(8, 32, device=x.device).index_add(0, index, x.sin())
        return sums.exp().square().sum()

    kept = {
        device: tr.estimate(step, x, index, policy="full", device=device).saved_bytes
        for device in ("cpu", "h100")
    }
    assert kept["h100"] == kept["cpu"] + 8 * 32 * 4


def test_products_in_eight_bits_and_in_groups():
    x = torch.empty(64, 128, device="meta", dtype=HALF, requires_grad=True)
    experts = torch.empty(4, 128, 64, device="meta", dtype=HALF, requires_grad=True)
    ends = torch.empty(4, device="meta", dtype=torch.int32)
    plan = plan_on_meta(lambda x, w, ends: F.grouped_mm(x, w, offs=ends).sum(), x, experts, ends)
    assert plan.baseline.flops == 3 * 2 * 64 * 128 * 64

    eight = torch.float8_e4m3fn
    a = torch.empty(4096, 4096, device="meta", dtype=eight)
    b = torch.empty(4096, 4096, device="meta", dtype=eight).t()
    scale = torch.empty((), device="meta")
    y = torch.empty(4096, 4096, device="meta", dtype=HALF, requires_grad=True)

    def multiply(y, a, b, scale):
        return (y * torch._scaled_mm(a, b, scale, scale, out_dtype=HALF)).sum()

    def multiply_halves(y, a, b):
        return (y * (a.to(HALF) @ b.to(HALF))).sum()

    slow = plan_on_meta(multiply_halves, y, a, b).baseline.seconds
    assert plan_on_meta(multiply, y, a, b, scale).baseline.seconds < 0.8 * slow


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention():
    q, k, v = heads()

    def double(score, batch, head, row, column):
        return 2 * score

    plan = plan_on_meta(lambda q, k, v: flex_attention(q, k, v, double).sum(), q, k, v)
    assert "flex_attention" in str([n.target for n in plan.forward_graph.graph.nodes])
    assert plan.baseline.saved_bytes < 2 * 4 * 64 * 64 * 4  # less than the scores


def test_channels_last_is_kept():
    conv, norm = on_meta(lambda: (nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)))
    conv.to(memory_format=torch.channels_last)
    x = torch.empty(2, 16, 9, 9, device="meta", requires_grad=True)

    def step(x):
        return norm(conv(x.to(memory_format=torch.channels_last))).relu().sum()

    graph = plan_on_meta(step, x).forward_graph.graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert node.meta["val"].is_contiguous(memory_format=torch.channels_last)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1)


def test_fake_tensors_on_a_gpu_are_planned_as_meta_tensors_for_it():
    """They say no name, so that one is given; without, they are those of a GPU like an A100."""
    with FakeTensorMode(), torch.device("cuda"):
        fakes = [torch.empty(2, 4, 64, 64, dtype=HALF, requires_grad=True) for _ in range(3)]
    step = attend(is_causal=True)
    assert kernel_of(step, *fakes) == "cudnn"
    assert kernel_of(step, *fakes, device=None) == "flash"
    plans = [plan_on_meta(step, *inputs) for inputs in (fakes, heads())]
    assert plans[0].to_json() == plans[1].to_json()
    names = {row.name for row in tr.explain(step, *fakes)}
    assert any("flash" in name for name in names)


def test_tensors_that_are_here_keep_their_kernels():
    """A plan for another device that is to run here is of what runs here."""
    x = torch.randn(16, 32, requires_grad=True)
    plan = plan_on_meta(lambda x: F.dropout(x, 0.1).sin().sum(), x)
    assert "native_dropout" not in names_of(plan.forward_graph)


def test_the_function_may_ask_for_the_gpu():
    x = torch.empty(16, 32, device="meta", requires_grad=True)

    def step(x):
        y = x.cuda() + torch.ones(32, device="cuda") + torch.zeros(32).to("cuda:0")
        return (y * torch.ones_like(x, device=torch.device("cuda", 0))).sin().sum()

    assert plan_on_meta(step, x).baseline.peak_bytes > 0


def test_a_model_of_blocks_under_budgets_and_tiles():
    model = on_meta(lambda: nn.Sequential(*(Block() for _ in range(4))))
    x = torch.empty(8, 128, 64, device="meta")
    plain = plan_on_meta(lambda x: model(x).sum(), x)
    plan = tr.plan(lambda x: model(x).sum(), x, budget="50%", device="h100")
    assert plan.peak_bytes <= plain.peak_bytes // 2
    with pytest.raises(BudgetError):
        tr.plan(lambda x: model(x).sum(), x, budget="1%", device="h100")
    found = tr.nn.fit(lambda x: model(x).sum(), x, memory="24MiB", maximize="batch", device="h100")
    assert found.size > 8


def test_inside_transformations():
    """Under `vmap` and `grad` of `torch.func` tensors are wrapped."""
    q = torch.empty(3, 1, 2, 16, 32, device="meta", dtype=HALF, requires_grad=True)
    weight = torch.empty(32, 32, device="meta", dtype=HALF, requires_grad=True)

    def attend_dropped(q):
        y = F.scaled_dot_product_attention(q, q, q)
        return F.rms_norm(F.dropout(y @ weight, 0.1), (32,)).sum()

    def mapped(q):
        return torch.func.vmap(attend_dropped, randomness="different")(q).sum()

    names = names_of(plan_on_meta(mapped, q).forward_graph)
    assert names.count("_scaled_dot_product_cudnn_attention") == 1
    assert "native_dropout" in names

    def dropped_slope(w):
        return torch.func.grad(lambda w: F.dropout(w.exp(), 0.1).sum())(w).sum()

    names = names_of(plan_on_meta(dropped_slope, weight).forward_graph)
    assert "native_dropout" in names


def test_autocast_of_a_gpu_casts_as_there():
    """Norms and softmax are in float32, unlike those of the CPU, and products in bfloat16."""
    model = on_meta(lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Softmax(-1)))
    x = torch.empty(32, 64, device="meta", requires_grad=True)

    def step(x):
        with torch.autocast("cuda", HALF):
            pooled = F.avg_pool3d(x.to(HALF)[None, None, None], (1, 1, 2))
            return model(x.to(HALF)).sum() + pooled.float().sum()

    nodes = plan_on_meta(step, x).forward_graph.graph.nodes
    dtypes = {
        str(node.target).split(".")[1]: node.meta["val"].dtype
        for node in nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and "aten" in str(node.target)
    }
    assert dtypes["addmm"] == dtypes["avg_pool3d"] == HALF
    assert dtypes["_softmax"] == dtypes["sum"] == torch.float32


def test_autocast_of_the_cpu_stays_what_it_is():
    x = torch.randn(4, 8, dtype=HALF)

    def cast():
        with torch.autocast("cpu", HALF):
            return [F.softmax(x, -1).dtype, F.mse_loss(x, x).dtype, torch.cat([x, x.float()]).dtype]

    plain = cast()
    found = []
    with _torch.stand_for_gpu(_torch.Gpu("sm_90")):
        thread = threading.Thread(target=lambda: found.append(cast()))
        thread.start()
        thread.join()
        found.append(cast())  # real tensors stand for nothing
    assert found == [plain, plain] == [[HALF, torch.float32, torch.float32]] * 2


def test_other_threads_and_later_calls_meet_plain_kernels():
    def node_of_dropout():
        x = torch.ones(4, 4, requires_grad=True)
        with FakeTensorMode(allow_non_fake_inputs=True):
            return F.dropout(x * 1, 0.5).grad_fn.name()

    found = []
    with _torch.stand_for_gpu(_torch.Gpu("sm_90")):
        thread = threading.Thread(target=lambda: found.append(node_of_dropout()))
        thread.start()
        thread.join()
        assert node_of_dropout() == "NativeDropoutBackward0"
        F.dropout(torch.ones(4, 4), 0.5)  # real tensors have their own
    assert found == [node_of_dropout()] == ["MulBackward0"]
    for name in ("dropout", "scaled_dot_product_attention", "_cudnn_rnn"):
        assert "AutogradCPU: registered at /" not in torch._C._dispatch_dump(f"aten::{name}")


def test_workspaces_are_allowed_for():
    """cuBLAS takes 32 MiB on an H100, cuDNN a copy of a convolution, attention float32 queries."""
    x, w = (torch.empty(64, 64, device="meta", requires_grad=True) for _ in range(2))
    products = tr.estimate(lambda x, w: (x @ w).sum(), x, w, device="h100")
    assert products.workspace_bytes == 32 << 20
    assert tr.estimate(lambda x, w: (x @ w).sum(), x, w, device="cpu").workspace_bytes == 0
    nbytes = products.total_bytes + products.workspace_bytes
    assert products.fits(nbytes) and not products.fits(nbytes - 1)

    plan = plan_on_meta(attend(is_causal=True), *heads(), device="a100")
    assert plan.workspace_bytes == 4 * 2 * 4 * 64 * 64
    assert "workspace" in str(plan)
    assert tr.planning.Plan.from_json(plan.to_json()).workspace_bytes == plan.workspace_bytes

    conv = on_meta(lambda: nn.Conv2d(4, 8, 3, bias=False))
    image = torch.empty(2, 4, 10, 10, device="meta")
    found = tr.estimate(lambda x: conv(x).sum(), image, device="mi300x").workspace_bytes
    read, written = 2 * 4 * 100 + 8 * 4 * 9 + 2 * 8 * 64, 8 * 4 * 9  # of the backward pass
    assert found == 4 * (read + written)
    for device, mib in (("mi300x", 76), ("b200", 32), ("t4", 8.125)):
        found = tr.estimate(lambda x, w: (x @ w).sum(), x, w, device=device)
        assert found.workspace_bytes == mib * 2**20


def test_a_workspace_that_the_user_chose(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = torch.empty(64, 64, device="meta", requires_grad=True)
    assert tr.estimate(lambda x: (x @ x).sum(), x, device="a100").workspace_bytes == 32 << 20
