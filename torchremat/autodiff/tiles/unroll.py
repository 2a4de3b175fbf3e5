"""Tiles as operators of the graph itself, for compilers: they know no operator that runs a body."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.autodiff.tiles.scale_op import scale_gradient
from torchremat.autodiff.tiles.tiled_op import TileLayout, tiled_p
from torchremat.graph.nodes import body_of, is_item, results_of

aten = torch.ops.aten


def unroll_tiles(module: fx.GraphModule) -> None:
    """Write the operators of each tile into the graph of `module`, in place. Sizes are numbers."""
    graph = module.graph
    for call in graph.find_nodes(op="call_function", target=tiled_p):
        with graph.inserting_before(call):
            results = _Unroller(call).run()
        for item in list(call.users):
            assert is_item(item) and isinstance(item.args[1], int)
            item.replace_all_uses_with(results[item.args[1]])
            graph.erase_node(item)
        reference = call.args[0]
        graph.erase_node(call)
        assert isinstance(reference, fx.Node)
        if not reference.users:
            graph.erase_node(reference)
    for node in graph.find_nodes(op="call_function", target=scale_gradient):
        node.target = aten.mul.Tensor
    module.recompile()


class _Unroller:
    def __init__(self, call: fx.Node) -> None:
        self.call = call
        _, layout, *operands = call.args
        assert isinstance(layout, TileLayout)
        self.layout = layout
        pairs = zip(operands, layout.operands, strict=True)
        self.operands = [self._merge(x, rows) for x, rows in pairs]

    def run(self) -> list[fx.Node]:
        body, layout = body_of(self.call), self.layout
        pairs = zip(self.operands, layout.operands, strict=True)
        num_rows = next(int(x.meta["val"].shape[rows[0]]) for x, rows in pairs if rows is not None)
        size = -(-num_rows // layout.num_tiles) or 1
        parts: list[list[fx.Node]] = [[] for _ in layout.results]
        for start in range(0, num_rows or 1, size):
            tiles = [
                x if rows is None else self._slice(x, rows[0], start, min(start + size, num_rows))
                for x, rows in zip(self.operands, layout.operands, strict=True)
            ]
            for made, part in zip(self._copy_body(body, tiles), parts, strict=True):
                part.append(made)
        return [
            self._join(made, result.row_dim) if result.kind == "rows" else self._add_up(made)
            for made, result in zip(parts, layout.results, strict=True)
        ]

    def _merge(self, operand: Any, rows: tuple[int, int] | None) -> fx.Node:
        if rows is None or rows[1] == 1:
            return operand  # type: ignore[no-any-return]
        value: Tensor = operand.meta["val"].flatten(rows[0], sum(rows) - 1)
        return self._insert(aten.view.default, (operand, list(value.shape)), value)

    def _slice(self, x: fx.Node, dim: int, start: int, end: int) -> fx.Node:
        value = x.meta["val"].narrow(dim, start, end - start)
        return self._insert(aten.slice.Tensor, (x, dim, start, end), value)

    def _copy_body(self, body: fx.GraphModule, tiles: list[fx.Node]) -> list[fx.Node]:
        copies: dict[fx.Node, fx.Node] = {}
        given = iter(tiles)
        for node in body.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(given)
            elif node.op == "call_function":
                copies[node] = self._copy(node, copies)
        return [copies[node] for node in results_of(body)]

    def _copy(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: copies[n])
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        target: Any = node.target
        return self._insert(target, args, target(*values[0], **values[1]), kwargs)

    def _join(self, parts: list[fx.Node], dim: int) -> fx.Node:
        value = torch.cat([part.meta["val"] for part in parts], dim)
        return self._insert(aten.cat.default, (parts, dim), value)

    def _add_up(self, parts: list[fx.Node]) -> fx.Node:
        total = parts[0]
        dtype = total.meta["val"].dtype
        widens = total.meta["val"].dim() < 2 and dtype in (torch.bfloat16, torch.float16)
        if widens:
            parts = [self._cast(part, torch.float32) for part in parts]
        total = parts[0]
        for part in parts[1:]:
            total = self._insert(aten.add.Tensor, (total, part), total.meta["val"])
        return self._cast(total, dtype) if widens else total

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        value = node.meta["val"].to(dtype)
        return self._insert(aten._to_copy.default, (node,), value, {"dtype": dtype})

    def _insert(
        self, op: Any, args: Any, value: Any, kwargs: Mapping[str, Any] | None = None
    ) -> fx.Node:
        made = self.call.graph.call_function(op, tuple(args), dict(kwargs or {}))
        made.meta = {**self.call.meta, "val": value}
        return made
