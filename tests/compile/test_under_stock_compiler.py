"""`checkpoint` under `torch.compile` with PyTorch's own backends, and under `torch.export`."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchremat as tr
from tests.compile.models import Block, Convolutions, Transformer, gradients_of, held_nbytes

POLICIES = ["full", "dots", "names:hidden", "ops:aten.gelu", "modules:*.up", "none"]

STATES = 2 * 5056
"""PyTorch keeps the state of the generator for each attention, though it has no dropout."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Checkpointing(Transformer):
    """Blocks, each called through a checkpoint that the forward makes."""

    policy: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = tr.checkpoint(layer, policy=self.policy)(x)
        return x.sin().mean()


def wrapped(policy: Any) -> Transformer:
    return tr.nn.wrap(Transformer(), policy, select="layers.*")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_of_a_wrapped_module_holds(policy: str) -> None:
    model, x = wrapped(policy), torch.randn(8, 32, 16)
    eager, held_eager = gradients_of(model, model, x), held_nbytes(model, model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, gradients_of(compiled, model, x), eager))
    assert held_nbytes(compiled, model, x) <= held_eager + STATES
    if policy != "none":
        assert held_nbytes(compiled, model, x) < held_nbytes(Transformer(), model, x)


@pytest.mark.parametrize("policy", [None, "dots", "names:hidden"])
def test_a_checkpoint_that_is_made_inside_is_kept(policy: Any) -> None:
    model, x = Checkpointing(), torch.randn(8, 32, 16)
    model.policy = policy
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, gradients_of(compiled, model, x), gradients_of(model, model, x)))
    assert held_nbytes(compiled, model, x) <= held_nbytes(model, model, x) + STATES


def test_a_named_value_is_kept_and_its_operator_not_run_again() -> None:
    graphs: list[str] = []
    backend = _backend_that_notes(graphs)
    f = tr.checkpoint(Block(16, 0.0), policy="names:hidden")
    x = torch.randn(2, 4, 16)
    torch.compile(lambda x: f(x).sum(), backend=backend, fullgraph=True)(x).backward()
    assert "gelu.default" not in graphs[-1]
    assert "addmm.default" in graphs[-1]


def test_what_selects_is_kept() -> None:
    graphs: list[str] = []
    f = tr.checkpoint(lambda x: torch.topk(torch.sin(x), 2).values.exp())
    x = torch.randn(8, requires_grad=True)
    g = torch.compile(lambda x: f(x).sum(), backend=_backend_that_notes(graphs), fullgraph=True)
    g(x).backward()
    assert "topk" in graphs[0]
    assert "topk.default" not in graphs[-1]


def _backend_that_notes(graphs: list[str]) -> Any:
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def note(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=note, partition_fn=min_cut_rematerialization_partition)


def test_inductor_takes_checkpoints_and_names() -> None:
    model = tr.nn.wrap(Transformer(layers=1), "names:hidden", select="layers.*")
    x = torch.randn(2, 4, 16)
    eager = gradients_of(model, model, x)
    compiled = gradients_of(torch.compile(model, fullgraph=True), model, x)
    for ours, plain in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_dropout_is_the_same_in_the_backward() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.dropout(torch.sin(x), 0.5, True)

    g = torch.compile(lambda x: tr.checkpoint(f)(x).square(), backend="aot_eager", fullgraph=True)
    x = torch.rand(1024).requires_grad_()
    y = g(x)
    (ours,) = torch.autograd.grad(y.sum(), x)
    expected = torch.where(y == 0, 0, 8 * torch.sin(x) * torch.cos(x))
    torch.testing.assert_close(ours, expected)


def test_writes_in_place_inside_are_right() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = Convolutions()

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(x)
            y.mul_(2).relu_()
            return self.convolutions(y)

    model, x = InPlace(), torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    f = torch.compile(tr.checkpoint(model, policy="dots"), backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, gradients_of(f, model, x), gradients_of(twin, twin, x)))
    assert all(map(torch.equal, model.buffers(), twin.buffers()))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
def test_a_budget_runs_outside_of_the_compiler() -> None:
    model, x = wrapped("budget:95%"), torch.randn(4, 32, 16)
    eager = gradients_of(model, model, x)
    compiled = torch.compile(model, backend="aot_eager")
    assert all(map(torch.equal, gradients_of(compiled, model, x), eager))
    assert held_nbytes(compiled, model, x) == held_nbytes(model, model, x)


def test_a_budget_inside_a_compiled_function_is_told() -> None:
    model = Checkpointing()
    model.policy = "budget:95%"
    with pytest.raises(Exception, match="Give it to the compiler"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(2, 4, 16))


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_what_is_compiled_may_be_checkpointed(policy: str) -> None:
    model, x = Transformer(), torch.randn(2, 8, 16)
    plain = tr.checkpoint(model, policy=policy)
    f = tr.checkpoint(torch.compile(model, backend="aot_eager"), policy=policy)
    assert all(map(torch.equal, gradients_of(f, model, x), gradients_of(plain, model, x)))
    assert held_nbytes(f, model, x) == held_nbytes(plain, model, x)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_export_gives_a_plain_graph(strict: bool) -> None:
    model, x = wrapped("dots").eval(), torch.randn(2, 8, 16)
    exported = torch.export.export(model, (x,), strict=strict)
    targets = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert all(target.startswith(("aten.", "<built-in function getitem")) for target in targets)
    assert torch.equal(exported.module()(x), model(x))


def test_a_wrapped_root_is_exported() -> None:
    model, x = tr.nn.wrap(nn.Linear(4, 4)), torch.randn(2, 4)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))
