"""Operators that run repeatedly in a graph for a compiler."""

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compile.dynamo.steps import peak_of_second
from torchremat.compile.dynamo.scheduled_joint import Run, may_fuse, merge_within_runs

aten = torch.ops.aten


def mark(node: fx.Node, run: Run) -> None:
    node.meta["custom"] = {"torchremat_run": run}


def normalised_twice(dim: list[int], *, reads_mean: bool) -> fx.Graph:
    """A forward pass, the same once more, and a backward pass that reads the mean, or not."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for _ in range(2):
            var, mean = torch.var_mean(x, dim, keepdim=True)
            results.append((x - mean) * torch.rsqrt(var))
        return (*results, results[1] * (mean if reads_mean else 2.0))

    graph = make_fx(f)(torch.randn(4, 64)).graph
    calls = graph.find_nodes(op="call_function", target=aten.var_mean.correction)
    (output,) = graph.find_nodes(op="output")
    _, _, last = output.args[0]
    run = 0
    for node in graph.nodes:
        if node is calls[1]:
            run = 1
        if run and node is not last:
            mark(node, Run(1, 0, "f"))
    mark(last, Run(0, 1, "last"))
    if reads_mean:  # that of the forward pass
        again = last.args[1]
        items = graph.find_nodes(op="call_function", target=again.target)
        last.update_arg(1, next(i for i in items if i.args == (calls[0], again.args[1])))
    return graph


@pytest.mark.parametrize(
    ("dim", "reads_mean", "count"),
    [
        pytest.param([1], True, 1, id="kept, of 64 elements each"),
        pytest.param([1], False, 2, id="not kept"),
        pytest.param([0], True, 2, id="of four elements each"),
    ],
)
def test_what_reduces_to_little_and_is_kept_is_computed_once(
    dim: list[int], reads_mean: bool, count: int
) -> None:
    graph = normalised_twice(dim, reads_mean=reads_mean)
    before = fx.GraphModule({}, graph)
    after = fx.GraphModule({}, merge_within_runs(graph))
    assert len(after.graph.find_nodes(op="call_function", target=aten.var_mean.correction)) == count
    assert len(after.graph.find_nodes(op="call_function", target=aten.rsqrt.default)) == 2
    x = torch.randn(4, 64)
    for ours, plain in zip(after(x), before(x), strict=True):
        assert torch.equal(ours, plain)


def multiplied_twice(*, meets: bool) -> fx.Graph:
    """A product that is recomputed twice; pointwise work reads both, or a product is between."""

    def f(x: torch.Tensor) -> torch.Tensor:
        first, again = x @ x, x @ x
        return torch.sin(first).exp() * again if meets else torch.sin(first) @ again

    graph = make_fx(f)(torch.randn(8, 8)).graph
    products = graph.find_nodes(op="call_function", target=aten.mm.default)
    for number, node in enumerate(products[:2]):
        mark(node, Run(number + 1, number, "mm"))
    return graph


@pytest.mark.parametrize("meets", [True, False])
def test_what_one_kernel_would_read_twice_is_recomputed_once(meets: bool) -> None:
    graph = multiplied_twice(meets=meets)
    before = fx.GraphModule({}, graph)
    after = fx.GraphModule({}, merge_within_runs(graph))
    count = len(after.graph.find_nodes(op="call_function", target=aten.mm.default))
    assert count == (1 if meets else 3)
    x = torch.randn(8, 8)
    assert torch.equal(after(x), before(x))


def test_kernels_of_two_runs_of_an_operator_are_not_fused() -> None:
    graph = multiplied_twice(meets=True)
    first, again = graph.find_nodes(op="call_function", target=aten.mm.default)
    (sine,) = graph.find_nodes(op="call_function", target=aten.sin.default)
    (total,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert not may_fuse([{first}], [{again}])
    assert not may_fuse([{sine}], [{again}])  # it reads the first
    mark(again, Run(1, 1, "mm"))
    assert may_fuse([{sine}], [{again, total}])


class Reshaping(nn.Module):
    """Its sizes are numbers in a graph of changing lengths, also sizes that it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(32, 128), nn.Linear(128, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm(x).view(batch * length, width)
        y = self.back(torch.nn.functional.gelu(self.wide(y)).exp().tanh())
        return x + y.view(batch, length, -1) / length


@pytest.mark.parametrize(("policy", "share"), [("budget:least", 0.35), ("budget:40%", 0.4)])
def test_a_plan_keeps_its_order_where_lengths_change(policy: str, share: float) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[Reshaping() for _ in range(4)])
    options = {"policy": policy, "codegen": "eager"}
    run = torch.compile(model, backend="torchremat", options=options, dynamic=True)

    for length in (64, 80, 96):
        x = torch.randn(8, length, 32)
        expected, plain = peak_of_second(model, lambda x: model(x).square().mean(), x)
        found, peak = peak_of_second(model, lambda x: run(x).square().mean(), x)
        assert all(map(torch.equal, found, expected))
        assert peak <= share * plain


def test_inductor_keeps_what_a_plan_recomputes_apart() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[Reshaping() for _ in range(4)])
    run = torch.compile(model, backend="torchremat", options={"policy": "budget:least"})
    x = torch.randn(8, 64, 32)
    expected, plain = peak_of_second(model, lambda x: model(x).square().mean(), x)
    found, peak = peak_of_second(model, lambda x: run(x).square().mean(), x)
    assert all(map(torch.allclose, found, expected))
    assert peak <= 0.33 * plain
