"""Drawn values: those of a forward and a backward graph, and those of several programs in one.

`ValueBuilder` makes them of nodes; `concatenate_values` and `move_within` combine those of several
modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from torchremat.core.avals import Aval
from torchremat.graph.nodes import base_of, call_of, is_item, is_view, results_of
from torchremat.graph.notes import notes_of
from torchremat.graph.ops import packet_name
from torchremat.planning.cost_model import CostModel
from torchremat.planning.memory.simulate import roles_of_results
from torchremat.planning.memory.timeline import Timeline
from torchremat.remat.offload.copies import COPIES, start_fetch
from torchremat.remat.tracing.input_labels import InputLabel
from torchremat.remat.values.scope import ScopedValue
from torchremat.tracing.modules.module_paths import below
from torchremat.viz.picture.backward_modules import Operators, backward_modules
from torchremat.viz.picture.picture import DrawnValue


@dataclass(frozen=True)
class ProgramNotes:
    """Facts on the graphs of a program that their nodes do not have."""

    decisions: Mapping[str, str]
    reasons: Mapping[str, str]
    labels: Mapping[str, InputLabel]
    timeline: Timeline | None
    cost_model: CostModel | None
    inputs: tuple[str, ...] = ()
    num_consts: int = 0
    inside: Mapping[str, ScopedValue] = field(default_factory=dict)
    """The values that checkpoints inside save, by the names of the nodes that return them."""

    def storages(self) -> dict[str, int]:
        """The bytes of each value by its name; of one computed twice, the larger."""
        found: dict[str, int] = {}
        for lifetime in self.timeline.lifetimes if self.timeline else ():
            value = lifetime.value
            found[value.name] = max(value.nbytes, found.get(value.name, 0))
        return found


class ValueBuilder:
    def __init__(self, notes: ProgramNotes) -> None:
        self.notes = notes
        self.storages = notes.storages()
        self.values: list[DrawnValue] = []
        self.numbers: dict[str, int] = {}
        self.results: set[str] = set()
        self.sources: dict[str, str] = {}
        """The input that each gradient is the gradient of, by their names."""

    def of(
        self, forward: fx.GraphModule, backward: fx.GraphModule | None
    ) -> tuple[DrawnValue, ...]:
        nodes = _nodes_of(forward)
        names = {node.name for node in nodes}
        later = [] if backward is None else [n for n in _nodes_of(backward) if n.name not in names]
        self.sources = _sources_of_gradients(self.notes.inputs, backward)
        modules = backward_modules(self._operators([*nodes, *later]))
        roles = roles_of_results(forward)
        results = results_of(forward)
        if roles is not None:
            results = [r for r, role in zip(results, roles, strict=True) if role == "output"]
        self.results = {base_of(r).name for r in results if isinstance(r, fx.Node)}
        for i, node in enumerate(nodes):
            is_const = i < self.notes.num_consts or self._is_parameter(node)
            self._add(node, "forward", modules[node.name], is_const)
        if backward is not None:
            results = results_of(backward)
            self.results = {base_of(r).name for r in results if isinstance(r, fx.Node)}
        for node in later:
            self._add(node, "backward", modules[node.name], False)
        return tuple(self.values)

    def _operators(self, nodes: Sequence[fx.Node]) -> Operators:
        known = {
            n.name: notes_of(n).module or "" for n in nodes if notes_of(n).phase != "backward"
        } | {name: value.module for name, value in self.notes.inside.items()}
        found = {name: known[source] for name, source in self.sources.items() if known.get(source)}
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            if node.name not in known and node.name not in found:
                module = _module_of_counterpart(node, by_name, known)
                if module is not None:
                    found[node.name] = module
        return Operators(
            {n.name: [i.name for i in n.all_input_nodes] for n in nodes},
            frozenset(n.name for n in nodes if is_item(n) or (is_view(n) and _reads_one(n))),
            frozenset(n.name for n in nodes if n.op == "placeholder"),
            known | found,
        )

    def _add(self, node: fx.Node, phase: str, module: str, is_const: bool) -> None:
        self.numbers[node.name] = len(self.values)
        value = node.meta.get("val")
        kind = self._kind(node, phase, is_const)
        computed = node.op == "call_function"
        inside = self.notes.inside.get(node.name)
        source = inside.source if inside else notes_of(node).source
        self.values.append(
            DrawnValue(
                name=node.name,
                label=self._label(node),
                op=_op_name(inside.call if inside else node),
                phase=phase,
                kind=kind,
                module=module,
                source=str(source or "") if phase == "forward" else "",
                aval=str(Aval.of(value)) if isinstance(value, Tensor) else "",
                nbytes=self._nbytes(node, value),
                seconds=self._seconds(node) if computed else None,
                reason=self._reason(node),
                reads=tuple(
                    self.numbers[n.name] for n in node.all_input_nodes if n.name in self.numbers
                ),
            )
        )

    def _is_parameter(self, node: fx.Node) -> bool:
        """Whether it is a parameter; a tensor that a function closes over is, without a label."""
        label = self.notes.labels.get(node.name)
        if label is not None:
            return label.kind == "parameter"
        return node.op == "placeholder" and node.name.startswith("captured_")

    def _label(self, node: fx.Node) -> str:
        if node.name in self.notes.inside:
            return self.notes.inside[node.name].op
        if is_item(node):
            return f"{self._label(call_of(node))}[{node.args[1]}]"
        if node.op == "call_function":
            return packet_name(node.target).removeprefix("aten.").removeprefix("higher_order.")
        label = self.notes.labels.get(node.name)
        return node.name if label is None else label.text

    def _kind(self, node: fx.Node, phase: str, is_const: bool) -> str:
        name = node.name
        if node.op == "get_attr":
            return "constant"
        if node.op == "placeholder":
            return "parameter" if is_const else "input"
        if is_view(node) or _has_no_memory(node):
            return "view"
        if name in self.results:
            return "output" if phase == "forward" else "gradient"
        return self.notes.decisions.get(name, "temporary")

    def _reason(self, node: fx.Node) -> str:
        if node.name in self.sources:
            source = self.sources[node.name]
            label = self.notes.labels.get(source)
            return f"the gradient of {source if label is None else label.text}"
        if node.target in COPIES:
            return "brought back from the host" if node.target is start_fetch else ""
        return self.notes.reasons.get(node.name, "")

    def _nbytes(self, node: fx.Node, value: Any) -> int:
        if is_view(node) or _has_no_memory(node) or not isinstance(value, Tensor):
            return 0
        if node.name in self.storages:
            return self.storages[node.name]
        return Aval.of(value).nbytes

    def _seconds(self, node: fx.Node) -> float | None:
        model = self.notes.cost_model
        if model is None or is_item(node) or node.target in COPIES:  # copies run beside operators
            return None
        return model.seconds(node)


def _nodes_of(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op != "output"]


def _sources_of_gradients(inputs: Sequence[str], backward: fx.GraphModule | None) -> dict[str, str]:
    """The input of each gradient, by their names; of a gradient of several inputs the first."""
    results = [] if backward is None else results_of(backward)
    found: dict[str, str] = {}
    if len(results) == len(inputs):
        for name, result in zip(inputs, results, strict=True):
            if isinstance(result, fx.Node):
                found.setdefault(result.name, name)
                found.setdefault(base_of(result).name, name)
    return found


def _module_of_counterpart(
    node: fx.Node, forward: Mapping[str, fx.Node], known: Mapping[str, str]
) -> str | None:
    """The module of the operator that an `..._backward` is the derivative of.

    That operator made one of the values that it reads, or reads one.
    """
    name, is_derivative, _ = _base_of_op(node).partition("_backward")
    if not is_derivative:
        return None
    for value in (forward[n.name] for n in node.all_input_nodes if n.name in known):
        for other in (call_of(value), *value.users):
            if other.name in known and _base_of_op(other) in (name, f"{name}_forward"):
                return known[other.name]
    return None


def _base_of_op(node: fx.Node) -> str:
    if node.op != "call_function":
        return ""
    return packet_name(node.target).removeprefix("aten.").strip("_")


def _reads_one(node: fx.Node) -> bool:
    return len(node.all_input_nodes) == 1


def _op_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return ""
    if node.target in COPIES:
        return packet_name(node.target)
    return "getitem" if is_item(node) else str(node.target)


def _has_no_memory(node: fx.Node) -> bool:
    """Whether it copies to the host, or returns a fetched copy: neither allocates on the device."""
    return node.target in COPIES and node.target is not start_fetch


_NAMED = ("input", "parameter", "constant")


def concatenate_values(parts: Sequence[tuple[str, Sequence[DrawnValue]]]) -> tuple[DrawnValue, ...]:
    """The values of all programs, each within the module of that name.

    The forward passes come first, then the backward passes, that of the last module first.

    >>> def value(name, phase, *reads):
    ...     facts = "sin", "aten.sin.default", phase, "saved", "", "", "", 4, None, ""
    ...     return DrawnValue(name, *facts, reads)
    >>> step = [value("x", "forward"), value("dx", "backward", 0)]
    >>> [(v.name, v.module, v.reads) for v in concatenate_values([("a", step), ("b", step)])]
    [('a:x', 'a', ()), ('b:x', 'b', ()), ('b:dx', 'b', (1,)), ('a:dx', 'a', (0,))]
    """
    order = [
        (part, i)
        for phase, numbers in (
            ("forward", range(len(parts))),
            ("backward", reversed(range(len(parts)))),
        )
        for part in numbers
        for i, value in enumerate(parts[part][1])
        if value.phase == phase
    ]
    places = {which: place for place, which in enumerate(order)}
    found = []
    for part, i in order:
        name, values = parts[part]
        reads = tuple(places[part, read] for read in values[i].reads)
        value = move_within(name, values[i])
        found.append(replace(value, name=f"{name}:{value.name}", reads=reads))
    return tuple(found)


def move_within(name: str, value: DrawnValue) -> DrawnValue:
    label = below(name, value.label) if value.kind in _NAMED and not value.op else value.label
    return replace(value, module=below(name, value.module), label=label)
