"""Check every rule that a typed graph obeys."""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from torchremat import _torch
from torchremat.core.avals import Aval
from torchremat.errors import GraphError
from torchremat.graph.inplace import is_mutable
from torchremat.graph.nodes import attribute
from torchremat.graph.notes import notes_of
from torchremat.tracing.input_spec import InputSpec
from torchremat.typed_graph.equations import Number
from torchremat.typed_graph.printing import format_graph
from torchremat.typed_graph.typed_graph import TypedGraph

# Lines of a graph before and after the fault in a message; chosen by hand.
_CONTEXT = 4
_KINDS = {"placeholder", "get_attr", "call_function", "output"}


def check_graph(g: TypedGraph) -> None:
    """Raise `GraphError` with the rule, and the graph round the fault, if `g` breaks one.

    Placeholders come first, constants before inputs, and one output last. Each operator reads what
    stands before it, and writes to nothing. Names are unique. Every noted aval is the one that the
    operator returns for inputs of the noted avals, on fake tensors. Bodies obey the same rules.

    After `jax.core.check_jaxpr`.
    """
    _Checker(g.graph_module, len(g.consts)).run()
    _check_signature(g)


def _check_signature(g: TypedGraph) -> None:
    checker = _Checker(g.graph_module, len(g.consts))
    if len(g.const_nodes) < len(g.consts):
        checker.fail(None, f"there are {len(g.consts)} constants, but no placeholder for each")
    for node, const in zip(g.const_nodes, g.consts, strict=True):
        if Aval.of(const) != Aval.of(node.meta["val"]):
            checker.fail(
                node, f"the constant {node.name} is {Aval.of(const)}, but noted as {_noted(node)}"
            )
    positions = range(len(g.consts) + len(g.input_nodes))
    if any(i not in positions for i in g.writes) or len(set(g.writes)) != len(g.writes):
        checker.fail(None, f"writes {g.writes} are not different constants or inputs")
    for what, structure, count in (
        ("inputs", g.in_structure, len(g.input_nodes)),
        ("outputs", g.out_structure, len(g.outputs)),
    ):
        if structure.num_values != count:
            checker.fail(
                None, f"the graph has {count} {what}, its structure {structure.num_values}"
            )
    for i, value in zip(g.writes, g.written, strict=True):
        target = (*g.const_nodes, *g.input_nodes)[i]
        if not isinstance(value, fx.Node) or _noted(value) != _noted(target):
            checker.fail(target, f"what is written to {target.name} has not its aval")
    for value in g.outputs:
        if not isinstance(value, fx.Node | Number):
            checker.fail(None, f"the output {value!r} is neither a value nor a number")


class _Checker:
    """Checks one graph; a body is checked by a checker of its own, given its inputs."""

    def __init__(
        self, module: fx.GraphModule, num_consts: int = 0, *, is_body: bool = False
    ) -> None:
        self.module = module
        self.num_consts = num_consts
        self.is_body = is_body
        self.values: dict[fx.Node, Any] = {}
        self.names: dict[str, fx.Node] = {}

    def run(self) -> None:
        nodes = list(self.module.graph.nodes)
        self._check_order(nodes)
        with _torch.isolate(), _torch.new_fake_mode(), torch.no_grad():
            for node in nodes:
                self._check_node(node)

    def fail(self, node: fx.Node | None, rule: str) -> NoReturn:
        """Raise with the rule that is broken and the graph where it is."""
        source = notes_of(node).source if node is not None else None
        place = f" (from {source})" if source is not None else ""
        raise GraphError(f"{rule}{place}:\n{self._excerpt(node)}")

    def _excerpt(self, node: fx.Node | None) -> str:
        try:
            text = format_graph(self.module, num_consts=self.num_consts, mark=node)
        except Exception:  # a broken graph may have no typed form
            text = str(self.module.graph)
        lines = text.splitlines()
        marked = [i for i, line in enumerate(lines) if line.endswith("<--")]
        if not marked or len(lines) <= 2 * _CONTEXT + 3:
            return text
        start, end = max(1, marked[0] - _CONTEXT), min(len(lines) - 1, marked[0] + _CONTEXT + 1)
        gaps = ("    ..." if start > 1 else None, "    ..." if end < len(lines) - 1 else None)
        shown = [lines[0], gaps[0], *lines[start:end], gaps[1], lines[-1]]
        return "\n".join(line for line in shown if line is not None)

    def _check_order(self, nodes: list[fx.Node]) -> None:
        kinds = [node.op for node in nodes]
        if kinds.count("output") != 1 or kinds[-1] != "output":
            self.fail(
                None, f"a graph has one output node, the last; this has {kinds.count('output')}"
            )
        num_inputs = kinds.count("placeholder")
        if "placeholder" in kinds[num_inputs:]:
            late = next(n for n in nodes[num_inputs:] if n.op == "placeholder")
            self.fail(late, f"the input {late.name} comes after an operator")
        for node in nodes:
            if node.op not in _KINDS:
                self.fail(node, f"{node.name} is a {node.op}, not one of {sorted(_KINDS)}")
            if node.name in self.names:
                self.fail(node, f"two nodes are called {node.name}")
            for used in node.all_input_nodes:
                if self.names.get(used.name) is not used:
                    self.fail(
                        node, f"{node.name} reads {used.name}, which does not stand before it"
                    )
            self.names[node.name] = node

    def _check_node(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._check_input(node)
        elif node.op == "get_attr":
            self.values[node] = self._check_attribute(node)
        elif node.op == "call_function":
            if is_mutable(node):
                self.fail(node, f"{node.target} writes to its arguments")
            self.values[node] = self._check_call(node)
        else:
            for value in _flat(node.args[0]):
                if isinstance(value, fx.Node) and not isinstance(value.meta.get("val"), Tensor):
                    self.fail(value, f"the output {value.name} is not a tensor")

    def _check_attribute(self, node: fx.Node) -> Any:
        try:
            value = attribute(self.module, str(node.target))
        except AttributeError:
            self.fail(node, f"{node.name} reads {node.target}, which the module lacks")
        if isinstance(value, fx.GraphModule):
            _Checker(value, is_body=True).run()
        elif not isinstance(value, nn.Module):
            self.fail(node, f"{node.name} is a {type(value).__name__}: tensors are constants")
        return value

    def _check_call(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        try:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            self.fail(node, f"{node.name} cannot run on what it reads ({error})")
        given, noted = _avals(result), _noted(node)
        if given != noted:
            self.fail(node, f"{node.name} gives {given}, but is noted as {noted}")
        return result

    def _check_input(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            self.values[node] = InputSpec.of(value).empty().detach()
        elif not self.is_body or node.users:  # else a number that PyTorch hands to a `cond`
            self.fail(node, f"the input {node.name} has no aval")


def _noted(node: fx.Node) -> Any:
    return _avals(node.meta.get("val"))


def _avals(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Aval.of(value)
    if isinstance(value, tuple | list):
        return [_avals(item) for item in value]
    return value


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        yield from value
    else:
        yield value
