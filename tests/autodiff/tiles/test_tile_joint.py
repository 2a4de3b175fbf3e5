"""Joint graphs in tiles: the values and gradients of plain PyTorch, with no large value whole."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchremat as tr
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.tiles.cuts import Rows
from torchremat.autodiff.tiles.growth import grow_along, grow_from
from torchremat.autodiff.tiles.tile_joint import Tiling, tile_joint
from torchremat.autodiff.tiles.tiled_op import tiled_p
from torchremat.graph.nodes import body_of
from torchremat.planning.planner import Planner
from torchremat.planning.step.traced_step import FixedSchedule, WholeGraphPolicy, region_of

ROWS, WIDTH, CLASSES = 100, 32, 4096
LOGITS_NBYTES = 4 * ROWS * CLASSES


def joint_of(fun: Callable[..., Any], *args: Tensor) -> Joint:
    region = region_of(fun, args, {}, WholeGraphPolicy())
    return region.joint_for(region.usual_outputs)


def tiled_calls(joint: Joint) -> list[fx.Node]:
    return list(joint.module.graph.find_nodes(op="call_function", target=tiled_p))


def largest_nbytes(graph: fx.Graph) -> int:
    values = [n.meta.get("val") for n in graph.nodes if n.op == "call_function"]
    tensors = [v for v in values if isinstance(v, Tensor)]
    return max(t.untyped_storage().nbytes() for t in tensors)


def run_both(
    fun: Callable[..., Any], joint: Joint, args: tuple[Tensor, ...], wrt: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients in tiles, nothing recomputed, and those of plain PyTorch."""
    schedule = Planner(joint).plain.graph_schedule
    in_tiles = tr.checkpoint(fun, policy=FixedSchedule(schedule, joint))
    found = []
    for f in (in_tiles, fun):
        result = f(*args)
        slope = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view_as(result)
        found.append([result, *torch.autograd.grad(result, wrt, slope)])
    return found[0], found[1]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        largest = b.abs().max().item()
        assert (a - b).abs().max().item() <= tolerance * max(largest, 1e-30)


def targets() -> Tensor:
    found = torch.arange(ROWS) * 37 % CLASSES
    found[5] = -100
    return found


PROBABILITIES = torch.softmax(torch.randn(ROWS, CLASSES), 1)


def class_weights() -> Tensor:
    return torch.linspace(0.1, 2, CLASSES)


def gathered(z: Tensor) -> Tensor:
    chosen = z.gather(1, targets().clamp(0).unsqueeze(1)).squeeze(1)
    return (z.logsumexp(1) - chosen).mean()


def by_batch(z: Tensor) -> tuple[Tensor, Tensor]:
    """Scores with the classes in their second dim, and their targets."""
    return z.view(4, 25, -1).transpose(1, 2), targets().view(4, 25)


LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda z: F.cross_entropy(z, targets()),
    "sum": lambda z: F.cross_entropy(z, targets(), reduction="sum"),
    "smoothing": lambda z: F.cross_entropy(z, targets(), label_smoothing=0.1),
    "weights": lambda z: F.cross_entropy(z, targets(), weight=class_weights()),
    "weights and smoothing": lambda z: F.cross_entropy(
        z, targets(), weight=class_weights(), label_smoothing=0.1
    ),
    "probabilities": lambda z: F.cross_entropy(z, PROBABILITIES),
    "divergence": lambda z: F.kl_div(F.log_softmax(z, 1), PROBABILITIES, reduction="batchmean"),
    "squares": lambda z: F.mse_loss(z, PROBABILITIES),
    "sum of squares": lambda z: F.mse_loss(z, PROBABILITIES, reduction="sum"),
    "binary": lambda z: F.binary_cross_entropy_with_logits(z, PROBABILITIES),
    "capped": lambda z: F.cross_entropy(30 * torch.tanh(z / 30), targets()),
    "with a penalty": lambda z: (
        F.cross_entropy(z, targets()) + 1e-2 * z.logsumexp(-1).square().mean()
    ),
    "gathered": gathered,
    "scaled": lambda z: 3 * F.cross_entropy(z.view(4, 25, -1).flatten(0, 1), targets()) - 1,
    "powers": lambda z: z.pow(2).sum(),
    "classes second": lambda z: F.cross_entropy(*by_batch(z)),
    "classes second, sum": lambda z: F.cross_entropy(*by_batch(z), reduction="sum"),
    "classes second, smoothing": lambda z: F.cross_entropy(*by_batch(z), label_smoothing=0.1),
    "classes second, weights": lambda z: F.cross_entropy(*by_batch(z), weight=class_weights()),
    "classes second, weights and smoothing": lambda z: F.cross_entropy(
        *by_batch(z), weight=class_weights(), label_smoothing=0.1
    ),
    "images": lambda z: F.cross_entropy(
        z.view(4, 5, 5, -1).permute(0, 3, 1, 2), targets().view(4, 5, 5)
    ),
    "a batch of one": lambda z: F.cross_entropy(z[None].transpose(1, 2), targets()[None]),
    "a scale of each class": lambda z: F.cross_entropy(
        by_batch(z)[0] * class_weights().view(1, -1, 1), by_batch(z)[1]
    ),
    "scales without a batch": lambda z: F.cross_entropy(
        by_batch(z)[0] * class_weights().view(-1, 1), by_batch(z)[1]
    ),
    "a scale for all places": lambda z: (
        (z.view(4, 25, -1) * class_weights().view(1, 1, -1)).square().sum()
    ),
    "binary, weighed": lambda z: F.binary_cross_entropy_with_logits(
        z.view(4, 25, -1), PROBABILITIES.view(4, 25, -1), weight=class_weights().view(1, 1, -1)
    ),
    "losses of places": lambda z: F.cross_entropy(*by_batch(z), reduction="none").square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.sampled(3)
def test_a_loss_in_one_pass(name, bias):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    w = torch.randn(CLASSES, WIDTH, requires_grad=True)
    b = torch.randn(CLASSES, requires_grad=True) if bias else None

    def step(x: Tensor, w: Tensor) -> Tensor:
        return LOSSES[name](F.linear(x, w, b))

    joint = tile_joint(joint_of(step, x, w), Tiling(8))
    assert joint is not None
    (call,) = tiled_calls(joint)
    assert largest_nbytes(joint.module.graph) < LOGITS_NBYTES
    assert largest_nbytes(body_of(call).graph) < LOGITS_NBYTES / 2
    tolerance = 1e-4 if name.startswith("classes second") else 1e-5  # plain sums of columns are off
    assert_close(*run_both(step, joint, (x, w), [x, w] if b is None else [x, w, b]), tolerance)


ACROSS_ROWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "a softmax of columns": lambda z: F.nll_loss(F.log_softmax(z, 0), targets()),
    "a softmax of places": lambda z: F.nll_loss(F.log_softmax(by_batch(z)[0], 2), by_batch(z)[1]),
    "sums with their dims": lambda z: z.view(4, 25, -1).exp().sum((0, 1), keepdim=True),
    "sums of each batch": lambda z: z.view(4, 25, -1).exp().sum(1, keepdim=True),
    "places before batches": lambda z: F.cross_entropy(
        z.view(4, 25, -1).transpose(0, 1).flatten(0, 1), targets()
    ),
    "some of the classes": lambda z: (
        by_batch(z)[0].softmax(1)[:, :64].cumsum(1).square().sum()  # which needs all places
    ),
    "some of the classes beside all": lambda z: (
        by_batch(z)[0].detach().softmax(1)[:, :64].cumsum(1).sum() + z.square().mean()
    ),
    "sums of each place": lambda z: z.view(4, 25, -1).transpose(1, 2).exp().sum(0),
}


@pytest.mark.parametrize("name", ACROSS_ROWS)
def test_what_is_computed_across_rows(name):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    w = torch.randn(CLASSES, WIDTH, requires_grad=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return ACROSS_ROWS[name](F.linear(x, w))

    joint = joint_of(step, x, w)
    assert_close(*run_both(step, tile_joint(joint, Tiling(8, again=True)) or joint, (x, w), [x, w]))


def test_a_score_for_each_pixel():
    x = torch.randn(8, 8, 16, 16, requires_grad=True)
    w = torch.randn(512, 8, 1, 1, requires_grad=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.conv2d(x, w), torch.arange(2048).view(8, 16, 16) % 512)

    joint = tile_joint(joint_of(step, x, w), Tiling(4))
    assert joint is not None and len(tiled_calls(joint)) == 1
    assert_close(*run_both(step, joint, (x, w), [x, w]))


def test_one_target_of_all_scores():
    x = torch.randn(1 << 19, 2, requires_grad=True)
    w = torch.randn(1, 2, requires_grad=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        scores = F.linear(x, w).squeeze(1).square()
        return scores.exp().mean() - F.nll_loss(scores.detach(), torch.tensor(5))

    joint = tile_joint(joint_of(step, x, w), Tiling(4))
    assert joint is not None
    assert_close(*run_both(step, joint, (x, w), [x, w]))


def test_rows_of_inputs_lie_in_memory_as_one_dim_does():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    w = torch.randn(CLASSES, WIDTH, requires_grad=True)
    by_class = torch.randn(4, CLASSES, 25)

    def step(x: Tensor, w: Tensor) -> Tensor:
        scores, _ = by_batch(F.linear(x, w))
        return ((scores + by_class).exp() + scores.exp()).logsumexp(1).sum()

    graph = joint_of(step, x, w).module.graph
    (exp, *_) = graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    assert not grow_along([exp], Rows.at(0, 2)).lies_in_rows()
    region = grow_from(exp)
    assert region is not None and region.cuts[exp] != Rows.at(0, 2)


@pytest.mark.parametrize("num_tiles", [1, 3, 7, 64, 99, 100, 1000])
def test_any_number_of_tiles(num_tiles):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    w = torch.randn(CLASSES, WIDTH, requires_grad=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(x @ w.t(), targets())

    joint = tile_joint(joint_of(step, x, w), Tiling(num_tiles))
    assert joint is not None
    assert_close(*run_both(step, joint, (x, w), [x, w]))


def test_one_tile_has_the_bits_of_pytorch():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    w = torch.randn(CLASSES, WIDTH, requires_grad=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(x @ w.t(), targets(), reduction="sum")

    joint = tile_joint(joint_of(step, x, w), Tiling(1))
    assert joint is not None
    schedule = Planner(joint).plain.graph_schedule
    in_tiles = tr.checkpoint(step, policy=FixedSchedule(schedule, joint))
    ours = torch.autograd.grad(in_tiles(x, w), [x, w])
    theirs = torch.autograd.grad(step(x, w), [x, w])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_loss_of_nothing_but_ignored_rows_is_no_number():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    w = torch.randn(CLASSES, WIDTH, requires_grad=True)
    ignored = torch.full((ROWS,), -100)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(x @ w.t(), ignored)

    joint = tile_joint(joint_of(step, x, w), Tiling(4))
    assert joint is not None
    schedule = Planner(joint).plain.graph_schedule
    in_tiles = tr.checkpoint(step, policy=FixedSchedule(schedule, joint))
    assert in_tiles(x, w).isnan() and step(x, w).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tiles", [4, 32])
def test_sums_over_tiles_round_little(dtype, num_tiles):
    """Beside `float64`, in units of the last place of the largest entry: 1 for each addition."""
    w = torch.randn(CLASSES, WIDTH).to(dtype).requires_grad_()
    x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()

    def step(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy((x @ w.t()).float(), targets())

    joint = tile_joint(joint_of(step, x, w), Tiling(num_tiles))
    assert joint is not None
    ours, theirs = run_both(step, joint, (x, w), [x, w])
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    # the logits of half precision are rounded before the loss: only what comes after is compared
    logits = exact[0] @ exact[1].t()
    rounded = logits + ((x @ w.t()).detach().double() - logits.detach())
    loss = F.cross_entropy(rounded, targets())
    wanted = torch.autograd.grad(loss, exact, torch.full_like(loss, 0.5))
    last_place = torch.finfo(dtype).eps * wanted[1].abs().max().item()
    error = (ours[2].double() - wanted[1]).abs().max().item()
    plain = (theirs[2].double() - wanted[1]).abs().max().item()
    assert error <= plain + num_tiles * last_place


class Attention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / 8).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))


class Gated(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 16 * width, bias=False)
        self.up = nn.Linear(width, 16 * width)
        self.down = nn.Linear(16 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(
    ("model", "x", "num_calls"),
    [
        (Attention(), torch.randn(2, 200, 32), 2),
        (Gated(), torch.randn(4, 128, 64), 2),
        (nn.Sequential(Gated(), nn.LayerNorm(64), Gated()), torch.randn(4, 128, 64), 4),
    ],
    ids=["attention", "gated", "two gated"],
)
def test_regions_whose_gradients_wait_run_again(model, x, num_calls):
    x.requires_grad_()
    whole = joint_of(model, x)
    assert tile_joint(whole, Tiling(4)) is None
    joint = tile_joint(whole, Tiling(4, again=True))
    assert joint is not None and joint.untiled is whole
    assert len(tiled_calls(joint)) == num_calls
    assert Planner(joint).plain.peak_bytes < 0.6 * Planner(whole).plain.peak_bytes
    assert_close(*run_both(model, joint, (x,), [x, *model.parameters()]))


def test_what_is_returned_is_whole():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    w = torch.randn(CLASSES, WIDTH, requires_grad=True)

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ w.t()
        return F.cross_entropy(logits, targets()), logits

    joint = tile_joint(joint_of(step, x, w), Tiling(4))
    results = () if joint is None else [n.target for n in joint.outputs]
    assert joint is None or results[1] is not tiled_p


def test_random_draws_and_custom_functions_end_regions():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    w = torch.randn(CLASSES, WIDTH, requires_grad=True)

    class Clipped(torch.autograd.Function):  # whose derivative is not linear
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.clone()

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            return slope.clamp(-1e-4, 1e-4)

    def dropped(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(x @ w.t(), 0.5), targets())

    def clipped(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(Clipped.apply(x @ w.t()), targets())

    for step in (dropped, clipped):
        joint = tile_joint(joint_of(step, x, w), Tiling(4))
        if joint is None:
            continue
        torch.manual_seed(3)
        schedule = Planner(joint).plain.graph_schedule
        in_tiles = tr.checkpoint(step, policy=FixedSchedule(schedule, joint))
        ours = torch.autograd.grad(in_tiles(x, w), [x, w])
        torch.manual_seed(3)
        theirs = torch.autograd.grad(step(x, w), [x, w])
        assert_close(list(ours), list(theirs))


def test_small_values_stay_whole():
    x = torch.randn(8, 16, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return torch.log_softmax(x @ x.t(), 1).sum()

    assert tile_joint(joint_of(step, x), Tiling(4)) is None
