"""The operator that runs tiles, and how operators lie in them."""

import pytest
import torch
from torch import Tensor, fx

from torchremat.autodiff.tiles.cuts import WHOLE, Rows, broadcast_cut, merge_dims, result_rows
from torchremat.autodiff.tiles.tile_rules import RULES, rule_of
from torchremat.autodiff.tiles.tiled_op import TileLayout, TileResult, tiled_p

aten = torch.ops.aten


class Body(torch.nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = aten.mm.default(x, w)
        return aten.tanh.default(y), aten.sum.default(y), aten.mm.default(aten.t.default(x), y)


LAYOUT = TileLayout(
    3, ((0, 1), None), (TileResult("rows"), TileResult("sum"), TileResult("product"))
)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 10])
def test_tiles_give_what_one_call_gives(num_rows):
    body = fx.symbolic_trace(Body())
    x, w = torch.randn(2, num_rows, 4), torch.randn(4, 5)
    rows, total, product = tiled_p(body, LAYOUT, x, w)
    y = x.flatten(0, 1) @ w
    torch.testing.assert_close(rows, y.tanh())
    torch.testing.assert_close(total, y.sum())
    torch.testing.assert_close(product, x.flatten(0, 1).t() @ y)


def test_no_rows_at_all():
    rows, total, product = tiled_p(
        fx.symbolic_trace(Body()), LAYOUT, torch.ones(2, 0, 4), torch.ones(4, 5)
    )
    assert rows.shape == (0, 5) and total == 0 and torch.equal(product, torch.zeros(4, 5))


def test_inputs_stay_as_they_are():
    x, w = torch.randn(2, 6, 4), torch.randn(4, 5)
    before = x.clone(), w.clone()
    tiled_p(fx.symbolic_trace(Body()), LAYOUT, x, w)
    assert torch.equal(x, before[0]) and torch.equal(w, before[1])


def test_sums_of_half_precision_are_added_in_single():
    class Sum(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (aten.sum.dim_IntList(x, [0]),)

    x = torch.ones(4096, 1, dtype=torch.bfloat16)
    layout = TileLayout(4096, ((0,),), (TileResult("sum"),))
    (found,) = tiled_p(fx.symbolic_trace(Sum()), layout, x)
    assert found.dtype is torch.bfloat16 and found.item() == 4096  # 256 if each sum is rounded


@pytest.mark.parametrize(
    ("source", "result", "rows", "wanted"),
    [
        ((4, 8, 64), (4, 8, 64), Rows.at(0, 1), Rows.at(0, 1)),
        ((64,), (4, 8, 64), Rows.at(0, 1), WHOLE),
        ((), (4, 8, 64), Rows.at(1), WHOLE),
        ((1, 64), (8, 64), Rows.at(0), WHOLE),
        ((8, 64), (4, 8, 64), Rows.at(1), Rows.at(0)),
        ((1, 8, 64), (4, 8, 64), Rows.at(0, 1), None),
        ((1, 1, 64), (4, 8, 64), Rows.at(0, 1), WHOLE),
        ((1, 8, 1), (4, 8, 64), Rows.at(0, 2), WHOLE),
        ((8, 1), (4, 8, 64), Rows.at(0, 2), WHOLE),
        ((8, 64), (4, 8, 64), Rows.at(0, 1), None),
        ((4, 8, 64), (4, 8, 64), Rows.at(0, 2), Rows.at(0, 2)),
        ((64,), (4, 8, 64), Rows.at(0, 2), None),
        ((4, 8, 64), (2, 4, 8, 64), Rows.at(1, 3), Rows.at(0, 2)),
    ],
)
def test_operands_of_elementwise_operators(source, result, rows, wanted):
    assert broadcast_cut(source, result, rows) == wanted


def test_dims_of_tiles():
    assert merge_dims([-1, 0], 4, Rows.at(1, 2)) == [2, 0]
    assert merge_dims([0, 1, 3], 4, Rows.at(0, 2)) == [0, 1, 2]
    assert result_rows((8, 64), (4, 8, 64), Rows.at(0)) == Rows.at(1)
    assert result_rows((1, 64), (8, 64), Rows.at(0)) is None


def test_rows_move_with_their_dims_and_stay_in_order():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(4, 8, 64)
    for dims, wanted in [((1, 2), Rows.at(0, 2)), ((0, 2), None), ((0, 1), None)]:
        node = graph.call_function(aten.transpose.int, (x, *dims))
        node.meta["val"] = x.meta["val"].transpose(*dims)
        found = RULES[aten.transpose.int].infer(node, {x: Rows.at(0, 1)})
        assert (None if found is None else dict(found)[node]) == wanted


def test_no_rule_is_for_an_operator_that_draws_or_writes():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    for op in (aten.bernoulli.p, aten.rand_like.default, aten.add_.Tensor, aten.relu_.default):
        node = graph.call_function(op, (x,))
        node.meta["val"] = torch.ones(2)
        assert rule_of(node) is None
    for op in RULES:
        assert torch.Tag.nondeterministic_seeded not in op.tags
