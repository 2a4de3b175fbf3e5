"""Which operators run in place, and those that may not."""

import pytest
import torch
from torch import fx

import torchremat as tr
from tests.helpers import assert_same
from torchremat.graph.codegen import compile_graph, inputs_filled_by
from torchremat.graph.reuse import find_reuse, reuse_in
from torchremat.graph.write_forms import gives_new_memory
from torchremat.measure import LiveBytes

X = torch.arange(24.0).view(4, 6) / 7


def graph_of(fun, *args):
    """The graph of `fun`, without writes, as programs run it."""
    traced = tr.make_graph(fun)(*args or (X,))
    return traced.graph_module


def names_in_place(module: fx.GraphModule) -> set[str]:
    return {node.name for node in find_reuse(module).writes}


def run(module: fx.GraphModule, *args):
    return compile_graph(module)(list(args or (X.clone(),)))


def filled(x):
    buffer = torch.zeros(4, 6)
    buffer[:, 2:4] = x[:, :2] * 2
    buffer[1].add_(1)
    return buffer


def test_a_chain_runs_in_place():
    module = graph_of(filled)
    assert {"slice_scatter", "select_scatter"} <= names_in_place(module)
    with LiveBytes() as memory:
        found = run(module, X)
    assert_same(list(found), [filled(X)])
    assert memory.peak == X.nbytes + 2 * 4 * 4  # the product of two columns


def old_value_is_read(x):
    buffer = x * 1
    before = buffer.clone() * 0 + buffer
    after = torch.slice_scatter(buffer, x[:, :2], 1, 0, 2)
    return before, after, buffer.sin()


def old_value_is_an_output(x):
    buffer = x * 1
    return buffer, torch.slice_scatter(buffer, x[:, :2], 1, 0, 2)


def a_view_is_read(x):
    buffer = x * 1
    row = buffer[2]
    return torch.select_scatter(buffer, x[0], 0, 2), row.exp()


def a_view_is_an_output(x):
    buffer = x * 1
    return buffer[2], torch.select_scatter(buffer, x[0], 0, 2)


def an_input_is_written_to(x):
    return torch.select_scatter(x, x[0] * 2, 0, 2), x.sin()


def the_source_overlaps(x):
    buffer = x * 1
    return torch.slice_scatter(buffer, buffer[:, :4], 1, 1, 5)


def elements_are_shared(x):
    return torch.select_scatter(x[0].expand(4, 6), x[0] * 2, 0, 2)


def two_writes_to_one(x):
    buffer = x * 1
    one = torch.select_scatter(buffer, x[0], 0, 2)
    return one, torch.select_scatter(buffer, x[1], 0, 3)


def put_elsewhere(x):
    buffer = x * 1
    column = torch.ops.aten.copy(buffer[:, 0], x[:, 1])
    return torch.select_scatter(buffer, column, 1, 3)


@pytest.mark.parametrize(
    "fun",
    [
        old_value_is_read,
        old_value_is_an_output,
        a_view_is_read,
        a_view_is_an_output,
        an_input_is_written_to,
        the_source_overlaps,
        elements_are_shared,
    ],
)
def test_what_is_read_later_is_not_written_to(fun):
    module = graph_of(fun)
    assert names_in_place(module) == set()
    x = X.clone()
    assert_same(list(run(module, x)), list(leaves(fun(X))))
    assert_same([x], [X])


@pytest.mark.parametrize("fun", [two_writes_to_one, put_elsewhere])
def test_a_value_is_written_to_once(fun):
    module = graph_of(fun)
    assert len(names_in_place(module)) == 1
    assert_same(list(run(module)), list(leaves(fun(X))))


def leaves(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def test_an_input_is_filled_where_it_is_to_be_written_to():
    module = graph_of(lambda x: (torch.select_scatter(x, torch.ones(6), 0, 2), x.sum() * 0))
    assert find_reuse(module, {0: 0}, ["write", "output"]).inputs_filled == ()  # it is read later
    module = graph_of(lambda x: (torch.select_scatter(x, x[1] * 2, 0, 2),))
    reuse = find_reuse(module, {0: 0}, ["write"])
    assert reuse.inputs_filled == (0,)
    x = X.clone()
    execute = compile_graph(module, reuse=reuse)
    (result,) = execute([x])
    assert inputs_filled_by(execute) == (0,)
    assert result is x
    assert_same([x], [torch.select_scatter(X, X[1] * 2, 0, 2)])


def test_no_residual_lies_in_an_input_that_is_written_to():
    module = graph_of(lambda x: (new := torch.select_scatter(x, x[1] * 2, 0, 2), new[2:]))
    assert find_reuse(module, {0: 0}, ["write", "residual"]).writes == {}
    assert find_reuse(module, {0: 0}, ["write", "write"]).inputs_filled == (0,)


def test_an_operator_of_users_may_hand_on_its_argument():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.conj_physical.default, (x,))
    other = graph.call_function(torch.ops.aten.sin.default, (x,))
    python = graph.call_function(torch.sin, (x,))
    assert [gives_new_memory(n) for n in (x, node, other, python)] == [False, False, True, False]


def test_an_operator_writes_into_a_part_of_a_view():
    """The view stands after the operator in the graph, and before it where the graph runs."""

    def fun(x, buffer):
        torch.sinh(x, out=buffer[1, :, 1:-1])
        return buffer[1].sum()

    x, strided = X, torch.sinh(X, out=torch.zeros(4, 8)[:, 1:-1])
    for policy in ("none", "full"):
        buffer = torch.zeros(2, 4, 8)
        checkpointed = tr.checkpoint(fun, policy=policy)
        checkpointed(x, buffer)
        with LiveBytes() as memory:
            checkpointed(x, buffer)
        assert memory.peak == 4  # the sum
        assert_same(buffer[1, :, 1:-1].clone(), strided.clone())  # the kernel for such a part


def largest_into_parts(x, values, places):
    torch.max(x, 1, out=(values[1, 1:-1], places[0, 1:-1]))
    return values.sum() + places.sum()


def largest_into_what_is_read(x, values, places):
    torch.max(values, 1, out=(values[:, 0], places[0, 1:-1]))
    return x.sum() + places.sum()


def largest_into_one_buffer(x, values, places):
    torch.aminmax(x, dim=1, out=(values[0, 1:-1], values[1, 1:-1]))
    return values.sum()


@pytest.mark.parametrize(
    ("fun", "is_in_place"),
    [
        (largest_into_parts, True),
        (largest_into_what_is_read, False),
        (largest_into_one_buffer, False),
    ],
)
def test_an_operator_writes_all_of_its_results(fun, is_in_place):
    buffers = [[torch.zeros(4, 6), torch.zeros(3, 6, dtype=torch.int64)] for _ in range(2)]
    buffers[0][0] += X
    buffers[1][0] += X
    checkpointed = tr.checkpoint(fun, policy="none")
    for _ in range(2):
        assert_same(checkpointed(X, *buffers[0]), fun(X, *buffers[1]))
        assert_same(*buffers)
    outs = find_outs(checkpointed)
    assert bool(outs) == is_in_place


def find_outs(checkpointed):
    return reuse_in(checkpointed.last_program.forward.module).outs
