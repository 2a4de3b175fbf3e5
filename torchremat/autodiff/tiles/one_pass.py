"""Gradients of a region in the same tiles as its forward pass, before there is a cotangent.

dx = mm(loss_gradient(ct, logp), w.T)  ->  dx1 = mm(loss_gradient(1, logp), w.T);  dx = dx1 * ct
"""

from collections.abc import Collection

import torch
from torch import Tensor, fx

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.tiles.cuts import shape_of
from torchremat.autodiff.tiles.growth import TileRegion
from torchremat.autodiff.tiles.tile_rules import rule_of
from torchremat.graph.nodes import ancestors, is_item
from torchremat.graph.notes import note

aten = torch.ops.aten


def find_late(joint: Joint) -> set[fx.Node]:
    """The nodes that depend on a cotangent."""
    late = {ct for ct in joint.cotangents if ct is not None}
    for node in joint.module.graph.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def make_early(joint: Joint, region: TileRegion, late: Collection[fx.Node]) -> fx.Node | None:
    """Let the region read 1 for its cotangent, if it is a number and all is linear in it.

    Returns the cotangent by which its late results must be multiplied; `None`, and nothing has
    changed, if that is impossible.
    """
    read = [n for n in region.inputs if n in late]
    above = ancestors(read)
    cotangents = [ct for ct in joint.cotangents if ct in above]
    if len(cotangents) != 1 or not above.isdisjoint(region.members):
        return None
    (cotangent,) = cotangents
    assert cotangent is not None
    chain = [n for n in joint.module.graph.nodes if n in above and n in late and n != cotangent]
    linear = [*chain, *(m for m in region.members if m in late)]
    if shape_of(cotangent) or not all(_is_linear(n, late) for n in linear):
        return None
    if any(not shape_of(r) for r in region.results if r in late):
        return None  # a number times a number may be of another dtype
    copies = {cotangent: _insert_one(joint, cotangent)}
    for node in chain:
        with node.graph.inserting_before(node):
            copies[node] = node.graph.node_copy(node, lambda n: copies.get(n, n))
        note(copies[node], phase="forward")
    _read_instead(region, copies)
    return cotangent


def _is_linear(node: fx.Node, late: Collection[fx.Node]) -> bool:
    rule = rule_of(node)
    read = [n for n in node.all_input_nodes if n in late]
    return not is_item(node) and rule is not None and rule.is_linear(node, read)


def _insert_one(joint: Joint, cotangent: fx.Node) -> fx.Node:
    value: Tensor = cotangent.meta["val"]
    first = next(n for n in joint.module.graph.nodes if n.op == "call_function")
    with first.graph.inserting_before(first):
        options = {"dtype": value.dtype, "device": value.device}
        one = first.graph.call_function(aten.full.default, ([], 1.0), options)
    one.meta["val"] = value.new_empty(())
    note(one, phase="forward")
    assert isinstance(one, fx.Node)
    return one


def _read_instead(region: TileRegion, copies: dict[fx.Node, fx.Node]) -> None:
    for old, new in copies.items():
        if old in region.cuts:
            region.cuts[new] = region.cuts[old]
        for user in [u for u in old.users if u in region.members]:
            user.replace_input_with(old, new)
    region.forget_borders()


def may_split(region: TileRegion, late: Collection[fx.Node]) -> bool:
    """Whether `split_by_pass` gives two regions that read nothing of what they make themselves.

    What the second one reads may be computed of results of the first.
    """
    early = {m for m in region.members if m not in late}
    read_early = [n for n in region.inputs if any(user in early for user in n.users)]
    return ancestors(read_early).isdisjoint(early) and ancestors(region.inputs).isdisjoint(
        m for m in region.members if m in late
    )


def split_by_pass(region: TileRegion, late: Collection[fx.Node]) -> list[TileRegion]:
    """The region as one of the forward and one of the backward pass.

    The second has copies of the operators of the first: it makes what it reads again, in tiles.
    """
    early = [m for m in region.members if m not in late]
    if not early or len(early) == len(region.members):
        return [region]
    in_order = [n for n in region.seed.graph.nodes if n in region.members]
    first_late = next(n for n in in_order if n in late)
    copies: dict[fx.Node, fx.Node] = {}
    for node in (n for n in in_order if n not in late):
        with node.graph.inserting_before(first_late):
            copies[node] = node.graph.node_copy(node, lambda n: copies.get(n, n))
    forward = TileRegion(region.seed, region.rows, {m: region.members[m] for m in early})
    forward.cuts = dict(region.cuts)
    members = {copies.get(m, m): rule for m, rule in region.members.items()}
    backward = TileRegion(copies.get(region.seed, region.seed), region.rows, members)
    backward.cuts = region.cuts | {copies[n]: region.cuts[n] for n in copies if n in region.cuts}
    for node, copy in copies.items():
        for user in [u for u in node.users if u in late and u in region.members]:
            user.replace_input_with(node, copy)
    return [forward, backward]


def is_sound(region: TileRegion) -> bool:
    """Whether nothing that the region reads is computed of what it makes."""
    return ancestors(region.inputs).isdisjoint(region.members)
