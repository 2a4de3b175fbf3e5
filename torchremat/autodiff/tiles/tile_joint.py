"""Rewrite a joint graph so that its largest values are never whole.

    logits = mm(x, w)                         t = tiled_p(body, layout, x, w, target)
    loss = cross_entropy(logits, target)  ->  loss, dx1, dw1 = t[0], t[1], t[2]
    dlogits = loss_gradient(ct, logits)       dx = mul(dx1, ct)
    dx, dw = mm(dlogits, w.T), ...            dw = mul(dw1, ct)

A tile makes its rows of the logits once: its gradients follow at once, for a cotangent of 1, since
the backward pass is linear in a cotangent that is a number. Where a region reads cotangents of
another kind, its operators in the backward pass make the rows again, in tiles of their own.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.rewrites.encodings import encode_saved_values, undo_encodings
from torchremat.autodiff.tiles.early_slices import slice_early
from torchremat.autodiff.tiles.growth import TileRegion, count_bytes, find_seeds, grow_from
from torchremat.autodiff.tiles.loop_segments import segment_loops
from torchremat.autodiff.tiles.loss_rules import compute_weight_sums
from torchremat.autodiff.tiles.one_pass import (
    find_late,
    is_sound,
    make_early,
    may_split,
    split_by_pass,
)
from torchremat.autodiff.tiles.scale_op import scale_gradient
from torchremat.autodiff.tiles.tiled_op import tiled_p
from torchremat.autodiff.tiles.write_region import NoTilesError, write_region
from torchremat.graph.inplace import is_mutable
from torchremat.graph.nodes import is_item
from torchremat.graph.notes import notes_of, set_notes
from torchremat.graph.symbolic_sizes import shapes_in

# Of smaller values tiles spare less than the calls of their operators are worth.
_LEAST_NBYTES = 1 << 20
# A value has tiles if it is at least this part of the largest.
_WORTH = 1 / 16


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a joint graph is cut in tiles, and its loops in segments.

    Attributes:
        num_tiles: of each region; 0 for none.
        again: whether regions whose gradients have to wait for cotangents have tiles too: their
            backward pass makes all that is in them again.
        num_segments: of each loop; 0 for loops as they are.
    """

    num_tiles: int
    again: bool = False
    num_segments: int = 0


def tile_joint(joint: Joint, tiling: Tiling) -> Joint | None:
    """The joint graph with its loops and large values cut; `None` if there are none to be cut."""
    cut = segment_loops(joint, tiling.num_segments) if tiling.num_segments else None
    tiled = _tile_values(cut or joint, tiling) if tiling.num_tiles else None
    return tiled and replace(tiled, untiled=joint) if tiled else cut


def _tile_values(joint: Joint, tiling: Tiling) -> Joint | None:
    skipped: set[str] = set()
    while True:
        copy, _ = joint.copy()
        undo_encodings(copy.module.graph)  # bits do not lie as the tiles of a value do
        compute_weight_sums(copy.module.graph)
        copy = copy.translate(slice_early(copy.module.graph, _find_least(copy)))
        tiler = _Tiler(copy, tiling, skipped)
        failed = tiler.run()
        if failed is None:
            if not tiler.num_regions:
                return None
            encode_saved_values(tiler.joint.module.graph)
            return tiler.joint
        skipped.add(failed)


def _find_least(joint: Joint) -> int:
    # where sizes vary, they may be larger than when the graph was traced
    return _LEAST_NBYTES if shapes_in(joint.module) is None else 0


class _Tiler:
    def __init__(self, joint: Joint, tiling: Tiling, skipped: Collection[str]) -> None:
        self.joint = joint
        self.tiling = tiling
        self.num_regions = 0
        self._skipped = skipped
        self._done: set[fx.Node] = set()
        """The members of regions: those that are cut, and those that cannot be."""
        self._late = find_late(joint)

    def run(self) -> str | None:
        """Cut all regions. Returns the name of a value whose region turns out not to be cut.

        The graph has changed then, and is of no use.
        """
        for seed in self._find_seeds():
            region = None if seed in self._done else grow_from(seed)
            if region is None:
                continue
            self._done.update(region.members)
            try:
                self._cut(region)
            except NoTilesError:
                return seed.name
        return None

    def _find_seeds(self) -> list[fx.Node]:
        entries = (*self.joint.outputs, *self.joint.returned_gradients)
        results = {n for n in entries if isinstance(n, fx.Node)}
        results.update(value for _, value in self.joint.mutations)
        seeds = find_seeds(self.joint.module.graph, results, _find_least(self.joint))
        most = max(map(count_bytes, seeds), default=0)
        worth = [seed for seed in seeds if count_bytes(seed) >= most * _WORTH]
        return [seed for seed in worth if seed.name not in self._skipped]

    def _cut(self, region: TileRegion) -> None:
        late = self._late
        cotangent = make_early(self.joint, region, late) if is_sound(region) else None
        if cotangent is not None:
            self._write([region], late, cotangent)
        elif late.isdisjoint(region.members):
            if is_sound(region):
                self._write([region], late)
        elif self.tiling.again and may_split(region, late):
            self._write(split_by_pass(region, late), late)

    def _write(
        self, regions: list[TileRegion], late: set[fx.Node], cotangent: fx.Node | None = None
    ) -> None:
        new: dict[fx.Node, fx.Node] = {}
        for region in regions:
            is_early = cotangent is not None or late.isdisjoint(region.members)
            found = write_region(region, self.tiling.num_tiles, is_forward=is_early)
            new |= found
        if cotangent is not None:
            new |= {n: _scale(n, made, cotangent) for n, made in new.items() if n in late}
        for node, made in new.items():
            node.replace_all_uses_with(made)
        self.joint = self.joint.translate(new)
        self.num_regions += len(regions)
        self._erase_unread({m for region in regions for m in region.members})
        sort_graph(self.joint.module.graph)
        self._late = find_late(self.joint)

    def _erase_unread(self, members: Collection[fx.Node]) -> None:
        """Erase what only tiles compute now."""
        graph = self.joint.module.graph
        unread = {*members, *(n for m in members for n in m.all_input_nodes)}
        for node in reversed(list(graph.nodes)):
            if node in unread and node.op == "call_function" and not node.users:
                graph.erase_node(node)
                self._done.add(node)


def _scale(node: fx.Node, made: fx.Node, cotangent: fx.Node) -> fx.Node:
    """The gradient `node`, of `made`, which is for a cotangent of 1."""
    with node.graph.inserting_before(node):
        scaled = node.graph.call_function(scale_gradient, (made, cotangent))
    scaled.meta["val"] = made.meta["val"].detach()
    set_notes(scaled, notes_of(node))
    return scaled


def sort_graph(graph: fx.Graph) -> None:
    """Put the nodes into an order in which each comes after what it reads, close to theirs.

    Raises `NoTilesError` if operators that draw or write would run in another order.
    """
    before = list(graph.nodes)
    place = {node: i for i, node in enumerate(before)}
    waits = {node: len(node.all_input_nodes) for node in before}
    ready = [place[node] for node, count in waits.items() if not count]
    order: list[fx.Node] = []
    while ready:
        node = before[heapq.heappop(ready)]
        order.append(node)
        for user in node.users:
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, place[user])
    if [*filter(_has_place, order)] != [*filter(_has_place, before)]:
        raise NoTilesError
    for previous, node in pairwise(order):
        previous.append(node)


def _has_place(node: fx.Node) -> bool:
    """Whether a node has to stay before and after others of its kind."""
    target = node.target
    if node.op != "call_function" or is_item(node) or target is tiled_p:
        return node.op in ("placeholder", "output")
    if not isinstance(target, _torch.OpOverload) or target.namespace not in ("aten", "torchremat"):
        return True
    return is_mutable(node) or torch.Tag.nondeterministic_seeded in target.tags
