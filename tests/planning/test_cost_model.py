"""The cost model: operations as PyTorch counts them, bytes by hand, what is kept on disk."""

import copy
import json
import logging
import math
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import torchremat as tr
from torchremat.autodiff.bodies import FunctionBody
from torchremat.autodiff.joint import TraceOptions, trace_joint
from torchremat.planning import CostModel, cost_model
from torchremat.planning.cost_model import measure
from torchremat.planning.costs import measured_rates, op_timer
from torchremat.planning.costs.device_rates import KNOWN_DEVICES, Rates, rates_of
from torchremat.planning.costs.op_signature import OpSignature
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths

aten = torch.ops.aten
# one operation or byte a second, and no time to launch
UNIT = Rates("unit", *[1.0] * 8, launch_seconds=1e-30, compute_fraction=1.0, memory_fraction=1.0)
CPU = CostModel.of("cpu")
H100 = CostModel.of("h100")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Measurements are kept in a folder of the test's own."""
    monkeypatch.setenv("TORCHREMAT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def node_of(op, *args, **kwargs) -> fx.Node:
    """A node that calls `op` on inputs of a graph, with what it gives on the meta device."""
    graph = fx.Graph()

    def placed(value):
        if isinstance(value, list):
            return [placed(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) not in inputs:
            inputs[id(value)] = graph.placeholder("x")
            inputs[id(value)].meta["val"] = value
        return inputs[id(value)]

    inputs = {}
    node = graph.call_function(
        op, tuple(map(placed, args)), {n: placed(a) for n, a in kwargs.items()}
    )
    node.meta["val"] = op(*args, **kwargs)
    return node


def meta(*shape, dtype=torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def nodes_of(fun, *args, with_gradients=True) -> list[fx.Node]:
    """The nodes of the joint graph of `fun`."""
    specs = [InputSpec.of(arg) for arg in args]
    body = FunctionBody(lambda: lambda tensors: [fun(*tensors)], specs)
    names = [f"arg{i}" for i in range(len(args))]
    joint, _ = trace_joint(body, specs, names, ModulePaths({}), TraceOptions(with_gradients))
    return list(joint.module.graph.nodes)


def graph_of(fun, *args) -> list[fx.Node]:
    return list(tr.make_graph(fun)(*args).graph_module.graph.nodes)


def total(of, nodes):
    return sum(map(of, nodes))


# --- operations ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, math_attention):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.math_attention = math_attention

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, 4).permute(2, 0, 3, 1, 4)
        if self.math_attention:
            a = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, 16))
        return x + self.mlp(self.norm(x))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm, self.depthwise = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8)
        self.up, self.line = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv1d(4, 2, 3)

    def forward(self, x):
        x = self.norm(self.down(x)).relu()
        x = self.up(self.depthwise(F.max_pool2d(x, 2)))
        return self.line(x.flatten(2)).tanh()


# the kernel of attention for CPUs has no formula in PyTorch; it computes what the others do
CPU_ATTENTION = {
    getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}"): flop_registry[
        getattr(aten, f"_scaled_dot_product_flash_attention{suffix}")
    ].__wrapped__
    for suffix in ("", "_backward")
}
MODELS = {
    "gpt": (lambda: nn.Sequential(Block(False), Block(False)), (2, 8, 16)),
    "math attention": (lambda: Block(True), (2, 8, 16)),
    "convolutions": (Convolutions, (2, 3, 16, 16)),
    "mlp in float64": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double(), (5, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_step_are_those_that_pytorch_counts_when_it_runs(name):
    make, shape = MODELS[name]
    model = make()
    x = torch.randn(shape, dtype=next(model.parameters()).dtype, requires_grad=True)
    flops = total(H100.flops, nodes_of(lambda x: model(x).sum(), x))
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        model(x).sum().backward()
    assert flops == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ((8, 16), (4, 16, 24), 2 * 8 * 16 * 24),
        ((4, 8, 16), (16, 24), 2 * 8 * 16 * 24),
        ((8, 16), (16, 24), 2 * 8 * 16 * 24),
        ((4, 8, 16), (4, 16, 24), 2 * 4 * 8 * 16 * 24),
    ],
)
def test_flops_of_a_grouped_product_are_those_of_its_groups(a, b, flops):
    a, b = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in (a, b))
    ends = None if a.dim() == b.dim() == 3 else torch.empty(4, device="meta", dtype=torch.int32)
    assert H100.flops(node_of(aten._grouped_mm.default, a, b, ends)) == flops


def test_flops_of_kernels_for_gpus_are_counted_on_the_meta_device():
    q = meta(2, 4, 16, 8, dtype=torch.bfloat16)
    node = node_of(aten._scaled_dot_product_flash_attention.default, q, q, q)
    assert H100.flops(node) == 2 * 2 * (2 * 4) * 16 * 16 * 8
    lengths = meta(3, dtype=torch.int32)
    packed = meta(32, 4, 8, dtype=torch.bfloat16)
    args = (packed, packed, packed, lengths, lengths, 16, 16, 0.0, False, False)
    assert H100.flops(node_of(aten._flash_attention_forward.default, *args)) == H100.flops(node)


def test_a_formula_that_fails_counts_nothing(monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("no formula for this")

    monkeypatch.setitem(flop_registry, aten.mm, broken)
    node = node_of(aten.mm.default, meta(11, 13), meta(13, 17))
    assert H100.flops(node) == 0
    assert H100.seconds(node) > 0


def test_bodies_of_operators_are_counted_as_often_as_they_run():
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    mm = 2 * 4**3
    checkpointed = graph_of(tr.checkpoint(lambda x, w: (x @ w @ w).sin()), x, w)
    assert total(CPU.flops, checkpointed) == 2 * mm

    def chosen(x, w):
        return torch.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, (x,))

    assert total(CPU.flops, graph_of(chosen, x, w)) == 2 * mm

    def scanned(x, w):
        from torch._higher_order_ops.scan import scan

        return scan(lambda c, a: (c @ w, c + a), x, torch.ones(7, 4, 4))[0]

    nodes = graph_of(scanned, x, w)
    assert total(CPU.flops, nodes) == 7 * mm
    assert total(CPU.bytes_moved, nodes) >= 7 * (3 + 3) * 64
    assert total(CPU.seconds, nodes) > 7 * 2 * CPU.rates.launch_seconds


def test_symbolic_sizes_have_the_values_of_the_trace_and_no_guard_is_added():
    graph = make_fx(lambda x, w: (x @ w).exp().sum(0), tracing_mode="symbolic")(
        torch.ones(6, 3), torch.ones(3, 5)
    ).graph
    (mm,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    shapes = mm.meta["val"].shape[0].node.shape_env
    guards = len(shapes.guards)
    assert CPU.flops(mm) == 2 * 6 * 5 * 3
    assert [CPU.bytes_moved(n) // 4 for n in graph.nodes if CPU.seconds(n)] == [
        6 * 3 + 3 * 5 + 6 * 5, 2 * 6 * 5, 6 * 5 + 5,
    ]  # fmt: skip
    assert len(shapes.guards) == guards


# --- bytes ---------------------------------------------------------------------------------------

x, w, row = meta(4, 8), meta(8, 2), meta(8)
table, places = meta(1000, 8), meta(4, dtype=torch.int64)
BYTES = {
    "a product": (aten.mm.default, (x, w), (32 + 16 + 8) * 4),
    "one input twice": (aten.mul.Tensor, (x, x), (32 + 32) * 4),
    "a row to each row": (aten.add.Tensor, (x, row), (32 + 8 + 32) * 4),
    "an expanded row": (aten.add.Tensor, (x, row.expand(4, 8)), (32 + 8 + 32) * 4),
    "windows that overlap": (aten.clone.default, (row.unfold(0, 4, 1),), (8 + 20) * 4),
    "a comparison": (aten.gt.Scalar, (x, 0), 32 * 4 + 32),
    "a cast": (aten._to_copy.default, (x,), 32 * 4 + 32 * 2, {"dtype": torch.bfloat16}),
    "a list": (aten.cat.default, ([x, x, row.view(1, 8)],), (32 + 8) * 4 + 72 * 4),
    "outputs": (aten.aminmax.default, (x,), (32 + 2) * 4),
    "a sum": (aten.sum.default, (x,), (32 + 1) * 4),
    "rows of a table": (aten.embedding.default, (table, places), 32 * 4 + 4 * 8 + 32 * 4),
    "targets of a loss": (
        aten.nll_loss_forward.default, (table, meta(1000, dtype=torch.int64), None, 1, -100),
        1000 * 8 + 1000 * 8 + 2 * 4,
    ),
    "zeros of a shape": (aten.zeros_like.default, (x,), 32 * 4),
    "draws of a shape": (aten.bernoulli.p, (x, 0.5), 32 * 4),
    "draws of probabilities": (aten.bernoulli.default, (x,), 2 * 32 * 4),
    "zeros": (aten.zeros.default, ([4, 8],), 32 * 4, {"device": "meta"}),
    "memory": (aten.empty.memory_format, ([4, 8],), 0, {"device": "meta"}),
    "in place": (aten.add_.Tensor, (x, x.clone()), 3 * 32 * 4),
    "a copy": (aten.copy_.default, (x, row), (32 + 8) * 4),
    "a fill": (aten.fill_.Scalar, (x, 1.0), 32 * 4),
    "many in place": (aten._foreach_mul_.Scalar, ([x, row], 2.0), 2 * (32 + 8) * 4),
    "out": (aten.mm.out, (x, w), (32 + 16 + 8) * 4, {"out": meta(4, 2)}),
    "nothing": (aten.add.Tensor, (meta(0, 8), meta(0, 8)), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_what_is_read_once_and_written(name):
    op, args, nbytes, *kwargs = BYTES[name]
    node = node_of(op, *args, **(kwargs[0] if kwargs else {}))
    assert CPU.bytes_moved(node) == nbytes
    assert 0 < CPU.seconds(node) < 1


@pytest.mark.parametrize(
    "op", [aten.t.default, aten.detach.default, aten.alias.default, aten._unsafe_view.default]
)
def test_views_and_identities_cost_nothing(op):
    args = (x, [32]) if op is aten._unsafe_view.default else (x,)
    node = node_of(op, *args)
    costs = [(m.flops(node), m.bytes_moved(node), m.seconds(node)) for m in (CPU, H100.fused())]
    assert costs == [(0, 0, 0)] * 2


def test_what_is_no_operator_on_tensors_costs_nothing():
    nodes = graph_of(lambda x: x.split(2)[0].aminmax(), torch.ones(4))
    costly = [node.target for node in nodes if CPU.seconds(node)]
    assert costly == [aten.aminmax.default]
    assert CPU.seconds(node_of(aten._assert_async.default, meta(1))) == 0


# --- seconds -------------------------------------------------------------------------------------


def test_an_operator_takes_as_long_as_its_operations_or_its_bytes():
    mm = node_of(aten.mm.default, meta(64, 64), meta(64, 64))
    add = node_of(aten.add.Tensor, meta(64, 64), meta(64, 64))
    assert CostModel.of(UNIT).seconds(mm) == 2 * 64**3
    assert CostModel.of(UNIT).seconds(add) == 3 * 64 * 64 * 4
    slow = replace(UNIT, launch_seconds=1e9)
    assert CostModel.of(slow).seconds(add) == 1e9, "a GPU runs while the next is launched"
    waits = CostModel.of(replace(slow, runs_ahead=False))
    assert waits.seconds(add) == 1e9 + 3 * 64 * 64 * 4
    halves = CostModel.of(replace(UNIT, compute_fraction=0.5, memory_fraction=0.25))
    assert halves.seconds(mm) == 2 * 2 * 64**3
    assert halves.seconds(add) == 4 * 3 * 64 * 64 * 4


def test_products_take_the_rate_of_their_dtype():
    def seconds(dtype, model=H100):
        a = meta(512, 512, dtype=dtype)
        return model.seconds(node_of(aten.mm.default, a, a))

    tf32 = replace(H100, tf32_matmuls=True)
    assert seconds(torch.bfloat16) == seconds(torch.float16) < seconds(torch.float32)
    assert seconds(torch.float32) <= seconds(torch.float64) < seconds(torch.complex128)
    assert seconds(torch.float32, tf32) < seconds(torch.float32) < seconds(torch.complex64)
    image, weight = meta(8, 64, 32, 32), meta(64, 64, 3, 3)
    convolution = node_of(
        aten.convolution.default, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )
    assert tf32.tf32_convolutions, "PyTorch's default"
    exact = replace(tf32, tf32_convolutions=False)
    assert tf32.seconds(convolution) < exact.seconds(convolution)


def test_what_pytorch_is_told_of_tf32_is_read_when_a_model_is_made():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert CostModel.of("a100").tf32_matmuls
    finally:
        torch.set_float32_matmul_precision(before)
    assert not CostModel.of("a100").tf32_matmuls


@pytest.mark.parametrize("model", [CPU, H100, CPU.fused(), H100.fused()], ids=str)
def test_every_cost_is_finite_and_none_is_negative(model):
    gpt, (batch, *_) = MODELS["gpt"]
    block = gpt()
    nodes = nodes_of(lambda x: F.dropout(block(x)).sort(-1)[0].sum(), torch.randn(batch, 8, 16))
    nodes += nodes_of(lambda x: torch.linalg.inv(x @ x.mT).sum(), torch.randn(3, 4, 4))
    for node in nodes:
        costs = model.seconds(node), model.flops(node), model.bytes_moved(node)
        assert all(math.isfinite(cost) and cost >= 0 for cost in costs), node


def test_a_transfer_takes_the_link_to_the_host():
    assert CPU.transfer_seconds(100) is None
    linked = CostModel.of(replace(UNIT, host_bytes_per_second=50.0))
    assert linked.transfer_seconds(100) == 2.0


# --- with a compiler -----------------------------------------------------------------------------


def fused_bytes(fun, *args):
    """Bytes by operator, as a compiler moves them."""
    found = {str(n.target): CPU.fused().bytes_moved(n) for n in graph_of(fun, *args)}
    return {name.split(".")[1]: nbytes for name, nbytes in found.items() if "aten" in name}


def test_what_fuses_into_its_consumers_is_neither_written_nor_read_nor_launched():
    a, b = torch.ones(100), torch.ones(100)
    assert fused_bytes(lambda a, b: (a.exp() * b).sum(), a, b) == {
        "exp": 400, "mul": 400, "sum": 4,
    }  # fmt: skip
    exp, *_ = (n for n in graph_of(lambda a: a.exp().sin(), a) if n.op == "call_function")
    assert 0 < CPU.fused().seconds(exp) < CPU.rates.launch_seconds < CPU.seconds(exp)


def test_fusion_sees_through_views_and_stops_at_products_and_outputs():
    a = torch.ones(10, 10)
    assert fused_bytes(lambda a: a.exp().t().unsqueeze(0).sin(), a) == {
        "exp": 400, "t": 0, "unsqueeze": 0, "sin": 400,
    }  # fmt: skip
    assert fused_bytes(lambda a: a.exp() @ a.cos(), a) == {"exp": 800, "cos": 800, "mm": 1200}
    assert fused_bytes(lambda a: (y := a.exp(), y.sin()), a) == {"exp": 800, "sin": 800}
    assert fused_bytes(lambda a: a.sort()[0].sin(), a)["sin"] == 800


def test_what_runs_again_of_a_normalisation_is_pointwise():
    a = torch.ones(10, 10)
    assert fused_bytes(lambda a: a.softmax(0).sin(), a) == {"_softmax": 400, "sin": 400}
    assert fused_bytes(lambda a: a.softmax(0) @ a, a)["_softmax"] == 800
    norm = torch.nn.LayerNorm(10, elementwise_affine=False)
    assert fused_bytes(lambda a: norm(a).sin(), a) == {"native_layer_norm": 400, "sin": 400}
    nodes = graph_of(lambda a: norm(a).sin(), a)
    call = next(n for n in nodes if "layer_norm" in str(n.target))
    assert CPU.fused().seconds(call) < CPU.seconds(call)


def test_a_fused_model_costs_no_more():
    block = Block(True)
    nodes = nodes_of(lambda x: block(x).sum(), torch.randn(2, 8, 16))
    assert total(H100.fused().bytes_moved, nodes) < total(H100.bytes_moved, nodes)
    assert all(H100.fused().seconds(node) <= H100.seconds(node) for node in nodes)
    assert total(H100.fused().flops, nodes) == total(H100.flops, nodes)


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("rtx5090", "5090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Apple M1 Max", "m1-max"),
        ("cpu", "cpu"),
        (torch.device("cpu"), "cpu"),
    ],
)
def test_devices_are_known_by_the_names_that_pytorch_gives_them(name, device):
    assert rates_of(name) is KNOWN_DEVICES[device]
    assert CostModel.of(name).rates is KNOWN_DEVICES[device]


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_each_known_device_is_found_by_its_own_names_and_makes_sense(name):
    rates = KNOWN_DEVICES[name]
    assert rates_of(name) is rates
    if name not in ("cpu", "generic-gpu", "mi250x"):
        assert rates_of(rates.name) is rates
    assert rates.matmul_f64 <= rates.matmul_f32 <= rates.matmul_tf32 <= rates.matmul_f16
    assert rates.matmul_f16 <= rates.matmul_f8 or name == "v100"
    assert 1 < rates.matmul_f16 / rates.bytes_per_second < 1000


def test_no_device_means_this_machine():
    here = CostModel.of(None)
    assert here == CostModel.of("meta") == CostModel.of(torch.device("meta")) == CostModel.of()
    if not torch.accelerator.is_available():
        assert here == CPU
    assert CostModel.of(here) is here


def test_a_gpu_that_nobody_knows_is_said_to_be_like_another(caplog):
    with caplog.at_level(logging.WARNING, "torchremat"):
        assert rates_of("NVIDIA Foo 9") is rates_of("NVIDIA Foo 9") is KNOWN_DEVICES["generic-gpu"]
    (record,) = caplog.records
    assert "no rates of the device 'NVIDIA Foo 9'" in record.message
    assert "measure(device)" in record.message


def test_names_of_no_device_are_refused():
    with pytest.raises(ValueError, match="'h1000' is not a known device; nearest: 'h100'"):
        CostModel.of("h1000")
    with pytest.raises(TypeError, match=r"3 \(int\) is not a device: .* or another CostModel"):
        CostModel.of(3)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
@pytest.mark.parametrize("of", [CostModel.of, CostModel.profiled, measure])
def test_a_device_that_is_not_here_is_refused(of):
    with pytest.raises(RuntimeError, match="'cuda:1' is not in this machine.*name it: 'h100'"):
        of("cuda:1")


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", None])
@pytest.mark.parametrize("rate", ["matmul_f32", "bytes_per_second", "launch_seconds"])
def test_rates_are_positive(rate, value):
    with pytest.raises(ValueError, match=f"'unit' have {rate}={value!r}: each rate is a positive"):
        replace(UNIT, **{rate: value})


def test_fractions_are_at_most_one():
    with pytest.raises(ValueError, match=r"memory_fraction=1.5"):
        replace(UNIT, memory_fraction=1.5)


# --- models are values ---------------------------------------------------------------------------


def test_models_hash_compare_copy_and_pickle():
    models = [CPU, H100, CPU.fused(), CostModel.profiled("cpu"), CostModel.of(UNIT)]
    assert len(set(models)) == 5
    for model in models:
        model.seconds(node_of(aten.exp.default, meta(3)))
        copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
        assert [model] * 2 == copies
        assert {hash(model)} == set(map(hash, copies))
    assert repr(CPU.fused()) == "CostModel('a CPU of eight cores', fuses=True)"


# --- measured rates ------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """Makes measuring instant, and tells how often it happened."""
    calls = []

    def measure_rates(device):
        calls.append(device)
        return replace(UNIT, name=f"measurement {len(calls)}")

    monkeypatch.setattr(measured_rates, "measure_rates", measure_rates)
    return calls


def test_rates_are_measured_within_reason():
    model = measure("cpu")
    rates = model.rates
    assert rates.name.endswith("measured")
    assert 1e8 < rates.matmul_f64 <= 2 * rates.matmul_f32 < 1e15
    assert 1e8 < rates.bytes_per_second < 1e13
    assert 1e-8 < rates.launch_seconds < 1e-2
    assert measure("cpu") == model, "it is kept"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rates_of_a_gpu_are_measured_within_those_of_its_data_sheet():
    measured, sheet = measure("cuda").rates, rates_of("cuda")
    assert 0.3 * sheet.matmul_f16 < measured.matmul_f16 < 1.05 * sheet.matmul_f16
    assert 0.5 * sheet.bytes_per_second < measured.bytes_per_second < sheet.bytes_per_second
    assert measured.host_bytes_per_second is not None
    node = node_of(aten.mm.default, meta(256, 256), meta(256, 256))
    assert CostModel.profiled("cuda").seconds(node) > 0


def test_rates_are_measured_once_by_device_and_version(measured, folder, monkeypatch):
    assert measure("cpu").rates.name == measure("cpu").rates.name == "measurement 1"
    assert measure("cpu", again=True).rates.name == "measurement 2"
    assert measure("cpu").rates.name == "measurement 2"
    (file,) = folder.iterdir()
    assert file.name.startswith("rates-")
    assert torch.__version__.split("+")[0] in file.name
    monkeypatch.setattr(measured_rates, "label_of", lambda device: "another CPU")
    assert measure("cpu").rates.name == "measurement 3"
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert measure("cpu").rates.name == "measurement 4"
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"version": 1}', '{"version": 1, "rates": {"name": "x"}}', "\xff"],
)
def test_a_file_that_is_damaged_is_measured_again(measured, folder, caplog, text):
    measure("cpu")
    (file,) = folder.iterdir()
    file.write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING, "torchremat"):
        assert measure("cpu").rates.name == "measurement 2"
    (record,) = caplog.records
    assert "measured again" in record.message
    assert measure("cpu").rates.name == "measurement 2", "it is whole again"


def test_a_file_with_rates_that_cannot_be_is_damaged(measured, folder, caplog):
    measure("cpu")
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())
    kept["rates"]["matmul_f32"] = -1.0
    file.write_text(json.dumps(kept))
    assert measure("cpu").rates.name == "measurement 2"
    assert "matmul_f32=-1.0" in caplog.text
    kept["version"] = 0
    file.write_text(json.dumps(kept))
    assert measure("cpu").rates.name == "measurement 3", "another version is no damage"
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_written_is_said_and_no_more(measured, folder, caplog):
    folder.write_text("a file where the folder should be")
    assert measure("cpu").rates.name == "measurement 1"
    assert "rates cannot be kept" in caplog.text
    model = CostModel.profiled("cpu")
    assert model.seconds(node_of(aten.exp.default, meta(4))) > 0
    assert "times cannot be kept" in caplog.text


def test_nothing_is_measured_on_the_meta_device():
    with pytest.raises(ValueError, match="nothing runs on the device 'meta'.*measure 'cpu'"):
        measure("meta")


def test_measuring_leaves_pytorch_as_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.get_float32_matmul_precision()
    measure("cpu", again=True)
    CostModel.profiled("cpu").seconds(node_of(aten.bernoulli.p, meta(8), 0.5))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_float32_matmul_precision() == before[1]


# --- measured operators --------------------------------------------------------------------------


@pytest.fixture
def timed(monkeypatch, measured):
    """Operators take a second an element of what they give; tells how often they were timed."""
    calls = []

    def time_call(call, device, **options):
        calls.append(call())
        leaves = calls[-1] if isinstance(calls[-1], tuple | list) else [calls[-1]]
        return float(sum(leaf.numel() for leaf in leaves))

    monkeypatch.setattr(op_timer, "time_call", time_call)
    return calls


def test_operators_are_run_once_and_kept(timed, folder):
    def seconds(n):
        return CostModel.profiled("cpu").seconds(node_of(aten.exp.default, meta(n)))

    assert [seconds(n) for n in (2, 3, 2, 3)] == [2.0, 3.0, 2.0, 3.0]
    assert len(timed) == 2, "other models read what is on disk"
    (file,) = folder.glob("operators-*")
    file.write_text(file.read_text() + "damage\n[1]\n" + json.dumps(["x", -1]) + "\n")
    assert [seconds(n) for n in (2, 3)] == [2.0, 3.0]
    assert len(timed) == 2


def test_operators_are_run_as_they_are_called(timed):
    model = CostModel.profiled("cpu")
    inputs = {
        "a transposed input": (aten.clone.default, (meta(3, 4).t(),)),
        "an expanded input": (aten.add.Tensor, (meta(4, 1).expand(4, 3), 1)),
        "a list": (aten.cat.default, ([meta(2, 3), meta(2, 3)],)),
        "indices": (aten.embedding.default, (meta(5, 12), meta(1, dtype=torch.int64))),
        "a mask": (aten.where.self, (meta(12, dtype=torch.bool), meta(12), meta(12))),
        "complex numbers": (aten.exp.default, (meta(12, dtype=torch.complex64),)),
        "bytes": (aten.bitwise_not.default, (meta(12, dtype=torch.uint8),)),
    }
    for name, (op, args) in inputs.items():
        node = node_of(op, *args)
        assert model.seconds(node) == 12.0, name
        assert timed[-1].dtype == node.meta["val"].dtype
        assert timed[-1].stride() == node.meta["val"].stride()
        assert not timed[-1].isnan().any() if timed[-1].dtype.is_floating_point else True
    device = node_of(aten.zeros.default, [12], device=torch.device("meta"))
    assert model.seconds(device) == 12.0
    assert timed[-1].device.type == "cpu"
    node = node_of(aten.native_dropout.default, meta(6), 0.5, True)
    assert model.seconds(node) == 12.0
    assert model.seconds(node_of(aten.t.default, meta(3, 4))) == 0, "views are not timed"


def test_operators_in_bodies_are_timed(timed):
    nodes = graph_of(tr.checkpoint(lambda x: x.sin().cos()), torch.ones(5))
    assert total(CostModel.profiled("cpu").seconds, nodes) == 10.0


def test_operators_are_timed_inside_a_trace(timed):
    node = node_of(aten.exp.default, meta(7))
    seen = []

    def f(x):
        with torch.autocast("cpu"):
            seen.append(CostModel.profiled("cpu").seconds(node))
        return x.sin()

    nodes = graph_of(f, torch.ones(3))
    assert seen == [7.0]
    assert [n.target for n in nodes if n.op == "call_function"] == [aten.sin.default]
    assert type(timed[0]) is Tensor


@torch.library.custom_op("torchremat_test_cost::refuses", mutates_args=())
def refuses(x: Tensor) -> Tensor:
    raise RuntimeError("not on random data")


refuses.register_fake(torch.empty_like)


def test_what_cannot_be_run_is_estimated_and_said_once(timed, caplog, monkeypatch):
    model = CostModel.profiled("cpu")
    roofline = replace(model, timer=None)
    caplog.set_level(logging.DEBUG, "torchremat")
    nodes = {
        "not on random data": node_of(torch.ops.torchremat_test_cost.refuses.default, meta(4)),
        "no index is in range": node_of(aten.add.Tensor, meta(0), meta(0)),
        "bytes are free|are free": node_of(aten.exp.default, meta(4, 5)),
    }
    monkeypatch.setattr(op_timer, "_free_bytes", lambda device: 4 * 32)
    for reason, node in nodes.items():
        caplog.clear()
        assert model.seconds(node) == model.seconds(node) == roofline.seconds(node)
        if "range" not in reason:  # no bytes, no work
            (record,) = caplog.records
            assert reason.split("|")[-1] in record.message
    assert not timed


def test_fused_operators_are_estimated_and_the_others_timed(timed):
    model = CostModel.profiled("cpu").fused()
    exp, mm = (
        n for n in graph_of(lambda x: x.exp().t() @ x, torch.ones(3, 3)) if model.flops(n) or
        n.target is aten.exp.default
    )  # fmt: skip
    assert model.seconds(mm) == model.seconds(exp) == 9.0, "exp is written: mm reads it"
    sin, cos = (n for n in graph_of(lambda x: x.sin().cos(), torch.ones(4)) if CPU.seconds(n))
    assert model.seconds(cos) == 4.0
    assert model.seconds(sin) == replace(model, timer=None).seconds(sin) == 4 * 15.0


def test_the_time_of_a_call_is_the_median_of_rounds_that_are_long_enough(monkeypatch):
    now = [0.0]
    costs = iter([100.0, 1e-3, 5e-3, 2e-3, 4e-3, 3e-3])

    def call():
        now[0] += next(costs)

    monkeypatch.setattr(measured_rates, "clock", lambda: now[0])
    device = torch.device("cpu")
    assert measured_rates.time_call(call, device) == pytest.approx(3e-3), "the first does not count"
    costs = iter([0.0] + [1e-6] * 10_000)
    assert measured_rates.time_call(call, device) == pytest.approx(1e-6)
    costs = iter([0.0, 1.0, 2.0])
    assert measured_rates.time_call(call, device) == 1.0, "patience has an end"


def test_calls_that_are_alike_are_one():
    nodes = graph_of(lambda x, y: ((x @ y).exp(), (y @ x).exp()), *[torch.ones(3, 3)] * 2)
    calls = {OpSignature.of(n) for n in nodes if n.op == "call_function"}
    assert len(calls) == 2
    assert cost_model.work_of(next(iter(calls))) is cost_model.work_of(next(iter(calls)))


def test_rates_are_saved_shared_and_loaded(tmp_path):
    """A measured model plans on a machine that lacks the device, by the same times."""
    rates = replace(KNOWN_DEVICES["h100"], name="NVIDIA H100 80GB HBM3, measured", pointwise=1e13)
    model = CostModel.of(rates)
    model.save(tmp_path / "h100.json")
    assert CostModel.load(str(tmp_path / "h100.json")) == model

    x = torch.empty(64, 64, device="meta", requires_grad=True)
    step = lambda x: torch.nn.functional.dropout(x.sin(), 0.5).exp().sum()  # noqa: E731
    plans = [
        tr.plan(step, x, budget="100%", cost_model=cost_model)
        for cost_model in (model, CostModel.load(tmp_path / "h100.json"))
    ]
    assert plans[0].to_json() == plans[1].to_json()
    assert "native_dropout" in str(plans[0].forward_graph.graph)  # an H100, by its name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "has no rates of a device"),
        ("{}", "has no rates of a device .'version'."),
        ('{"version": 1, "rates": {"name": "a"}}', "missing 9 required positional arguments"),
        ('{"version": 1, "rates": 7}', "has no rates of a device"),
        ("[]", "measure.'cuda'..save"),
    ],
)
def test_a_file_without_rates_is_refused(tmp_path, text, message):
    (tmp_path / "rates.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        CostModel.load(tmp_path / "rates.json")


def test_rates_of_another_version_are_refused(tmp_path):
    path = tmp_path / "rates.json"
    CostModel.of("h100").save(path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
    with pytest.raises(ValueError, match="rates of version 0"):
        CostModel.load(path)
    path.write_text(path.read_text().replace("3350000000000.0", "-1").replace(": 0", ": 1"))
    with pytest.raises(ValueError, match="bytes_per_second=-1"):
        CostModel.load(path)
    with pytest.raises(FileNotFoundError):
        CostModel.load(tmp_path / "nothing.json")
