"""Slices of rows, taken before the operators that make the rows.

    logits = mm(x, w)                      part = x[:-1]
    loss = f(logits[:-1])              ->  loss = f(mm(part, w))
    dlogits = slice_backward(df)           dx = slice_backward(mm(df, w.T))
    dx, dw = mm(dlogits, w.T), ...         dw = mm(df.T, part)

A region of tiles cannot pass a slice of its rows, so that it would end at `logits`. The operators
before the slice make each row of its own row of what they read, as the rules of tiles say. Those
after `slice_backward` are linear: rows of zeros stay rows of zeros, and add nothing to sums.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.rewrites.added_calls import add_call
from torchremat.autodiff.tiles.cuts import SUM, Cut, Rows, merge_rows, product, shape_of
from torchremat.autodiff.tiles.growth import MUCH_SMALLER, TileRegion, count_bytes, grow_along
from torchremat.graph.nodes import call_of
from torchremat.graph.symbolic_sizes import literal_size

aten = torch.ops.aten

_DERIVATIVES: Mapping[Any, Any] = {
    aten.slice.Tensor: aten.slice_backward.default,
    aten.select.int: aten.select_backward.default,
}

# Where a slice ends that goes on to the last row.
_OPEN_END = (1 << 63) - 1


def slice_early(graph: fx.Graph, least: int) -> dict[fx.Node, fx.Node]:
    """Take slices of rows of values of more than `least` bytes early, in place.

    Returns the new nodes of those that are replaced.
    """
    new: dict[fx.Node, fx.Node] = {}
    with _torch.isolate():  # a trace in progress would record the operators
        for node in list(graph.nodes):
            if node.target not in _DERIVATIVES or not node.users:
                continue
            source: Any = node.args[0]
            if count_bytes(source) > least:
                found = _find_region(_Slice(node))
                if found is not None:
                    new |= _Writer(*found).run()
    return new


class _Slice:
    """A slice of rows, with others that are equal, and with its derivatives.

    Attributes:
        source: what it is a slice of.
        dim: the dim of `source` that is cut.
        alike: all slices that are equal, itself one of them.
        padded: the derivatives, of the shape of `source`.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        source: Any = node.args[0]
        self.source: fx.Node = source
        self.dim = int(node.args[1] % len(shape_of(source))) if len(node.args) > 1 else 0  # type: ignore[operator]
        self.alike = [u for u in source.users if u.target is node.target and self._equals(u)]
        self.padded = list(self._find_derivatives())

    @property
    def range(self) -> list[Any]:
        """The literals of a derivative, after the dim."""
        given: list[Any] = list(self.node.args[2:])
        if self.node.target is aten.slice.Tensor:
            start, end, step = (*given, None, None, None)[:3]
            return [start or 0, _OPEN_END if end is None else end, step or 1]
        return given

    def _equals(self, other: fx.Node) -> bool:
        return other is self.node or repr(other.args[1:]) == repr(self.node.args[1:])

    def _find_derivatives(self) -> Iterator[fx.Node]:
        shape = [literal_size(size) for size in shape_of(self.source)]
        target = _DERIVATIVES[self.node.target]
        for node in self.node.graph.find_nodes(op="call_function", target=target):
            _, sizes, dim, *rest = node.args
            # as text: to compare symbols would settle them
            own = [list(sizes), dim % len(shape), rest]
            if repr(own) == repr([shape, self.dim, self.range]):
                yield node

    def candidates(self) -> Iterator[Rows]:
        """Dims of `source` that may be its rows, with that of the slice among them."""
        num_dims = len(shape_of(self.source))
        for count in range(num_dims - 1, 0, -1):
            for start in range(max(0, self.dim - count + 1), min(self.dim, num_dims - count) + 1):
                yield Rows(tuple(range(start, start + count)))

    def row_sizes(self, rows: Rows, *, of_slice: bool = False) -> list[Any]:
        """The sizes of the dims that are rows, in the source or in the slice."""
        sizes = rows.sizes_in(shape_of(self.source))
        if of_slice:
            at = self.dim - rows.start
            is_there = self.node.target is aten.slice.Tensor
            sizes[at : at + 1] = [shape_of(self.node)[self.dim]] if is_there else []
        return sizes

    def count_rows(self, rows: Rows) -> Any:
        """How many of the rows there are in the slice."""
        return product(self.row_sizes(rows, of_slice=True))


def _find_region(taken: _Slice) -> tuple[_Slice, TileRegion] | None:
    """The operators that make what is sliced, and those that read its derivatives."""
    for rows in taken.candidates():
        region = grow_along([taken.source, *taken.padded], rows)
        if _is_sound(taken, region):
            return taken, region
    return None


def _is_sound(taken: _Slice, region: TileRegion) -> bool:
    """Whether the members can do with the rows of the slice, and little is cut or filled up."""
    members, cuts = region.members, region.cuts
    if call_of(taken.source) not in members:
        return False
    most = count_bytes(taken.source) // MUCH_SMALLER
    if not all(_is_small(n, cuts[n], most) for n in region.inputs if n not in taken.padded):
        return False
    late = _find_late(taken, region)
    early = [n for n in members if n not in late]
    inside = {*members, *taken.alike}
    if any(cuts.get(n) is SUM or _is_read_outside(n, inside) for n in early):
        return False  # of all rows
    if not all(_is_small(n, cuts[n], most) for n in late if _is_read_outside(n, inside)):
        return False
    if any(_is_read_outside(n, inside) for n in taken.padded):
        return False
    return all(_is_linear(node, region, {*late, *taken.padded}) for node in late)


def _is_small(node: fx.Node, cut: Cut, most: int) -> bool:
    """Whether it takes little to cut rows of a value, or to fill it up with others."""
    return not isinstance(cut, Rows) or (count_bytes(node) <= most and cut.are_neighbours)


def _is_read_outside(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    return any(user not in inside for user in node.users)


def _is_linear(node: fx.Node, region: TileRegion, padded: Collection[fx.Node]) -> bool:
    rule = region.members[node]
    return rule is not None and rule.is_linear(
        node, [n for n in node.all_input_nodes if n in padded]
    )


def _find_late(taken: _Slice, region: TileRegion) -> set[fx.Node]:
    """The members that are computed of derivatives of the slice."""
    late = set(taken.padded)
    for node in taken.node.graph.nodes:
        if node in region.members and not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late.difference(taken.padded)


class _Writer:
    """Writes the members anew, for the rows of the slice, which are one dim, as in a tile."""

    def __init__(self, taken: _Slice, region: TileRegion) -> None:
        self._taken = taken
        self._region = region
        rows = region.cuts[taken.source]
        assert isinstance(rows, Rows)
        self._rows = rows
        self._made: dict[fx.Node, fx.Node] = {}
        self._at = taken.node
        """The node before which, and with whose notes, others are inserted."""

    def run(self) -> dict[fx.Node, fx.Node]:
        """Write them. Returns the new nodes of those that are read outside."""
        taken, members = self._taken, self._region.members
        graph = taken.node.graph
        late = _find_late(taken, self._region)
        old = [n for n in graph.nodes if n in members or n in taken.alike]
        new: dict[fx.Node, fx.Node] = {}
        for node in old:
            self._at = node
            with graph.inserting_before(node):
                if node in taken.alike:
                    new[node] = self._reshape(self._made[taken.source], shape_of(node))
                    continue
                self._made[node] = self._copy(node)
                if node in late and _is_read_outside(node, members):
                    new[node] = self._complete(node)
        for node, made in new.items():
            node.replace_all_uses_with(made)
        unread = {*old, *taken.padded}
        for node in [n for n in reversed(graph.nodes) if n in unread]:
            graph.erase_node(node)
        return new

    def __call__(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, self._read)

    def insert(self, op: Any, args: tuple[Any, ...], value: Tensor) -> fx.Node:
        return self._add(op, *args)

    def _read(self, node: fx.Node) -> fx.Node:
        """The node that stands for `node`, which members make or read."""
        if node not in self._made and isinstance(cut := self._region.cuts.get(node), Rows):
            if node in self._taken.padded:
                given: Any = node.args[0]
                part = self._made.get(given, given)
            else:
                whole = self._reshape(node, self._unfold(node, cut))
                taken = self._taken.node
                part = self._add(taken.target, whole, self._dim_in(cut), *taken.args[2:])
            shape = merge_rows(shape_of(node), cut, self._taken.count_rows(self._rows))
            self._made[node] = self._reshape(part, shape)
        return self._made.get(node, node)

    def _unfold(self, node: fx.Node, cut: Rows) -> list[Any]:
        """The shape of `node` with the dims of rows that the source of the slice has."""
        shape = shape_of(node)
        rows = self._taken.row_sizes(self._rows)
        return [*shape[: cut.start], *rows, *shape[cut.dims[-1] + 1 :]]

    def _dim_in(self, cut: Rows) -> int:
        """The dim of the slice in a value with unfolded rows."""
        return cut.start + self._taken.dim - self._rows.start

    def _copy(self, node: fx.Node) -> fx.Node:
        rule = self._region.members[node]
        if rule is None:
            return self._add(node.target, *self(node.args))
        op, args, kwargs = rule.write(node, self._region.cuts, self)
        if op is aten.reshape.default:
            return self._reshape(*args)
        return self._add(op, *args, **kwargs)

    def _complete(self, node: fx.Node) -> fx.Node:
        """The whole of a result: what the slice leaves out is zero."""
        made, cut = self._made[node], self._region.cuts[node]
        rule = self._region.members[node]
        if not isinstance(cut, Rows):
            finish = None if rule is None else rule.finish(node, made)
            return made if finish is None else self._add(finish[0], *finish[1])
        taken, shape, whole = self._taken, shape_of(node), self._unfold(node, cut)
        rows = taken.row_sizes(self._rows, of_slice=True)
        part = self._reshape(made, [*shape[: cut.start], *rows, *shape[cut.dims[-1] + 1 :]])
        backward = _DERIVATIVES[taken.node.target]
        padded = self._add(backward, part, whole, self._dim_in(cut), *taken.range)
        return self._reshape(padded, shape)

    def _reshape(self, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
        if not x.meta["val"].is_contiguous():
            x = self._add(aten.clone.default, x, memory_format=torch.contiguous_format)
        return self._add(aten.view.default, x, list(shape))

    def _add(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return add_call(self._at, op, args, kwargs)
