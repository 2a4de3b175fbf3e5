"""Slices of rows between a head and its loss: they are taken before the head, which has tiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchremat as tr
from tests.autodiff.tiles.test_tile_joint import (
    assert_close,
    joint_of,
    largest_nbytes,
    run_both,
    tiled_calls,
)
from torchremat.autodiff.tiles.early_slices import slice_early
from torchremat.autodiff.tiles.tile_joint import Tiling, tile_joint
from torchremat.planning.planner import Planner

BATCH, LENGTH, WIDTH, CLASSES = 2, 65, 32, 8192
LOGITS_NBYTES = 4 * BATCH * LENGTH * CLASSES
IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 37 % CLASSES

Loss = Callable[[Tensor], Tensor]


def shifted(z: Tensor) -> Tensor:
    return F.cross_entropy(z[:, :-1].reshape(-1, CLASSES), IDS[:, 1:].reshape(-1))


def of_contiguous(z: Tensor) -> Tensor:
    part = z.float()[..., :-1, :].contiguous()
    return F.cross_entropy(part.view(-1, CLASSES), IDS[..., 1:].flatten(), reduction="sum")


def capped(z: Tensor) -> Tensor:
    return shifted(30 * torch.tanh(z / 30))


def twice(z: Tensor) -> Tensor:
    return shifted(z) + 1e-2 * z[:, :-1].logsumexp(-1).square().mean()


def in_steps(z: Tensor) -> Tensor:
    return F.cross_entropy(z[:, 1:-1:2].flatten(0, 1), IDS[:, 2::2].flatten())


def of_one_sequence(z: Tensor) -> Tensor:
    return F.cross_entropy(z[-1, 3:], IDS[-1, 3:])


def with_classes_second(z: Tensor) -> Tensor:
    return F.cross_entropy(z[:, :-1].transpose(1, 2), IDS[:, 1:], reduction="sum")


def sliced_after_classes_moved(z: Tensor) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2)[:, :, :-1], IDS[:, 1:], reduction="sum")


def with_scales_of_groups(z: Tensor) -> Tensor:
    scales = torch.linspace(0.5, 2, BATCH * 8 * LENGTH).view(BATCH, 8, 1, -1)
    groups = z.transpose(1, 2).unflatten(1, (8, -1)) * scales
    return F.cross_entropy(
        groups.flatten(1, 2).transpose(1, 2)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
    )


SLICED: list[Loss] = [
    shifted,
    of_contiguous,
    capped,
    twice,
    in_steps,
    of_one_sequence,
    with_classes_second,
]


def draw_weights(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((BATCH, LENGTH, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    x, w, b = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    return x, w, b


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("loss", SLICED, ids=lambda loss: loss.__name__)
def test_a_sliced_head_has_tiles(loss, bias):
    x, w, b = draw_weights()

    def step(x: Tensor, w: Tensor) -> Tensor:
        return loss(F.linear(x, w, b if bias else None))

    whole = joint_of(step, x, w)
    joint = tile_joint(whole, Tiling(8))
    assert joint is not None and joint.untiled is whole
    assert len(tiled_calls(joint)) == 1
    assert largest_nbytes(joint.module.graph) < LOGITS_NBYTES / 3
    assert_close(*run_both(step, joint, (x, w), [x, w, b] if bias else [x, w]))


def test_half_precision_before_a_slice():
    x, w, _ = draw_weights(torch.bfloat16)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return shifted(F.linear(x, w).float())

    joint = tile_joint(joint_of(step, x, w), Tiling(4))
    assert joint is not None and largest_nbytes(joint.module.graph) < LOGITS_NBYTES / 3
    assert_close(*run_both(step, joint, (x, w), [x, w]), tolerance=2**-6)


def with_a_penalty_on_all(z: Tensor) -> Tensor:
    return shifted(z) + 1e-2 * z.logsumexp(-1).square().mean()


def with_two_shifts(z: Tensor) -> Tensor:
    return shifted(z) + F.cross_entropy(z[:, :-2].flatten(0, 1), IDS[:, 2:].flatten())


def after_a_sum_over_rows(z: Tensor) -> Tensor:
    return shifted(z - z.mean(1, keepdim=True))


def with_a_sum_of_all(z: Tensor) -> Tensor:
    return shifted(z) + z.detach().square().mean()


def with_choices_among_all(z: Tensor) -> Tensor:
    return shifted(z) + z.detach().argmax(-1).float().mean()


@pytest.mark.parametrize(
    "loss",
    [
        with_a_penalty_on_all,
        with_two_shifts,
        after_a_sum_over_rows,
        with_a_sum_of_all,
        with_choices_among_all,
        sliced_after_classes_moved,
    ],
)
def test_rows_that_others_read_are_made_whole(loss):
    x, w, _ = draw_weights()

    def step(x: Tensor, w: Tensor) -> Tensor:
        return loss(F.linear(x, w))

    copy, _ = joint_of(step, x, w).copy()
    before = str(copy.module.graph)
    assert not slice_early(copy.module.graph, 1 << 20)
    assert str(copy.module.graph) == before
    joint = tile_joint(joint_of(step, x, w), Tiling(4))
    if joint is not None:
        assert_close(*run_both(step, joint, (x, w), [x, w]))


def test_scales_of_rows_and_of_groups_of_classes():
    x, w, _ = draw_weights()

    def step(x: Tensor, w: Tensor) -> Tensor:
        return with_scales_of_groups(F.linear(x, w))

    copy, _ = joint_of(step, x, w).copy()
    joint = copy.translate(slice_early(copy.module.graph, 1 << 20))
    assert_close(*run_both(step, joint, (x, w), [x, w]))


def test_one_entry_of_a_dim():
    x, w, _ = draw_weights()

    def step(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w)[:, -1], IDS[:, -1])

    copy, _ = joint_of(step, x, w).copy()
    joint = copy.translate(slice_early(copy.module.graph, 1 << 20))
    assert largest_nbytes(joint.module.graph) == 4 * CLASSES * WIDTH  # the gradient of `w`
    assert_close(*run_both(step, joint, (x, w), [x, w]))


class Gated(nn.Module):
    """Gate and input of a hidden layer, of one product."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.both, self.down = nn.Linear(64, 2048), nn.Linear(1024, 64)

    def forward(self, x: Tensor) -> Tensor:
        z = self.both(x)
        if self.way == "chunk":
            gate, up = z.chunk(2, -1)
        elif self.way == "split":
            gate, up = z.split([1024, 1024], dim=-1)
        else:
            gate, up = z[..., :1024], z[..., -1024:]
        y: Tensor = self.down(F.silu(gate) * up)
        return y


@pytest.mark.parametrize("way", ["chunk", "split", "slice"])
def test_parts_of_columns_in_tiles(way):
    model, x = Gated(way), torch.randn(4, 256, 64, requires_grad=True)
    whole = joint_of(model, x)
    joint = tile_joint(whole, Tiling(4, again=True))
    assert joint is not None and len(tiled_calls(joint)) == 2
    assert Planner(joint).plain.peak_bytes < 0.4 * Planner(whole).plain.peak_bytes
    assert_close(*run_both(model, joint, (x,), [x, *model.parameters()]))


def test_joined_columns_in_tiles():
    x, w = torch.randn(512, 32, requires_grad=True), torch.randn(2048, 32, requires_grad=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        z = F.linear(x, w)
        turned = torch.cat([-z[:, 1024:], z[:, :1024]], 1)
        return (z * turned.sin()).logsumexp(1).mean()

    joint = tile_joint(joint_of(step, x, w), Tiling(4))
    assert joint is not None and largest_nbytes(joint.module.graph) < 4 * 512 * 2048
    assert_close(*run_both(step, joint, (x, w), [x, w]))


class Shifted(nn.Module):
    """A language model of two layers that shifts its logits, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.embedding(ids).tanh())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_budget_that_is_refused_without_tiles():
    with pytest.raises(tr.errors.BudgetError):
        tr.plan(Shifted(), IDS, budget="40%")
    plan = tr.plan(Shifted(), IDS, budget="40%", tile=True)
    assert plan.peak_bytes <= 0.4 * plan.baseline.peak_bytes


def test_lengths_that_change():
    model = Shifted()
    plain = [run_and_differentiate(model, model, n) for n in (65, 80, 33, 129)]
    wrapped = tr.nn.wrap(model, policy="budget:50%+tile")
    for n, theirs in zip((65, 80, 33, 129), plain, strict=True):
        assert_close(run_and_differentiate(wrapped, model, n), theirs)


def run_and_differentiate(fun: Callable[..., Any], model: nn.Module, length: int) -> list[Tensor]:
    ids = torch.arange(BATCH * length).view(BATCH, length) * 37 % CLASSES
    loss = fun(ids)
    return [loss, *torch.autograd.grad(loss, [*model.parameters()])]
