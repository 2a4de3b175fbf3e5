"""`tiled_p`: an operator that runs its body for some rows at a time.

    tiled_p(body, layout, x, w)      x: rows cut; w: whole
    for each tile:  y, loss = body(x[rows], w)
                    result 0: y is written to its rows of one tensor
                    result 1: losses are added up

A tile runs the kernels of the joint graph on fewer rows. Sums over tiles are added one after
another, from the first rows to the last. Vectors and numbers of half precision are added in
`float32`. Matrices are added in their own dtype, since a wider one would double what they take.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.codegen import Runner, compile_graph
from torchremat.graph.nodes import body_of
from torchremat.graph.notes import graph_notes_of, note_graph
from torchremat.graph.reuse import Reuse


class TileResult(NamedTuple):
    """How a result is made of those of the body.

    Attributes:
        kind: `"rows"` are written one after another; a `"sum"` is added up. A `"product"` is a sum
            of matrix products, each of which is added where the sum is.
        row_dim: the dim of rows, if it has them.
    """

    kind: str
    row_dim: int = 0


class TileLayout(NamedTuple):
    """The tiles of a call: how many, and how its operands and results lie in them.

    Attributes:
        num_tiles: tiles of equal size, of which the last may be smaller.
        operands: for each operand the dims that are rows, in rising order, or `None`.
        results: a `TileResult` for each.
    """

    num_tiles: int
    operands: tuple[tuple[int, ...] | None, ...]
    results: tuple[TileResult, ...]


class TiledOp(_torch.HigherOrderOperator):
    """Runs a body in tiles: `tiled_p(body, layout, *operands)`, with `body` a `GraphModule`."""

    def __init__(self) -> None:
        super().__init__("tiled_p")  # type: ignore[no-untyped-call]

    def __call__(
        self, body: fx.GraphModule, layout: TileLayout, /, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        if _torch.functorch_is_active():  # which is to see the operators, none of them in place
            return run_tiles(
                compile_graph(split_products(body, layout), "tile", Reuse()), layout, operands
            )
        if _torch.innermost_proxy_mode() is not None:
            return super().__call__(body, layout, *operands)  # type: ignore[no-any-return,no-untyped-call]
        return run_tiles(_runner_of(body, layout), layout, operands)


def _runner_of(body: fx.GraphModule, layout: TileLayout) -> Runner:
    runner: Runner | None = graph_notes_of(body).runner
    if runner is None:
        runner = compile_graph(split_products(body, layout), "tile")
        note_graph(body, runner=runner)
    return runner


def split_products(body: fx.GraphModule, layout: TileLayout) -> fx.GraphModule:
    """The body as it runs: of each product that is added up, it gives both factors."""
    graph = fx.Graph()
    results = graph.graph_copy(body.graph, {})
    assert isinstance(results, tuple)
    given: list[Any] = []
    for node, result in zip(results, layout.results, strict=True):
        if result.kind == "product":
            assert isinstance(node, fx.Node)
            given += node.args
        else:
            given.append(node)
    graph.output(tuple(given))
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function":
            graph.erase_node(node)
    return fx.GraphModule(body, graph)


def describe_tiles(call: fx.Node) -> str:
    """How many tiles a call in a graph has, of how many rows, and what of it is bit-equal."""
    layout = call.args[1]
    assert isinstance(layout, TileLayout)
    inputs = body_of(call).graph.find_nodes(op="placeholder")
    pairs = zip(inputs, layout.operands, strict=True)
    size = next(node.meta["val"].shape[rows[0]] for node, rows in pairs if rows is not None)
    return (
        f"{layout.num_tiles} tiles of {_torch.hint_of(size)} rows or fewer, one after another; "
        "sums over tiles round in another order"
    )


def run_tiles(
    run: Callable[[list[Any]], tuple[Any, ...]], layout: TileLayout, operands: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Run the tiles one after another; the results, each in a tensor of its own."""
    merged = [
        x if rows is None else _merge_dims(x, rows)
        for x, rows in zip(operands, layout.operands, strict=True)
    ]
    dims = [None if rows is None else rows[0] for rows in layout.operands]
    num_rows = next(x.size(d) for x, d in zip(merged, dims, strict=True) if d is not None)
    size = -(-num_rows // layout.num_tiles) or 1
    totals = [_make_total(result, num_rows) for result in layout.results]
    for start in range(0, num_rows or 1, size):
        count = min(size, num_rows - start)
        tiles = [
            x if d is None else x.narrow(d, start, count) for x, d in zip(merged, dims, strict=True)
        ]
        made = list(run(tiles))
        for total in totals:
            total.add(made, start)
        del made
    return tuple(total.value() for total in totals)


def _merge_dims(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Let `dims` be one, in the place of the first."""
    last = dims[0] + len(dims) - 1
    return x.movedim(tuple(dims), tuple(range(dims[0], last + 1))).flatten(dims[0], last)


class _Total(ABC):
    """A result while tiles are added to it."""

    so_far: Tensor | None = None

    @abstractmethod
    def add(self, made: list[Tensor], start: int) -> None:
        """Take the part of the tile that begins at row `start` from the front of `made`."""

    def value(self) -> Tensor:
        assert self.so_far is not None
        return self.so_far


class _TotalOfRows(_Total):
    def __init__(self, row_dim: int, num_rows: int) -> None:
        self._row_dim = row_dim
        self._num_rows = num_rows

    def add(self, made: list[Tensor], start: int) -> None:
        tile = made.pop(0)
        count = tile.size(self._row_dim)
        if count == self._num_rows:
            self.so_far = tile
            return
        if self.so_far is None:
            shape = list(tile.shape)
            shape[self._row_dim] = self._num_rows
            self.so_far = tile.new_empty(shape)
        self.so_far.narrow(self._row_dim, start, count).copy_(tile)


class _TotalSum(_Total):
    _dtype: torch.dtype | None = None

    def add(self, made: list[Tensor], start: int) -> None:
        tile = made.pop(0)
        self._dtype = tile.dtype
        if tile.dim() < 2 and tile.dtype in (torch.bfloat16, torch.float16):
            tile = tile.float()
        self.so_far = tile if self.so_far is None else self.so_far.add_(tile)

    def value(self) -> Tensor:
        return super().value().to(self._dtype)


class _TotalProduct(_Total):
    def add(self, made: list[Tensor], start: int) -> None:
        a, b = made.pop(0), made.pop(0)
        if self.so_far is None:
            self.so_far = torch.mm(a, b)
        elif _torch.functorch_is_active():  # it has no batching rule for `addmm_`
            self.so_far = torch.addmm(self.so_far, a, b)
        else:
            self.so_far.addmm_(a, b)


def _make_total(result: TileResult, num_rows: int) -> _Total:
    if result.kind == "rows":
        return _TotalOfRows(result.row_dim, num_rows)
    return _TotalProduct() if result.kind == "product" else _TotalSum()


tiled_p = TiledOp()
_torch.register_simple_rules(tiled_p, tiled_p)
