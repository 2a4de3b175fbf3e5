"""Tiles in graphs that compilers run: in each way to compile, and beside what else there is."""

import copy
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import torchremat as tr
from tests.helpers import memory_profiler, peak_of
from torchremat.autodiff.tiles.tiled_op import (
    TileLayout,
    TileResult,
    run_tiles,
    split_products,
    tiled_p,
)
from torchremat.checkpoint_policies import from_plan
from torchremat.compile.lowering import lower_tile
from torchremat.compile.tile_calls import call_tiles, name_tiles
from torchremat.errors import BudgetError
from torchremat.graph.codegen import compile_graph
from torchremat.report.report import Report

CLASSES, WIDTH = 2048, 32
Step = Callable[..., Tensor]
Way = Callable[[nn.Module, object], Step]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Classifier(nn.Module):
    """A hidden layer, and logits that are most of what a step makes."""

    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), target.flatten(), label_smoothing=0.1)


def batch(length: int = 100) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(4 * length).view(4, length) * 7 % CLASSES
    return tokens, tokens.flip(0)


def wrapped(compile: str) -> Way:
    return lambda model, policy: tr.nn.wrap(model, policy, compile=compile)


def jitted(backend: str) -> Way:
    return lambda model, policy: tr.jit(tr.checkpoint(model, policy=policy), backend=backend)


def by_dynamo(codegen: str, **options: object) -> Way:
    def compile(model: nn.Module, policy: object) -> Step:
        chosen = {"policy": policy, "codegen": codegen, **options}
        return torch.compile(model, backend="torchremat", options=chosen)

    return compile


def under_inductor(model: nn.Module, policy: object) -> Step:
    return torch.compile(tr.checkpoint(model, policy=policy))


WAYS = {
    "wrap, inductor": wrapped("inductor"),
    "wrap, aot_eager": wrapped("aot_eager"),
    "jit, inductor": jitted("inductor"),
    "jit, aot_eager": jitted("aot_eager"),
    "dynamo, inductor": by_dynamo("inductor"),
    "dynamo, eager": by_dynamo("eager"),
    "PyTorch's inductor": under_inductor,
}


def each_of(*fast: str) -> pytest.MarkDecorator:
    """All ways, of which those that are not named wait for the slow tests."""
    ways = [
        pytest.param(way, id=name, marks=() if name in fast else pytest.mark.slow)
        for name, way in WAYS.items()
    ]
    return pytest.mark.parametrize("way", ways)


def train(run: Step, model: nn.Module, *args: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = run(*args)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6 * b.abs().max().item())


def train_both(
    way: Way, policy: object, *lengths: int, breaks: bool = False
) -> tuple[list[int], int]:
    """The peak of each step, which has the gradients of plain PyTorch, and that of a plain one."""
    model = Classifier()
    model.breaks = breaks
    plain = copy.deepcopy(model)
    run, peaks = way(model, policy), []
    for length in lengths:
        args = batch(length)
        expected, usual = peak_of(lambda args=args: train(plain, plain, *args))
        found, peak = peak_of(lambda args=args: train(run, model, *args))
        assert_close(found, expected)
        peaks.append(peak)
    return peaks, usual


@each_of("wrap, aot_eager", "dynamo, inductor", "dynamo, eager")
def test_a_step_keeps_within_a_budget(way):
    peaks, plain = train_both(way, "budget:15%+tile", 100, 100)
    assert peaks[-1] <= 0.15 * plain


@each_of("dynamo, eager")
def test_lengths_change(way):
    """Inductor compiles for each length, or for a symbol; the last tile is always smaller."""
    peaks, plain = train_both(way, "budget:20%+tile", 100, 75, 115, 100)
    assert peaks[-1] <= 0.25 * plain  # that of the largest step


class ClassesSecond(Classifier):
    """Scores of sequences with the classes in their second dim, as those of images have them."""

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.down(F.gelu(self.up(self.embedding(tokens))))))
        return F.cross_entropy(self.head(x).transpose(1, 2), target)


@each_of("wrap, aot_eager", "dynamo, inductor")
def test_classes_in_the_second_dim(way):
    model = ClassesSecond()
    plain = copy.deepcopy(model)
    run = way(model, "budget:20%+tile")
    for _ in range(2):
        expected, usual = peak_of(lambda: train(plain, plain, *batch()))
        found, peak = peak_of(lambda: train(run, model, *batch()))
        assert_close(found, expected)
    assert peak <= 0.2 * usual


@pytest.mark.parametrize("name", ["wrap, aot_eager", "jit, aot_eager", "dynamo, eager"])
def test_tiles_have_the_bits_of_eager_mode(name):
    model, args = Classifier(), batch()
    expected = train(tr.checkpoint(model, policy="budget:20%+tile"), model, *args)
    found = train(WAYS[name](model, "budget:20%+tile"), model, *args)
    assert all(map(torch.equal, found, expected))


@each_of("wrap, aot_eager")
def test_a_plan_runs(way):
    model, args = Classifier(), batch()
    plan = tr.plan(model, *args, budget="15%", tile=True)
    assert plan.tiling is not None
    plain = copy.deepcopy(model)
    run = way(model, from_plan(plan))
    found, peak = peak_of(lambda: train(run, model, *args))
    assert_close(found, train(plain, plain, *args))
    assert peak <= 0.2 * plan.baseline.peak_bytes  # a compiler orders operators otherwise


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_graph_breaks_divide_a_budget(codegen):
    way = by_dynamo(codegen)
    peaks, plain = train_both(way, "budget:15%+tile", 100, 100, 100, breaks=True)
    assert max(peaks[1:]) <= 0.15 * plain


@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_searched_budgets_over_graph_breaks(codegen):
    way = by_dynamo(codegen)
    with pytest.raises(BudgetError):
        train_both(way, "budget:15%", 100, breaks=True)
    peaks = []
    for budget in ("least+tile", "15%+tile", "time:+10%+tile"):
        torch._dynamo.reset()
        found, plain = train_both(way, f"budget:{budget}", 100, 100, breaks=True)
        peaks.append(found[-1])
    assert peaks[0] < peaks[1] <= 0.15 * plain < peaks[2] / 2  # a time takes no tiles


def test_autocast():
    model, args = Classifier(), batch()
    plain = copy.deepcopy(model)
    run = WAYS["dynamo, eager"](model, "budget:20%+tile")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = train(run, model, *args), train(plain, plain, *args)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.03 * b.abs().max().item())


def test_a_report_and_no_warning():
    reports: list[Report] = []
    model, args = Classifier(), batch()
    run = by_dynamo("eager", report=reports.append)(model, "budget:20%+tile")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run, model, *args)
    (report,) = reports
    tiled = [row for row in report.rows if "tiled" in row.op]
    assert {tuple(row.shape) for row in tiled} == {(400, WIDTH), (CLASSES, WIDTH)}


def operators_of(run: Step, model: nn.Module, *args: Tensor) -> set[str]:
    train(run, model, *args)
    with memory_profiler() as profiler:
        train(run, model, *args)
    return {event.name for event in profiler.events()}


@pytest.mark.slow
def test_inductor_compiles_what_runs_in_a_tile():
    model = Classifier()
    run = WAYS["wrap, inductor"](model, "budget:20%+tile")
    whole, odd = (operators_of(run, model, *batch(length)) for length in (100, 101))
    assert "torchremat::call_tiles" in whole & odd
    assert "aten::_log_softmax" not in whole
    assert "aten::_log_softmax" in odd  # the last tile has fewer rows


def body() -> fx.GraphModule:
    """A function whose first result has rows; the others are sums over all tiles.

    The last lies in memory as its transpose does: a compiled graph takes results to be contiguous.
    """

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.mm(x, w)
        return y.t(), y.sum(), torch.mm(x.t(), y), torch.mm(y.t(), x).t()

    with torch._subclasses.FakeTensorMode():
        return make_fx(function)(torch.empty(3, 4), torch.empty(4, 5))


LAYOUT = TileLayout(
    3,
    ((0,), None),
    (TileResult("rows", 1), TileResult("sum"), TileResult("product"), TileResult("sum")),
)


@pytest.mark.parametrize("rows", [9, 8, 1, 0])
def test_the_operator_of_a_compiled_graph(rows):
    """Its fake results say how real ones lie in memory; `opcheck` is PyTorch's own test of that."""
    root = fx.GraphModule(nn.Module(), fx.Graph())
    root.add_submodule("body", body())
    graph = root.graph
    x, w = graph.placeholder("x"), graph.placeholder("w")
    graph.output((graph.call_function(tiled_p, (graph.get_attr("body"), LAYOUT, x, w)),))
    named = name_tiles(root, lower_tile)
    (call,) = named.graph.find_nodes(op="call_function", target=call_tiles)
    assert not named.graph.find_nodes(op="get_attr")
    assert name_tiles(named, lower_tile) is named
    operands = [torch.randn(rows, 4), torch.randn(4, 5)]
    expected = run_tiles(compile_graph(split_products(body(), LAYOUT)), LAYOUT, operands)
    torch.testing.assert_close(call_tiles(call.args[0], operands), list(expected))
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(call_tiles, (call.args[0], operands), test_utils=checks)


@pytest.mark.slow
def test_the_cache_on_disk_of_another_process(tmp_path):
    """A graph calls its tiles by a name that another process does not have."""
    script = """
        import torch
        from tests.compile.test_compiled_tiles import Classifier, WAYS, batch, train
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = Classifier()
            train(WAYS["dynamo, inductor"](model, "budget:20%+tile"), model, *batch())
    """
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }
    for _ in range(2):
        root = Path(__file__).parents[2]
        command = [sys.executable, "-c", textwrap.dedent(script)]
        subprocess.run(command, check=True, cwd=root, env=env)
