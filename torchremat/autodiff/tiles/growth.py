"""The operators that run in tiles: those that make and read one large value, and others as large.

    logits = mm(x, w)        f32[8192, 128256]        logp = log_softmax(logits, 1)
    loss = nll_loss(logp)    f32[]                    dlogits = loss_gradient(..., logp)
    dx = mm(dlogits, w.T)    f32[8192, 4096]          dw = mm(dlogits.T, x)

A region grows from `logp`, along rows, to what reads it and to large values that it is made of. It
ends at values that are much smaller: they are inputs and results of tiles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from torch import fx

from torchremat import _torch
from torchremat.autodiff.tiles import loss_rules  # noqa: F401 its rules are registered
from torchremat.autodiff.tiles.cuts import Cut, Rows, is_equal, num_rows, shape_of
from torchremat.autodiff.tiles.tile_rule import TileRule
from torchremat.autodiff.tiles.tile_rules import rule_of
from torchremat.graph.nodes import base_of, call_of, is_item, is_view

# A value this many times smaller than that from which a region grows ends the region. A hidden
# layer is 3.5 or 4 times as wide as the stream that it is added to, and half precision is half.
MUCH_SMALLER = 3
# Numbers for each row are this many times smaller than rows, if not more.
_STATISTICS = 64
# From so many small values on, what a region leads to is another part of the model.
_MOST_BETWEEN = 50


def count_bytes(node: fx.Node) -> int:
    """The bytes of the memory that a value lies in; 0 if it is not a tensor."""
    shape, value = shape_of(base_of(node)), base_of(node).meta.get("val")
    if value is None or not hasattr(value, "dtype"):
        return 0
    number = 1
    for size in shape:
        number *= _torch.hint_of(size)
    return number * int(value.dtype.itemsize)


@dataclass(eq=False)
class TileRegion:
    """Operators that run in tiles, and how each value that they make or read lies in them.

    Attributes:
        members: the calls, views and items inside, each with the rule of its operator.
        cuts: of each value inside, and of each that is read.
        num_rows: how many rows there are; perhaps an expression of symbols.
    """

    seed: fx.Node
    rows: Rows
    members: dict[fx.Node, TileRule | None] = field(default_factory=dict)
    cuts: dict[fx.Node, Cut] = field(default_factory=dict)

    @property
    def num_rows(self) -> object:
        return num_rows(self.seed, self.rows)

    @cached_property
    def inputs(self) -> list[fx.Node]:
        """The values that members read in tiles and that are made outside."""
        read = (n for member in self.members for n in member.all_input_nodes)
        return [n for n in dict.fromkeys(read) if n not in self.members and n in self.cuts]

    @cached_property
    def results(self) -> list[fx.Node]:
        """The values of members that are read outside; of views, those that they lie in."""
        read = [m for m in self.members if any(u not in self.members for u in m.users)]
        tensors = [m for m in read if m in self.cuts]
        return list(dict.fromkeys(self._inner_base(m) for m in tensors))

    def forget_borders(self) -> None:
        """Find `inputs` and `results` anew, since members read other values."""
        self.__dict__.pop("inputs", None)
        self.__dict__.pop("results", None)

    def _inner_base(self, node: fx.Node) -> fx.Node:
        while is_view(node) and node.args[0] in self.members:
            node = node.args[0]  # type: ignore[assignment]
        return node

    def lies_in_rows(self) -> bool:
        """Whether rows of several dims are as one dim is, in the memory of inputs and results."""
        results = [self.cuts[n] for n in self.results]
        return all(_is_one_dim(n, self.cuts[n]) for n in self.inputs) and all(
            rows.are_neighbours for rows in results if isinstance(rows, Rows)
        )

    def count_spared_bytes(self) -> int:
        """The bytes of values that are never whole."""
        made = {m for m in self.members if m in self.cuts and not is_view(m)}
        return sum(count_bytes(m) for m in made.difference(self.results))


def _is_one_dim(node: fx.Node, cut: Cut) -> bool:
    if not isinstance(cut, Rows):
        return True
    value = node.meta["val"]
    return all(
        is_equal(value.stride(a), value.stride(b) * value.shape[b]) for a, b in pairwise(cut.dims)
    )


def grow_from(seed: fx.Node) -> TileRegion | None:
    """The region that spares most, of those with other dims of `seed` for rows; `None` if none."""
    found = [grow_along([seed], rows) for rows in _candidates(len(shape_of(seed)))]
    regions = [r for r in found if seed in r.members and seed not in r.results and r.lies_in_rows()]
    return max(regions, key=TileRegion.count_spared_bytes, default=None)


def grow_along(seeds: Sequence[fx.Node], rows: Rows) -> TileRegion:
    """The region that grows from values of about the same size, which all have these rows."""
    return _Growth(seeds, rows).run()


def _candidates(num_dims: int) -> Iterator[Rows]:
    """Rows to try, those of most dims first: all but one, or neighbours."""
    for other in reversed(range(num_dims)):
        if num_dims > 1:
            yield Rows(tuple(d for d in range(num_dims) if d != other))
    for count in range(num_dims - 2, 0, -1):
        for start in range(num_dims - count + 1):
            yield Rows(tuple(range(start, start + count)))


class _Growth:
    def __init__(self, seeds: Sequence[fx.Node], rows: Rows) -> None:
        self.region = TileRegion(seeds[0], rows)
        self.region.cuts.update(dict.fromkeys(seeds, rows))
        self._least = count_bytes(seeds[0]) // MUCH_SMALLER
        self._queue = list(seeds)

    def run(self) -> TileRegion:
        done: set[fx.Node] = set()
        while self._queue:
            value = self._queue.pop()
            if value in done or count_bytes(value) <= self._least:
                continue
            done.add(value)
            self._add(call_of(value))
            for user in value.users:
                self._add(user)
        self._take_between()
        return self.region

    def _take_between(self) -> None:
        """Take in what leads from the region back into it, such as statistics of its rows."""
        region = self.region
        between = self._find_between()
        if not 0 < len(between) <= _MOST_BETWEEN:
            return
        members, cuts = dict(region.members), dict(region.cuts)
        for node in sorted(between):
            self._add(node)
        if not all(n in region.members for n in between):
            region.members, region.cuts = members, cuts
        region.forget_borders()

    def _find_between(self) -> set[fx.Node]:
        """The small values outside that are computed of members, and of which members are."""
        members = self.region.members
        most = count_bytes(self.region.seed) // _STATISTICS
        after: set[fx.Node] = set()
        stack = [user for member in members for user in member.users]
        while stack and len(after) <= _MOST_BETWEEN:
            node = stack.pop()
            if node not in members and node not in after and 0 < count_bytes(node) <= most:
                after.add(node)
                stack += node.users
        found: set[fx.Node] = set()
        stack = [n for n in after if any(user in members for user in n.users)]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += [n for n in node.all_input_nodes if n in after]
        return found

    def _add(self, node: fx.Node) -> None:
        """Take `node` into the region, if its operator lets rows through as they lie."""
        region = self.region
        rule = None if node in region.members or is_item(node) else rule_of(node)
        assigned = None if rule is None else rule.infer(node, region.cuts)
        if rule is None or assigned is None:
            return
        pairs = list(assigned)
        if any(region.cuts.get(n, cut) != cut for n, cut in pairs) or not _agree(pairs):
            return
        region.cuts.update(pairs)
        region.members[node] = rule
        region.members.update((n, None) for n, _ in pairs if is_item(n) and n.args[0] is node)
        self._queue += [n for n, cut in pairs if isinstance(cut, Rows)]


def _agree(pairs: Sequence[tuple[fx.Node, Cut]]) -> bool:
    """Whether a tensor that is read twice lies in tiles in one way."""
    return len(dict(pairs)) == len(set(pairs))


def find_seeds(graph: fx.Graph, results: set[fx.Node], least: int) -> list[fx.Node]:
    """The values of more than `least` bytes, the largest first, that are not returned."""
    bases = {base_of(node) for node in results}
    made = [n for n in graph.nodes if n.op == "call_function" and not is_view(n) and n not in bases]
    large = [n for n in made if count_bytes(n) > least and not isinstance(_value(n), tuple | list)]
    return sorted(large, key=count_bytes, reverse=True)


def _value(node: fx.Node) -> object:
    return node.meta.get("val")
