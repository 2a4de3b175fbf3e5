"""Reading pictures off plans, reports and graphs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from torchremat.autodiff.bodies import FunctionBody
from torchremat.avals import Aval
from torchremat.errors import GraphError
from torchremat.graph.aliases import base_of, is_item, is_view
from torchremat.graph.ops import packet_name
from torchremat.graph.typed_graph import TypedGraph
from torchremat.planning.cost_model import CostModel
from torchremat.planning.plan import Plan, human_seconds
from torchremat.planning.simulate import simulate
from torchremat.planning.steps import graphs_of
from torchremat.planning.timeline import Timeline
from torchremat.remat.bound import InputLabel, labels_of_state
from torchremat.remat.program import FunctionProgram
from torchremat.remat.report import Report, Row, human_bytes
from torchremat.viz.modules import Operators, backward_modules
from torchremat.viz.picture import Picture, Value

Drawable = Plan | TypedGraph | Report | fx.GraphModule
"""What can be drawn."""


def picture_of(
    drawable: Drawable, *, cost_model: CostModel | None = None, title: str | None = None
) -> Picture:
    """What there is to draw of a plan, a traced function, a report or a graph.

    Args:
        drawable: a `Plan`, a `TypedGraph`, a `Report` of `explain`, or an `fx.GraphModule`.
        cost_model: what operators cost; by default that of the plan, if it has one.
        title: what it is a picture of.

    Raises:
        TypeError: if `drawable` is none of these.
        PlanError: (a `ValueError`) for a plan that was loaded, which has no graphs.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(lambda x: x.sin().cos())(torch.ones(4))
    >>> [(value.label, value.kind, value.nbytes) for value in picture_of(g).values]
    [('x', 'input', 16), ('sin', 'temporary', 16), ('cos', 'output', 16)]
    """
    if isinstance(drawable, Plan):
        return _of_plan(drawable, cost_model, title or "A plan")
    if isinstance(drawable, Report):
        return _of_report(drawable, cost_model, title or "A report")
    if isinstance(drawable, TypedGraph):
        graph = drawable.graph_module
        return _of_graph(graph, cost_model, title or "A graph", len(drawable.consts))
    if isinstance(drawable, fx.GraphModule):
        return _of_graph(drawable, cost_model, title or "A graph", 0)
    raise TypeError(
        f"{drawable!r} ({type(drawable).__name__}) cannot be drawn: give a Plan (tr.plan(f, x, "
        "budget=...)), a Report (tr.explain(f, x)), a TypedGraph (tr.make_graph(f)(x)) or an "
        "fx.GraphModule of ATen operators"
    )


# --- plans ---------------------------------------------------------------------------------------


def _of_plan(plan: Plan, cost_model: CostModel | None, title: str) -> Picture:
    timeline = plan.timeline()
    forward, backward = plan.forward_graph, plan.backward_graph
    model = cost_model or getattr(plan, "cost_model", None)
    labels = _labels_of(forward.meta.get("program"))
    told = _Told(plan.decisions, _reasons_of(forward), labels, timeline, model)
    values = _Values(told).of(forward, backward)
    resident = plan.peak_bytes - timeline.peak
    base = plan.baseline
    figures = (
        ("peak", human_bytes(plan.peak_bytes)),
        ("peak without", human_bytes(base.peak_bytes)),
        ("budget", human_bytes(plan.budget)),
        ("saved", human_bytes(plan.saved_bytes)),
        ("saved without", human_bytes(base.saved_bytes)),
        ("time added", f"{human_seconds(plan.recompute_seconds)}{_share(plan)}"),
        ("time without", human_seconds(base.seconds)),
    )
    return Picture(
        title,
        figures,
        values,
        timeline,
        _resident(values, resident),
        resident > 0,
        (("budget", plan.budget), ("peak without rematerialisation", base.peak_bytes)),
    )


def _resident(values: Iterable[Value], total: int = 0) -> tuple[tuple[str, int], ...]:
    """Parameters and inputs; what there is beside them of a `total` is an optimizer's."""
    there = [value for value in values if value.phase == "forward"]
    found = {
        f"{kind}s": sum(value.nbytes for value in there if value.kind == kind)
        for kind in ("parameter", "input")
    }
    found["optimizer"] = max(0, total - sum(found.values()))
    return tuple((name, nbytes) for name, nbytes in found.items() if nbytes)


def _share(plan: Plan) -> str:
    seconds = plan.baseline.seconds
    return f" ({100 * plan.recompute_seconds / seconds:.1f} %)" if seconds else ""


def _reasons_of(forward: fx.GraphModule) -> dict[str, str]:
    """Why a program keeps or computes again, by the names of nodes."""
    program = forward.meta.get("program")
    choices = getattr(program, "choices", None)
    if choices is None:
        return {}
    policy = str(choices.policy)
    said = "the plan" if " object at 0x" in policy else policy
    return {n.name: c.reason.replace(policy, said) for n, c in choices.choices.items()}


def _labels_of(program: FunctionProgram | None) -> dict[str, InputLabel]:
    """What the user calls inputs, by the names of nodes, as far as the modules are still there."""
    if program is None:
        return {}
    region = program.region
    nodes = program.root_joint.inputs
    noted = {n.name: n.meta["label"] for n in nodes if "label" in n.meta}
    if noted or not isinstance(region.body, FunctionBody) or region.body.captured is None:
        return noted
    known = labels_of_state(region.paths)
    captured = list(region.body.captured())
    closed_over = nodes[len(region.specs) - len(captured) :]
    pairs = zip(closed_over, captured, strict=True)
    return {node.name: known[id(tensor)] for node, tensor in pairs if id(tensor) in known}


# --- reports -------------------------------------------------------------------------------------


def _of_report(report: Report, cost_model: CostModel | None, title: str) -> Picture:
    program = getattr(report, "program", None)
    sizes = {"saved": 0, "recomputed": 0} | report.by_decision()
    figures = tuple((kind, human_bytes(size)) for kind, size in sizes.items())
    if isinstance(program, FunctionProgram):
        forward, backward = (compiled.module for compiled in graphs_of(program))
        timeline = simulate(forward, backward)
        told = _Told(
            _decisions_of(program), _reasons_of(forward), _labels_of(program), timeline, cost_model
        )
        peak = (("peak", human_bytes(timeline.peak)),)
        values = _Values(told).of(forward, backward)
        return Picture(title, peak + figures, values, timeline, _resident(values))
    return Picture(title, figures, tuple(map(_value_of_row, report)))


def _decisions_of(program: FunctionProgram) -> dict[str, str]:
    """What becomes of the values of the forward pass that the backward pass needs."""
    choices = program.choices.choices
    kept = {base_of(node) for node in program.residuals}
    found: dict[str, str] = {
        node.name: choices[node].decision if node in choices else "saved"
        for node in kept
        if node.op != "placeholder"
    }
    _, backward = graphs_of(program)
    for node in backward.module.graph.nodes:
        if node.op == "call_function" and node.meta.get("phase") == "forward":
            found.setdefault(node.name, "recomputed")
    return found


def _value_of_row(row: Row) -> Value:
    return Value(
        name=row.name,
        label=row.op or row.name,
        op=row.op,
        phase="forward",
        kind=row.decision,
        module=row.module,
        source=str(row.source or ""),
        aval=row.aval,
        nbytes=row.nbytes,
        seconds=None,
        reason=row.reason,
        reads=(),
    )


# --- graphs --------------------------------------------------------------------------------------


def _of_graph(
    graph: fx.GraphModule, cost_model: CostModel | None, title: str, num_consts: int
) -> Picture:
    timeline = _timeline_of(graph)
    told = _Told({}, {}, {}, timeline, cost_model, num_consts)
    values = _Values(told).of(graph, None)
    figures = [("values", str(len(values)))]
    if timeline is not None:
        figures.insert(0, ("peak", human_bytes(timeline.peak)))
    return Picture(title, tuple(figures), values, timeline, _resident(values))


def _timeline_of(graph: fx.GraphModule) -> Timeline | None:
    """`None` for a graph that cannot be simulated: its nodes have no values."""
    try:
        return simulate(graph)
    except GraphError:
        return None


@dataclass(frozen=True)
class _Told:
    """What is known of a graph beside its nodes."""

    decisions: Mapping[str, str]
    reasons: Mapping[str, str]
    labels: Mapping[str, InputLabel]
    timeline: Timeline | None
    cost_model: CostModel | None
    num_consts: int = 0

    def storages(self) -> dict[str, int]:
        """The bytes of each value by its name; of one computed twice, the larger."""
        found: dict[str, int] = {}
        for lifetime in self.timeline.lifetimes if self.timeline else ():
            value = lifetime.value
            found[value.name] = max(value.nbytes, found.get(value.name, 0))
        return found


class _Values:
    """Writes the values of a forward and a backward graph."""

    def __init__(self, told: _Told) -> None:
        self.told = told
        self.storages = told.storages()
        self.values: list[Value] = []
        self.numbers: dict[str, int] = {}
        self.results: set[str] = set()

    def of(self, forward: fx.GraphModule, backward: fx.GraphModule | None) -> tuple[Value, ...]:
        nodes = _nodes_of(forward)
        names = {node.name for node in nodes}
        later = [] if backward is None else [n for n in _nodes_of(backward) if n.name not in names]
        modules = backward_modules(_operators([*nodes, *later]))
        roles = forward.meta.get("roles")
        results = _results_of(forward)
        if roles is not None:
            results = [r for r, role in zip(results, roles, strict=True) if role == "output"]
        self.results = {base_of(r).name for r in results if isinstance(r, fx.Node)}
        for i, node in enumerate(nodes):
            is_const = i < self.told.num_consts or self._is_parameter(node)
            self._add(node, "forward", modules[node.name], is_const)
        if backward is not None:
            results = _results_of(backward)
            self.results = {base_of(r).name for r in results if isinstance(r, fx.Node)}
        for node in later:
            self._add(node, "backward", modules[node.name], False)
        return tuple(self.values)

    def _add(self, node: fx.Node, phase: str, module: str, is_const: bool) -> None:
        self.numbers[node.name] = len(self.values)
        value = node.meta.get("val")
        kind = self._kind(node, phase, is_const)
        computed = node.op == "call_function"
        self.values.append(
            Value(
                name=node.name,
                label=self._label(node),
                op=_op_name(node),
                phase=phase,
                kind=kind,
                module=module,
                source=str(node.meta.get("source") or "") if phase == "forward" else "",
                aval=str(Aval.of(value)) if isinstance(value, Tensor) else "",
                nbytes=self._nbytes(node, value),
                seconds=self._seconds(node) if computed else None,
                reason=self.told.reasons.get(node.name, ""),
                reads=tuple(
                    self.numbers[n.name] for n in node.all_input_nodes if n.name in self.numbers
                ),
            )
        )

    def _is_parameter(self, node: fx.Node) -> bool:
        """Whether it is what a function closes over, which is a parameter if no label tells."""
        label = self.told.labels.get(node.name)
        if label is not None:
            return label.kind == "parameter"
        return node.op == "placeholder" and node.name.startswith("captured_")

    def _label(self, node: fx.Node) -> str:
        """What to call a node: in the user's words, else by its operator."""
        if is_item(node):
            return f"[{node.args[1]}]"
        if node.op == "call_function":
            return packet_name(node.target).removeprefix("aten.").removeprefix("higher_order.")
        label = self.told.labels.get(node.name)
        return node.name if label is None else label.text

    def _kind(self, node: fx.Node, phase: str, is_const: bool) -> str:
        name = node.name
        if node.op == "get_attr":
            return "constant"
        if node.op == "placeholder":
            return "parameter" if is_const else "input"
        if is_view(node):
            return "view"
        if name in self.results:
            return "output" if phase == "forward" else "gradient"
        return self.told.decisions.get(name, "temporary")

    def _nbytes(self, node: fx.Node, value: Any) -> int:
        if is_view(node) or not isinstance(value, Tensor):
            return 0
        if node.name in self.storages:
            return self.storages[node.name]
        return Aval.of(value).nbytes

    def _seconds(self, node: fx.Node) -> float | None:
        model = self.told.cost_model
        return None if model is None or is_item(node) else model.seconds(node)


def _nodes_of(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op != "output"]


def _results_of(graph: fx.GraphModule) -> list[Any]:
    (output,) = graph.graph.find_nodes(op="output")
    results = output.args[0]
    return list(results) if isinstance(results, tuple | list) else [results]


def _operators(nodes: Sequence[fx.Node]) -> Operators:
    known = {n.name: n.meta.get("module") or "" for n in nodes if n.meta.get("phase") != "backward"}
    return Operators(
        {n.name: [i.name for i in n.all_input_nodes] for n in nodes},
        frozenset(n.name for n in nodes if is_item(n) or (is_view(n) and _reads_one(n))),
        frozenset(n.name for n in nodes if n.op == "placeholder"),
        known,
    )


def _reads_one(node: fx.Node) -> bool:
    return len(node.all_input_nodes) == 1


def _op_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return ""
    return "getitem" if is_item(node) else str(node.target)
