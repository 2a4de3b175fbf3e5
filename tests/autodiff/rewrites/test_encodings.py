"""Values saved in fewer bits: PyTorch's gradients to the bit, and fewer bytes."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchremat as tr
from torchremat.autodiff.rewrites import encodings
from torchremat.autodiff.rewrites.encoding_ops import (
    decode_bits,
    drop_by_filling,
    drop_gradient,
    encode_at_most,
    encode_bits,
    encode_indices,
    encode_shape,
    is_encoding,
)
from torchremat.autodiff.rewrites.encodings import value_of_encoding
from torchremat.measure import LiveBytes
from torchremat.planning.step.traced_step import region_of
from torchremat.remat.program.function_program import FunctionProgram

Function = Callable[[Tensor], Tensor]
POLICIES = ["everything_saveable", "dots", "full"]


def pools(x: Tensor) -> Tensor:
    y = F.max_pool2d(F.relu(x.sin()), 2)
    return F.max_pool2d(F.relu(y - 0.3), 3, 2, 1).exp()


def volumes(x: Tensor) -> Tensor:
    return F.max_pool3d(F.relu(x.sin()[None]), 2).exp()


def masks(x: Tensor) -> Tensor:
    y = x.sin()
    y = torch.where((y > 0.2).unsqueeze(0), y, 2 * y)[0]
    return y.masked_fill((y < 0.5).transpose(-1, -2).contiguous().transpose(-1, -2), 0.1)


def named(x: Tensor) -> Tensor:
    y = tr.checkpoint_name(F.relu(x.sin()), "y")
    return 3 * F.avg_pool2d(y, 2)


def thresholds(x: Tensor) -> Tensor:
    y = x.sin()
    return (F.threshold(y, 0.25, 5.0) + F.threshold(y, -0.125, 2.0)).exp()


def choices(x: Tensor) -> Tensor:
    y = x.sin()
    top = y.topk(5, dim=-1, largest=False).values.square().sum(-1)
    ordered = y.sort(dim=2, descending=True, stable=True).values * 0.3
    return top * ordered.max(-1).values + y.cummax(0).values.exp().sum(-1)


FUNCTIONS = [pools, volumes, masks, named, thresholds, choices]


@pytest.fixture(autouse=True)
def small_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "LEAST_NBYTES", 256)


def example(layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 36, 36, generator=generator).to(memory_format=layout)
    x[0, 1, :9] = 0.0
    return x.requires_grad_()


def anew(function: Function) -> Function:
    """The function as another, so that a trace does not depend on sizes of earlier calls."""
    return lambda x: function(x)


def gradient(function: Function, x: Tensor) -> Tensor:
    return torch.autograd.grad(function(x).double().sum(), x)[0]


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def encoders_in(function: Function, x: Tensor) -> set[Any]:
    graph = region_of(function, (x,), {}).joint.module.graph
    return {node.target for node in graph.nodes if is_encoding(node)}


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1000, (1 << 20) + 13, 1 << 21])
def test_bits_of_a_mask_give_it_back(size: int) -> None:
    x = torch.randn(size)
    x[::5], x[::7], x[::11] = 0.0, float("nan"), -0.0
    for mask, bits in [(x <= 0, encode_at_most(x, 0.0)), (x > 0.5, encode_bits(x > 0.5))]:
        assert bits.nbytes == (size + 7) // 8
        again = decode_bits(bits, [size])
        assert again.untyped_storage().nbytes() == size
        assert torch.equal(bits_of(again), bits_of(mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 3, 7), (3, 1 << 10, 1 << 9)])
def test_gradients_are_dropped_as_pytorch_drops_them(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    y, slope = torch.randn(2, *shape).to(dtype).permute(0, 3, 1, 2)
    y[0, ::5], y[1:] = float("nan"), y[1:].round()
    slope[..., 0], slope[..., 1], slope[..., 2] = float("nan"), -0.0, float("-inf")
    order = [1, 2, 0]
    found = drop_gradient(slope, encode_at_most(y.permute(order), 0.0), order)
    expected = torch.ops.aten.threshold_backward(slope, y, 0)
    assert found.stride() == expected.stride()
    assert torch.equal(bits_of(found), bits_of(expected))
    filled = torch.empty_like(expected)
    drop_by_filling(slope, 4 * (y <= 0).to(torch.uint8), filled)
    torch.testing.assert_close(filled, expected, rtol=0, atol=0, equal_nan=True)


def test_operators_by_the_rules_of_pytorch() -> None:
    mask, x = torch.rand(3, 5) > 0.5, torch.randn(3, 5)
    for operator, args in [
        (encode_bits, (mask,)),
        (encode_at_most, (x, 0.5)),
        (decode_bits, (encode_bits(mask), [3, 5])),
        (drop_gradient, (x.clone().requires_grad_(), encode_at_most(x.mT, 0.1), [1, 0])),
        (encode_indices, (torch.arange(9), torch.uint8)),
        (encode_shape, (x,)),
    ]:
        torch.library.opcheck(operator, args)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_are_those_of_pytorch(function: Function, policy: str) -> None:
    x = example()
    assert encoders_in(function, x)
    for again in range(2):
        found = gradient(tr.checkpoint(anew(function), policy=policy), x)
        assert torch.equal(bits_of(found), bits_of(gradient(function, x))), again


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_layouts_and_dtypes(layout: torch.memory_format, dtype: torch.dtype) -> None:
    x = example(layout).detach().to(dtype).requires_grad_()
    assert encode_at_most in encoders_in(pools, x)
    expected = gradient(pools, x)
    found = gradient(tr.checkpoint(anew(pools), policy="everything_saveable"), x)
    assert torch.equal(bits_of(found), bits_of(expected))
    assert found.stride() == expected.stride()


def test_not_a_number() -> None:
    x = example().detach()
    x[:, :, 3:5] = float("nan")
    x.requires_grad_()
    found = gradient(tr.checkpoint(anew(named), policy="everything_saveable"), x)
    assert torch.equal(bits_of(found), bits_of(gradient(named, x)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", [0.0, -0.0, 0.25, 0.3, -0.7, 6.1])
def test_a_threshold_between_two_numbers_of_the_dtype(threshold: float, dtype: torch.dtype) -> None:
    """Kernels compare with it as it is, or as it is rounded."""

    def function(x: Tensor) -> Tensor:
        return 2 * F.threshold(x.abs().sqrt() + threshold, threshold, 1.0)

    near = torch.tensor(threshold, dtype=dtype)
    steps = [torch.nextafter(near, near - 1), near, torch.nextafter(near, near + 1)]
    x = torch.stack(steps).repeat(200).requires_grad_()

    def around(x: Tensor) -> Tensor:
        return 2 * F.threshold(x.clone(), threshold, 1.0)

    for one in (function, around):
        found = gradient(tr.checkpoint(anew(one), policy="everything_saveable"), x)
        assert torch.equal(bits_of(found), bits_of(gradient(one, x)))
    is_exact = float(near.double()) == threshold
    assert bool(encoders_in(function, x)) == is_exact


def test_a_bit_is_saved_for_each_entry() -> None:
    x = torch.randn(4, 16, 64, 64, requires_grad=True)
    assert encoders_in(named, x) == {encode_at_most, encode_shape}
    saved = tr.estimate(named, x, policy="everything_saveable").saved_bytes
    assert saved == x.numel() // 8 + x.itemsize


def test_no_input_is_kept_for_them() -> None:
    """A second derivative would recompute what is encoded from it."""

    def function(x: Tensor) -> Tensor:
        return 2 * F.avg_pool2d(F.relu(x), 2)

    x = torch.randn(4, 16, 64, 64, requires_grad=True)
    assert encoders_in(function, x) == {encode_at_most, encode_shape}
    for again in (function, named):
        saving = tr.checkpoint(anew(again), policy="everything_saveable")
        saving(x)
        assert saving.last_program is not None
        assert [node.name for node in saving.last_program.residuals] == (
            ["relu"] if again is function else ["encode_shape_default", "encode_at_most_default"]
        )
        assert len(saving.last_program.saved_inputs) == (again is named)


def test_indices_take_the_bytes_that_their_sizes_need() -> None:
    def saved(size: int) -> int:
        x = torch.randn(1, 4, size, size, requires_grad=True)
        pool = tr.checkpoint_policies.everything_saveable
        found = tr.estimate(lambda x: 2 * F.max_pool2d(x, 2), x, policy=pool).saved_bytes
        return found // (4 * (size // 2) ** 2)

    assert [saved(16), saved(18), saved(180), saved(182)] == [1, 2, 2, 4]


def test_a_value_that_is_saved_whole_has_no_encoding_beside_it() -> None:
    def function(x: Tensor) -> Tensor:
        y = tr.checkpoint_name(F.relu(x.sin()), "y")
        z = tr.checkpoint_name(F.relu(x.cos()), "z")
        return F.avg_pool2d(y, 2).exp() + F.avg_pool2d(z, 2)  # exp is recomputed from y

    saving = tr.checkpoint(function, policy=tr.checkpoint_policies.save_only_these_names("y", "z"))
    x = example()
    assert torch.equal(gradient(saving, x), gradient(function, x))
    assert isinstance(saving.last_program, FunctionProgram)
    whole, *codes = saving.last_program.residuals
    assert whole.name == "relu"
    assert {value_of_encoding(code).name for code in codes} == {"relu_1"}


def test_a_small_input_is_kept_for_a_second_derivative() -> None:
    def function(x: Tensor, shift: Tensor) -> Tensor:
        return F.avg_pool2d(F.relu(x.sin() + shift), 2).square().sum()

    x = example().detach().double().requires_grad_()
    shift = torch.full((1, 4, 1, 1), 0.1).double().requires_grad_()

    def square(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        slopes = torch.autograd.grad(f(x, shift), (x, shift), create_graph=True)
        return torch.autograd.grad(sum(s.square().sum() for s in slopes), (x, shift))

    saving = tr.checkpoint(function, policy="everything_saveable")
    torch.testing.assert_close(square(saving), square(function))
    assert isinstance(saving.last_program, FunctionProgram)
    assert any(map(is_encoding, saving.last_program.residuals))
    assert saving.last_program.saved_inputs == (0, 1)


def test_real_peaks_are_smaller_and_as_estimated() -> None:
    x = torch.randn(4, 8, 128, 128, requires_grad=True)

    def step(function: Function) -> int:
        with LiveBytes() as memory:
            torch.autograd.grad(function(x), x)
        return memory.peak

    def loss(x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.max_pool2d(F.relu(x.sin()), 3, 1, 1)
        return x.sum()

    saving = tr.checkpoint(loss, policy="everything_saveable")
    step(saving)
    found = step(saving)
    assert found == tr.estimate(loss, x, policy="everything_saveable").peak_bytes
    assert found < 0.8 * step(loss)


def test_a_policy_that_saves_nothing_runs_the_operators_of_pytorch() -> None:
    x = example()
    for policy in ("full", "names:y"):
        function = tr.checkpoint(anew(named), policy=policy)
        function(x)
        program = function.last_program
        assert program is not None
        targets = [node.target for node in program.backward((True,), (True,)).module.graph.nodes]
        is_saved = policy != "full"
        assert (torch.ops.aten.threshold_backward.default in targets) != is_saved
        assert (drop_gradient in targets) == is_saved


@pytest.mark.parametrize("budget", ["100%", "90%", "83%"])
def test_plans_choose_them(budget: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 1, 1), nn.ReLU(),
        nn.MaxPool2d(3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 1, 1), nn.Flatten(),
        nn.Linear(8 * 128 * 128, 4),
    )  # fmt: skip
    x, parameters = torch.randn(4, 3, 128, 128), list(model.parameters())

    def step(function: Callable[[Tensor], Tensor]) -> tuple[int, tuple[Tensor, ...]]:
        with LiveBytes() as memory:
            found = torch.autograd.grad(function(x).sum(), parameters)
        return memory.peak, found

    plain_peak, expected = step(model)
    plan = tr.plan(lambda x: model(x).sum(), x, budget=budget)
    planned = tr.checkpoint(lambda x: model(x).sum(), policy=tr.checkpoint_policies.from_plan(plan))
    step(planned)
    peak, found = step(planned)
    assert all(map(torch.equal, found, expected))
    assert peak == plan.peak_bytes < 0.6 * plain_peak
    assert (plan.recompute_seconds == 0) == (budget == "100%")


def test_derivatives_of_derivatives_and_batches() -> None:
    x, v = example().detach().double(), torch.randn(2, 4, 36, 36).double()

    def products(f: Function) -> list[Tensor]:
        def g(x: Tensor) -> Tensor:
            return f(x).sum()

        _, second = torch.func.jvp(torch.func.grad(g), (x,), (v,))
        return [
            torch.func.vmap(torch.func.grad(g))(torch.stack([x, v])),
            second,
            torch.func.vjp(torch.func.grad(g), x)[1](v)[0],
            torch.func.jvp(g, (x,), (v,))[1],
        ]

    for function in (named, masks, thresholds):
        for policy in ("everything_saveable", "full"):
            pairs = zip(
                products(tr.checkpoint(anew(function), policy=policy)),
                products(function),
                strict=True,
            )
            for a, b in pairs:
                torch.testing.assert_close(a, b)


def test_second_derivatives_of_autograd() -> None:
    x = example().detach().double().requires_grad_()

    def square(f: Function) -> Tensor:
        (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    for function in FUNCTIONS:
        for policy in ("everything_saveable", "full"):
            found = square(tr.checkpoint(anew(function), policy=policy))
            torch.testing.assert_close(found, square(function))


@pytest.mark.parametrize("policy", ["everything_saveable", "full", "dots"])
@pytest.mark.parametrize("drawn", ["dropout", "a product"])
def test_second_derivatives_after_random_numbers(drawn: str, policy: str) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y = F.dropout(y, 0.3) if drawn == "dropout" else y * torch.rand_like(y).square()
        y = F.max_pool2d(F.relu(y), 3, 1, 1)
        return torch.where(y > 0.3, y.square(), y)

    def square(f: Function) -> Tensor:
        torch.manual_seed(3)
        (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    x = example().detach().double().requires_grad_()
    assert encoders_in(function, x) == {encode_at_most, encode_bits, encode_indices, encode_shape}
    saving = tr.checkpoint(function, policy=policy)
    torch.testing.assert_close(square(saving), square(function))


@pytest.mark.parametrize("policies", [*itertools.product(POLICIES, POLICIES)])
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.sampled(3)
def test_checkpoints_within_checkpoints(policies: tuple[str, str], used: int) -> None:
    """Of the results of the inner one, only some are used: its derivative is of another trace."""

    def inner(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.where(x < 0.7, x.square(), x).sort(-1).values
        z = F.relu(torch.where(y > 0.2, y * y, y).exp() - 1)
        return 2 * z.cos(), y.exp()

    def outer(x: Tensor, call: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        results = call(x.tanh())
        return results[used].square().sum(), results[1 - used].detach()

    def differentiate(f: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        (slope,) = torch.autograd.grad(f(x)[0], x, create_graph=True)
        return [slope, torch.autograd.grad(slope.square().sum(), x)[0]]

    x = example().detach().double().requires_grad_()
    called = tr.checkpoint(inner, policy=policies[0])
    found = differentiate(tr.checkpoint(lambda x: outer(x, called), policy=policies[1]))
    torch.testing.assert_close(found, differentiate(lambda x: outer(x, inner)))


def test_what_it_leaves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = example()
    w = torch.randn(36, 8)
    assert not encoders_in(lambda x: F.relu(x), x)  # who calls has the result
    assert not encoders_in(lambda x: F.relu(x) @ w.requires_grad_(), x)  # the product reads it all
    monkeypatch.setattr(encodings, "LEAST_NBYTES", 1 << 20)
    assert not encoders_in(named, x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compilers_get_the_operators_of_pytorch(backend: str) -> None:
    x = example()
    found = gradient(tr.jit(named, backend=backend, policy="everything_saveable"), x)
    assert torch.equal(found, gradient(named, x))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", ["everything_saveable", "full", "budget:100%"])
@pytest.mark.sampled(3)
def test_sizes_that_change(function: Function, policy: str) -> None:
    changing = tr.checkpoint(anew(function), policy=policy)
    for batch, size in [(2, 36), (5, 36), (3, 36), (7, 20), (4, 44), (1, 36)]:
        x = torch.randn(batch, 4, size, size, requires_grad=True)
        assert torch.equal(gradient(changing, x), gradient(function, x)), (batch, size)
        if (batch, size) != (7, 20) or function is choices:  # among sizes that vary
            continue
        assert isinstance(changing.last_program, FunctionProgram)
        nodes = changing.last_program.root_joint.module.graph.nodes
        assert any(map(is_encoding, nodes))


def test_tiles_read_values_themselves() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.relu(x @ w) / 3, target) + F.relu(x.sin()).mean()

    x, w = torch.randn(512, 64, requires_grad=True), torch.randn(64, 2048, requires_grad=True)
    target = torch.randint(0, 2048, (512,))
    plan = tr.plan(function, x, w, budget="45%", tile=True)
    assert "tiled" in plan.decisions.values()
    planned = tr.checkpoint(function, policy=tr.checkpoint_policies.from_plan(plan))
    for a, b in zip(
        torch.autograd.grad(planned(x, w), (x, w)),
        torch.autograd.grad(function(x, w), (x, w)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


class Pools(nn.Module):
    """Convolutions, whose activations only poolings and ReLU read in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.max_pool2d(F.relu(self.wide(x)), 3, 1, 1)
            x = self.narrow(F.max_pool2d(x, 3, 1, 1))
        return x.square().mean()


@pytest.mark.parametrize("options", [{}, {"device": "h100"}, {"device": "h100", "offload": True}])
def test_plans_keep_to_their_budgets(options: dict[str, Any]) -> None:
    model, x = Pools(), torch.randn(4, 3, 64, 64)
    for budget in ("95%", "85%", "76%"):
        plan = tr.plan(model, x, budget=budget, **options)
        assert plan.peak_bytes <= plan.budget
        tr.checkpoint_policies.from_plan(plan)


def test_a_plan_goes_from_a_file_to_other_programs(tmp_path: Path) -> None:
    model, x = Pools(), torch.randn(4, 3, 64, 64)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x), parameters)
    plan = tr.plan(model, x, budget="80%")
    assert any("encode" in name for name, said in plan.decisions.items() if said == "saved")
    plan.save(tmp_path / "plan.json")
    policy = tr.checkpoint_policies.from_plan(type(plan).load(tmp_path / "plan.json"))
    for planned in (
        tr.checkpoint(model, policy=policy),
        tr.nn.wrap(model, policy),
        tr.nn.wrap(model, "budget:80%"),
        tr.jit(model, policy=policy, backend="aot_eager"),
    ):
        found = torch.autograd.grad(planned(x), parameters)
        assert all(map(torch.equal, found, expected))


def test_a_report_shows_them_at_the_line_of_the_value() -> None:
    report = tr.explain(named, example(), policy="everything_saveable")
    rows = [row for row in report if row.name.endswith(", encoded")]
    assert {row.reason for row in rows} == {"none, in fewer bits"}
    assert all(row.source is not None and "named" in str(row.source) for row in rows)
    assert sorted(row.nbytes for row in rows) == [4, 2 * 4 * 36 * 36 // 8]


def drawn(x: Tensor) -> Tensor:
    y = F.dropout(x.sin(), 0.4) + torch.where(torch.rand_like(x) < 0.5, x, x * x)
    order = torch.rand_like(x).argsort(-1)
    return y.gather(-1, order.sort(-1).indices).exp() * y


@pytest.mark.parametrize("policy", [*POLICIES, "budget:100%", "budget:90%"])
def test_masks_of_random_numbers(policy: str) -> None:
    assert encode_bits in encoders_in(drawn, example())
    x = example()

    def differentiate(f: Function, *, twice: bool) -> Tensor:
        torch.manual_seed(7)
        (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=twice)
        after = torch.rand(3)
        if twice:
            (slope,) = torch.autograd.grad(slope.square().sum(), x)
        return torch.cat([slope.flatten(), after])

    once, again = (tr.checkpoint(anew(drawn), policy=policy) for _ in range(2))
    assert torch.equal(differentiate(once, twice=False), differentiate(drawn, twice=False))
    torch.testing.assert_close(differentiate(again, twice=True), differentiate(drawn, twice=True))


@pytest.mark.parametrize(
    ("choose", "nbytes"),
    [
        (lambda x: x.sort(-1).values.exp(), 1),
        (lambda x: x.topk(100, -1).values.exp(), 1),
        (lambda x: x.max(0, keepdim=True).values.exp(), 1),
        (lambda x: x.flatten(1).sort(-1).values.exp(), 2),
        (lambda x: x.flatten().sort().values.exp(), 4),
    ],
    ids=["sort", "topk", "max", "sort of rows", "sort of all"],
)
def test_indices_of_what_is_chosen(choose: Function, nbytes: int) -> None:
    x = torch.randn(40, 4, 500, requires_grad=True)
    size = {1: 200, 2: 500, 4: 500}[nbytes]
    x = x.detach()[..., :size].contiguous().requires_grad_()
    report = tr.explain(choose, x, policy="everything_saveable")
    (row,) = [row for row in report if row.name.endswith(", encoded")]
    assert row.nbytes == nbytes * choose(x).numel()
    saving = tr.checkpoint(choose, policy="everything_saveable")
    assert torch.equal(gradient(saving, x), gradient(choose, x))


def test_a_second_derivative_reads_the_indices_that_are_saved() -> None:
    """Sorted again, equal entries may change places: the graph has no other sort."""
    x = example().detach().double().round(decimals=1).requires_grad_()

    def ordered(x: Tensor) -> Tensor:
        return x.square().sort(-1).values.exp()

    function = tr.checkpoint(ordered, policy="everything_saveable")
    (slope,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    names: list[str] = []
    with _Watch(names):
        (found,) = torch.autograd.grad(slope.square().sum(), x)
    assert [name for name in names if "gather" in name or "scatter" in name]
    assert not [name for name in names if "sort" in name]
    (slope,) = torch.autograd.grad(ordered(x).sum(), x, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(slope.square().sum(), x)[0])


class _Watch(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(str(func))
        return func(*args, **(kwargs or {}))
