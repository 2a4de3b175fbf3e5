"""Write a region as one call of `tiled_p` in the place of its operators."""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.autodiff.tiles.cuts import SUM, Cut, Rows, merge_rows, shape_of
from torchremat.autodiff.tiles.growth import TileRegion
from torchremat.autodiff.tiles.tiled_op import TileLayout, TileResult, tiled_p
from torchremat.graph.nodes import ancestors, call_of
from torchremat.graph.notes import notes_of, set_notes
from torchremat.graph.symbolic_sizes import SYMBOLIC, Size, literal_size

aten = torch.ops.aten


class NoTilesError(Exception):
    """The region cannot be written: a size in it varies, or operators would change places."""


def write_region(region: TileRegion, num_tiles: int, *, is_forward: bool) -> dict[fx.Node, fx.Node]:
    """Insert the call, and the nodes that make its results what they were.

    It stands where the first member does, perhaps before what it reads. Returns the new node for
    each result; nodes that read them are the caller's to change. Raises `NoTilesError`.
    """
    body = _BodyWriter(region, num_tiles)
    results = {node: body.add_result(node) for node in region.results}
    module = body.finish()
    graph = region.seed.graph
    owner = graph.owning_module
    assert owner is not None
    name = next(n for i in range(1 << 30) if not hasattr(owner, n := f"tile_body_{i}"))
    owner.add_module(name, module)
    first = next(n for n in graph.nodes if n in region.members)
    layout = TileLayout(
        num_tiles,
        tuple(_dims_of(region.cuts[n]) for n in region.inputs),
        tuple(results.values()),
    )
    notes = replace(notes_of(call_of(region.seed)), phase="forward" if is_forward else "backward")
    with graph.inserting_before(first):
        reference = graph.get_attr(name)
        set_notes(reference, notes)
        call = graph.call_function(tiled_p, (reference, layout, *region.inputs))
        call.meta["val"] = tuple(_merge_result(region, node) for node in results)
        set_notes(call, notes)
        return {
            node: _Result(region, call, i, node, notes).write() for i, node in enumerate(results)
        }


def _dims_of(cut: Cut) -> tuple[int, ...] | None:
    return cut.dims if isinstance(cut, Rows) else None


def _merge_result(region: TileRegion, node: fx.Node) -> Tensor:
    """The fake tensor of a whole result, its rows in one dim."""
    value: Tensor = node.meta["val"]
    cut = region.cuts[node]
    if not isinstance(cut, Rows):
        return value.new_empty(tuple(value.shape))
    return value.new_empty(merge_rows(value.shape, cut, region.num_rows))


class _Result:
    """Writes the nodes that take a result out of the call, as it was outside of tiles."""

    def __init__(self, region: TileRegion, call: fx.Node, i: int, node: fx.Node, notes: Any):
        self._region = region
        self._call = call
        self._index = i
        self._node = node
        self._notes = notes

    def write(self) -> fx.Node:
        node, cut = self._node, self._region.cuts[self._node]
        value = self._call.meta["val"][self._index]
        made = self._add(operator.getitem, (self._call, self._index), value)
        rule = self._region.members[call_of(node)]
        finish = rule.finish(call_of(node), made) if rule is not None and cut is SUM else None
        if finish is not None:
            made = self._add(*finish, node.meta["val"].new_empty(tuple(shape_of(node))))
        if isinstance(cut, Rows) and len(cut.dims) > 1:
            shape = [literal_size(size) for size in shape_of(node)]
            made = self._add(
                aten.view.default, (made, shape), made.meta["val"].view(tuple(shape_of(node)))
            )
        return made

    def _add(self, op: Any, args: tuple[Any, ...], value: Tensor) -> fx.Node:
        made = self._call.graph.call_function(op, args)
        made.meta["val"] = value
        set_notes(made, self._notes)
        return made


class _BodyWriter:
    def __init__(self, region: TileRegion, num_tiles: int) -> None:
        self.region = region
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}
        self._results: list[fx.Node] = []
        total: Any = region.num_rows
        self._size = (total + num_tiles - 1) // num_tiles
        for node in region.inputs:
            copy = self.nodes[node] = self.graph.placeholder(node.name)
            copy.meta = dict(node.meta)
            copy.meta["val"] = self._tile_of(node)
        needed = ancestors(region.results, stop=lambda n: n not in region.members)
        for node in region.seed.graph.nodes:
            if node in region.members and node in needed:
                self._copy(node)

    def add_result(self, node: fx.Node) -> TileResult:
        cut = self.region.cuts[node]
        self._results.append(self.nodes[node])
        if isinstance(cut, Rows):
            return TileResult("rows", cut.start)
        return TileResult("product" if node.target is aten.mm.default else "sum")

    def finish(self) -> fx.GraphModule:
        self.graph.output(tuple(self._results))
        owner = self.region.seed.graph.owning_module
        assert owner is not None
        return fx.GraphModule(owner, self.graph)

    def _copy(self, node: fx.Node) -> None:
        rule = self.region.members[node]
        if rule is None:
            written: tuple[Any, Any, Any] = (node.target, self(node.args), {})
        else:
            written = rule.write(node, self.region.cuts, self)
        op, args, kwargs = written
        if _varies((args, kwargs)):
            raise NoTilesError
        copy = self.nodes[node] = self.graph.create_node(
            "call_function", op, tuple(args), dict(kwargs), node.name
        )
        copy.meta = dict(node.meta)
        copy.meta["val"] = self._tile_of(node)

    def __call__(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, self.nodes.__getitem__)

    def insert(self, op: Any, args: tuple[Any, ...], value: Tensor) -> fx.Node:
        made = self.graph.call_function(op, args)
        made.meta["val"] = value
        return made

    def _tile_of(self, node: fx.Node) -> Any:
        """The fake result of a node in a tile."""
        value = node.meta["val"]
        if isinstance(value, tuple | list):
            return tuple(v.new_empty(tuple(v.shape)) for v in value)
        cut = self.region.cuts.get(node)
        if not isinstance(cut, Rows):
            return value
        return value.new_empty(merge_rows(value.shape, cut, self._size))


def _varies(arguments: Any) -> bool:
    """Whether sizes that vary are among literals: the function of a body takes no symbols."""
    found: list[Any] = []
    fx.node.map_aggregate(arguments, found.append)
    return any(isinstance(a, (Size, *SYMBOLIC)) for a in found)
