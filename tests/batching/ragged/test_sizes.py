"""Sizes of one element that reach operators: the number of each element, never that of another."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import torchremat as tr
from tests.batching.ragged.checks import check, pile_of
from torchremat.batching import Pile, pile_axis
from torchremat.errors import LoopWarning, RaggedError

DRAW = torch.Generator().manual_seed(2)
TABLE = torch.randn(64, 3, dtype=torch.float64, generator=DRAW)
SHORT = TABLE[:6].clone()
MASK = torch.ones(1, 1, 64, 64).tril()
LENGTHS = (5, 17, 3, 12)
PARTS = {
    "first": lambda x, table: x + table[: x.shape[0]],
    "first of too few": lambda x, table: table[:6][: x.shape[0]],
    "rest": lambda x, table: table[x.shape[0] :],
    "last": lambda x, table: x * table[-x.shape[0] :],
    "middle": lambda x, table: table[2 : x.shape[0]],
    "twice as many": lambda x, table: table[: 2 * x.shape[0]].sum(),
    "half": lambda x, table: x[x.shape[0] // 2 :] - table[x.shape[0] // 2 : x.shape[0]],
    "fewer for more": lambda x, table: table[: 20 - x.shape[0]].sum(0),
    "every other": lambda x, table: table[: x.shape[0] : 2],
    "along a later dim": lambda x, table: table.T[:, : x.shape[0]] @ x,
    "narrow": lambda x, table: table.narrow(0, x.shape[0], 4),
    "one": lambda x, table: table[x.shape[0] - 1],
    "one of its own": lambda x, table: x[x.shape[0] // 2, 1],
    "chunks": lambda x, table: x.chunk(2)[0].sum(0) - x.chunk(2)[1].sum(0),
    "split": lambda x, table: x.split([x.shape[0] // 2, x.shape[0] - x.shape[0] // 2])[1],
    "beyond some ends": lambda x, table: torch.cat([x[4:], x[:4], x[-4:]]),
    "written": lambda x, table: torch.zeros(20, 3, dtype=x.dtype).slice_scatter(
        x, 0, 0, x.shape[0]
    ),
}
OTHERS = {
    "roll all": lambda x, table: x.roll(1),
    "roll two dims": lambda x, table: x.roll((1, 2), (0, 1)),
    "roll by a size": lambda x, table: table.roll(x.shape[0], 0),
    "pad to 20": lambda x, table: F.pad(x, (0, 0, 0, 20 - x.shape[0])),
    "pad or cut to 10": lambda x, table: F.pad(x, (0, 0, 0, 10 - x.shape[0])),
    "pad before": lambda x, table: F.pad(x.T, (20 - x.shape[0], 0), value=1.0) @ table[:20],
    "length as a number": lambda x, table: x.sum() / len(x) + x / x.shape[0] + x.shape[0] ** 0.5,
    "linspace": lambda x, table: torch.linspace(0, 1, len(x), dtype=x.dtype)[:, None] * x,
    "mask made": lambda x, table: (x @ x.T).masked_fill(
        torch.tril(torch.ones(len(x), len(x))) == 0, 0.0
    ),
    "mask cut": lambda x, table: (x @ x.T) * MASK[0, 0, : len(x), : len(x)],
    "triangle": lambda x, table: table[:5].tril(x.shape[0] - 4),
    "arange": lambda x, table: table[torch.arange(x.shape[0], 2 * x.shape[0])],
    "asked of all": lambda x, table: x if len(x) <= 64 else x.nope,
    "row of scores": lambda x, table: (x @ x.T)[0, 1:],
    "gradient of a part": lambda x, table: torch.func.grad(
        lambda t: (x * t[: len(x)]).pow(2).sum() + t[len(x)].sum()
    )(table),
    "tangent of a part": lambda x, table: torch.func.jvp(
        lambda t: t[:6][: len(x)].sin(), (table,), (2 * table,)
    )[1],
}


@pytest.mark.parametrize("name", [*PARTS, *OTHERS])
def test_a_size_is_that_of_each_element(name):
    f = (PARTS | OTHERS)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoopWarning)
        check(f, pile_of(LENGTHS, 3), TABLE.clone(), axes=[pile_axis, None])


@pytest.mark.parametrize("name", ["first of too few", "half", "beyond some ends", "roll all"])
def test_a_size_may_be_none_or_one(name):
    check((PARTS | OTHERS)[name], pile_of((4, 0, 1, 9), 3), TABLE.clone(), axes=[pile_axis, None])


@pytest.mark.parametrize("lengths", [(2, 4, 2), (4, 3), (1,), (2, 1)])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, table: x[:-2][:1] / (1 + x.shape[0]),
        lambda x, table: torch.cat([table[3:3], x[:-2][:1]]) * 2,
        lambda x, table: x[:-2].roll(1),
        lambda x, table: x.roll(torch.sym_min(x.shape[0], 4), 0).view(-1).view(-1, 3).T,
        lambda x, table: torch.cat([x[:0], table[: x.shape[0]][:0]]),
    ],
    ids=["one for some", "joined", "rolled", "viewed", "joined nothing"],
)
def test_parts_may_be_none_or_one(f, lengths):
    check(f, pile_of(lengths, 3), TABLE.clone(), axes=[pile_axis, None], loops=True)


def test_a_graph_serves_the_lengths_for_which_all_answers_are_the_same():
    calls = []

    def f(x):
        calls.append(1)
        return SHORT[: x.shape[0]].sum(0)

    each = tr.vmap(f, pile_axis)
    for lengths in ((2, 3), (4, 5, 1), (9, 3), (8, 2), (7, 11), (1, 6)):
        pile = pile_of(lengths, 3)
        torch.testing.assert_close(each(pile), torch.stack([SHORT[:n].sum(0) for n in lengths]))
    assert len(calls) <= 6


@pytest.mark.parametrize(
    "around",
    [lambda f: f, tr.checkpoint, lambda f: tr.jit(f, backend="eager")],
    ids=["none", "checkpoint", "jit"],
)
def test_lengths_that_a_trace_around_hides_are_asked_of_it(around):
    def parts(table, pile):
        return tr.vmap(lambda x: (x * table[: len(x)]).sum(0), pile_axis)(pile)

    function = around(parts)
    for lengths in ((5, 17, 3), (1, 64, 0)):
        pile = pile_of(lengths, 3)
        expected = torch.stack([(x * TABLE[: len(x)]).sum(0) for x in pile.to_list()])
        torch.testing.assert_close(function(TABLE, pile), expected)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, table: x * tr.checkpoint(lambda x: table[: x.shape[0]].sin())(x),
        lambda x, table: tr.checkpoint(lambda t: t[: len(x)].sin().sum(0))(table),
        lambda x, table: tr.checkpoint(lambda x, t: t[:6][: len(x)].sin())(x, table),
    ],
    ids=["argument", "closed over", "some too short"],
)
def test_sizes_in_a_checkpoint(f):
    check(f, pile_of((5, 9, 3), 3), TABLE.clone(), axes=[pile_axis, None])


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda x: x if x.shape[0] > 4 else -x, r"value of a size .* test_sizes.py:\d+"),
        (lambda x: sum(x[i] for i in range(len(x))), r"value of a size .* test_sizes.py:\d+"),
        (lambda x: x[3], r"test_sizes.py:\d+.*differs for s\d+ = "),
        (lambda x: x + TABLE[: len(x) - 1], r"do not fit at test_sizes.py:\d+"),
        (lambda x: x + TABLE[:4], r"do not fit at test_sizes.py:\d+"),
        (lambda x: TABLE[len(x) - 4], r"index .* test_sizes.py:\d+.*counts from the end in some"),
        (lambda x: TABLE[: 4 - len(x)], r"test_sizes.py:\d+.*a bound is negative in some"),
        (lambda x: TABLE.unfold(0, len(x), 1), r"test_sizes.py:\d+"),
        (lambda x: torch.kron(x, TABLE), r"test_sizes.py:\d+.*has no form for (sizes that|such)"),
    ],
)
def test_what_elements_do_differently_is_refused_with_the_line(f, text):
    with pytest.raises(RaggedError, match=text), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tr.vmap(f, pile_axis, pile_axis)(pile_of(LENGTHS, 3))


def test_a_dim_is_not_dropped_in_some_elements():
    pile = Pile.from_list([torch.ones(n, 1) for n in (3, 1)])
    with pytest.raises(RaggedError, match=r"squeeze, at test_sizes.py:\d+ .*, drops a dim"):
        tr.vmap(lambda x: x.squeeze(), pile_axis, pile_axis)(pile)
    each = tr.vmap(lambda x: x.squeeze(-1), pile_axis, pile_axis)(pile)
    assert each.lengths.tolist() == [3, 1]
    ones = Pile.from_list([torch.ones(1, 1), torch.ones(1, 1)], dim=0)
    assert tr.vmap(lambda x: x.squeeze(), pile_axis)(ones).shape == (2,)


def test_an_operator_without_a_rule_for_sizes_runs_in_a_loop():
    with pytest.warns(LoopWarning, match=r"aten.topk, at test_sizes.py:\d+"):
        check(lambda x: x.topk(len(x) // 2, 0).values, pile_of(LENGTHS, 3))


def test_what_is_assumed_of_a_value_is_checked_when_it_is_known():
    each = tr.vmap(lambda n: torch.arange(n).sum())
    assert each(torch.tensor([3, 0, 4])).tolist() == [3, 0, 6]
    with pytest.raises(RaggedError, match=r"used as a size or an index.*s\d+ >= 0 is True"):
        each(torch.tensor([3, -1]))
