"""Pictures of plans, reports and graphs, by `picture_of`."""

import reprlib
from collections.abc import Iterable, Sequence

from torch import fx

from torchremat.autodiff.bodies import FunctionBody
from torchremat.core.formatting import human_bytes, human_seconds
from torchremat.errors import ArgumentTypeError, GraphError
from torchremat.graph.nodes import base_of
from torchremat.graph.notes import graph_notes_of, notes_of
from torchremat.planning.cost_model import CostModel
from torchremat.planning.memory.simulate import simulate
from torchremat.planning.memory.timeline import Timeline
from torchremat.planning.plan import Plan
from torchremat.planning.step.traced_step import graphs_of, region_of
from torchremat.policies.builtin import plain_autograd
from torchremat.remat.program.decisions import Decision
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.tracing.input_labels import InputLabel, labels_of_state
from torchremat.remat.values.scope import Scope, ScopedValue
from torchremat.report.explain import ExplainedCall, RanPrograms, decision_inside
from torchremat.report.report import Report
from torchremat.report.report_rows import Row
from torchremat.typed_graph.typed_graph import TypedGraph
from torchremat.viz.picture.picture import DrawnValue, Picture
from torchremat.viz.picture.values import (
    ProgramNotes,
    ValueBuilder,
    concatenate_values,
    move_within,
)

Drawable = Plan | TypedGraph | Report | fx.GraphModule
"""The objects that can be drawn."""


def picture_of(
    drawable: Drawable, *, cost_model: CostModel | None = None, title: str | None = None
) -> Picture:
    """Build the picture of a plan, a traced function, a report or a graph.

    Args:
        drawable: a `Plan`, a `TypedGraph`, a `Report` of `explain`, or an `fx.GraphModule`.
        cost_model: what operators cost; by default that of the plan, if it has one.
        title: the title of the picture.

    Raises:
        TypeError: if `drawable` is none of these.
        PlanError: (a `ValueError`) for a plan that was loaded, which has no graphs.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(lambda x: x.sin().cos())(torch.ones(4))
    >>> [(value.label, value.kind, value.nbytes) for value in picture_of(g).values]
    [('x', 'input', 16), ('sin', 'temporary', 16), ('cos', 'output', 16)]
    """
    if isinstance(drawable, Plan):
        return _build_of_plan(drawable, cost_model, title or "A plan")
    if isinstance(drawable, Report):
        return _build_of_report(drawable, cost_model, title or "A report")
    if isinstance(drawable, TypedGraph):
        graph = drawable.graph_module
        return _build_of_graph(graph, cost_model, title or "A graph", len(drawable.consts))
    if isinstance(drawable, fx.GraphModule):
        return _build_of_graph(drawable, cost_model, title or "A graph", 0)
    raise ArgumentTypeError(
        f"{reprlib.repr(drawable)} ({type(drawable).__name__}) cannot be drawn: give a Plan "
        "(tr.plan(f, x, budget=...)), a Report (tr.explain(f, x)), a TypedGraph "
        "(tr.make_graph(f)(x)) or an fx.GraphModule of ATen operators"
    )


_ON_HOST = "the plan copies it to the host, and back before the backward pass reads it"


def _list_figures(plan: Plan) -> tuple[tuple[str, str], ...]:
    base, updates = plan.baseline, plan.updates_in_backward
    figures = (
        ("peak", human_bytes(plan.peak_bytes)),
        ("peak without", human_bytes(base.peak_bytes)),
        ("budget", human_bytes(plan.budget)),
        ("saved", human_bytes(plan.saved_bytes)),
        ("saved without", human_bytes(base.saved_bytes)),
        ("on the host", human_bytes(plan.offloaded_bytes) if plan.offloaded_bytes else ""),
        ("time added", f"{human_seconds(plan.recompute_seconds)}{_share(plan)}"),
        ("time without", human_seconds(base.seconds)),
        ("updates in backward", str(updates or "")),
        (
            "optimizer's state on the host",
            human_bytes(plan.state_on_host_bytes) if plan.state_on_host_bytes else "",
        ),
    )
    return tuple((name, text) for name, text in figures if text)


def _build_of_plan(plan: Plan, cost_model: CostModel | None, title: str) -> Picture:
    timeline = plan.timeline()
    forward, backward = plan.forward_graph, plan.backward_graph
    model = cost_model or getattr(plan, "cost_model", None)
    labels = _labels_of(graph_notes_of(forward).program)
    inputs = _inputs_of(graph_notes_of(forward).program)
    reasons = _reasons_of(forward)
    reasons |= {name: _ON_HOST for name, kind in plan.decisions.items() if kind == "offloaded"}
    notes = ProgramNotes(plan.decisions, reasons, labels, timeline, model, inputs)
    values = ValueBuilder(notes).of(forward, backward)
    resident = plan.peak_bytes - timeline.peak
    return Picture(
        title,
        _list_figures(plan),
        values,
        timeline,
        _resident(values, resident),
        resident > 0,
        (("budget", plan.budget), ("peak without rematerialisation", plan.baseline.peak_bytes)),
    )


def _resident(values: Iterable[DrawnValue], total: int = 0) -> tuple[tuple[str, int], ...]:
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
    program = graph_notes_of(forward).program
    decisions = getattr(program, "decisions", None)
    if decisions is None:
        return {}
    policy = str(decisions.policy)
    said = "the plan" if " object at 0x" in policy else policy
    if decisions.policy is plain_autograd:
        said = "no checkpoint decides"
    return {n.name: c.reason.replace(policy, said) for n, c in decisions.by_value.items()}


def _inputs_of(program: FunctionProgram | None) -> tuple[str, ...]:
    return () if program is None else tuple(node.name for node in program.root_joint.inputs)


def _labels_of(program: FunctionProgram | None) -> dict[str, InputLabel]:
    """The user's names of inputs, by the names of nodes, as far as the modules are still alive."""
    if program is None:
        return {}
    region = program.region
    nodes = program.root_joint.inputs
    noted = {n.name: label for n in nodes if (label := notes_of(n).label) is not None}
    if noted or not isinstance(region.body, FunctionBody) or region.body.captured is None:
        return noted
    known = labels_of_state(region.paths)
    captured = list(region.body.captured())
    closed_over = nodes[len(region.specs) - len(captured) :]
    pairs = zip(closed_over, captured, strict=True)
    return {node.name: known[id(tensor)] for node, tensor in pairs if id(tensor) in known}


def _build_of_report(report: Report, cost_model: CostModel | None, title: str) -> Picture:
    sizes = {"saved": 0, "recomputed": 0} | report.by_decision()
    figures = tuple((kind, human_bytes(size)) for kind, size in sizes.items())
    programs = _programs_of(report)
    if not programs:
        return Picture(title, figures, tuple(map(_value_of_row, report)))
    drawn = [(name, *_draw(program, cost_model)) for name, program in programs]
    if len(drawn) > 1:  # other operators run between them, and so there is no peak
        return Picture(
            title, figures, concatenate_values([(name, values) for name, values, _ in drawn])
        )
    ((name, values, timeline),) = drawn
    values = tuple(move_within(name, value) for value in values)
    peak = (("peak", human_bytes(timeline.peak)),)
    return Picture(title, peak + figures, values, timeline, _resident(values))


def _draw(
    program: FunctionProgram, cost_model: CostModel | None
) -> tuple[tuple[DrawnValue, ...], Timeline]:
    forward, backward = (compiled.module for compiled in graphs_of(program))
    timeline = simulate(forward, backward)
    inside = _find_saved_inside(program, forward)
    notes = ProgramNotes(
        _decisions_of(program),
        _reasons_of(forward) | {name: decision.reason for name, (_, decision) in inside.items()},
        _labels_of(program),
        timeline,
        cost_model,
        _inputs_of(program),
        inside={name: value for name, (value, _) in inside.items()},
    )
    return ValueBuilder(notes).of(forward, backward), timeline


def _find_saved_inside(
    program: FunctionProgram, forward: fx.GraphModule
) -> dict[str, tuple[ScopedValue, Decision]]:
    scope = Scope.of_program(program, "")
    decisions = {node: decision_inside(node) for node in forward.graph.nodes}
    there = {node.name: node for node in scope.nodes}
    return {
        node.name: (scope.value_of(there[node.name]), decision)
        for node, decision in decisions.items()
        if decision is not None
    }


def _programs_of(report: Report) -> Sequence[tuple[str, FunctionProgram]]:
    """The programs of a report, with their modules; of an explained call plain autograd's."""
    found = report.program
    if isinstance(found, RanPrograms):
        return found.modules
    if isinstance(found, ExplainedCall):
        found.check_still(report)
        found = FunctionProgram(region_of(found.fun, found.args, found.kwargs), plain_autograd)
    return [("", found)] if isinstance(found, FunctionProgram) else []


def _decisions_of(program: FunctionProgram) -> dict[str, str]:
    decisions = program.decisions.by_value
    saved = {base_of(node) for node in program.residuals}
    found: dict[str, str] = {
        node.name: decisions[node].outcome if node in decisions else "saved"
        for node in saved
        if node.op != "placeholder"
    }
    _, backward = graphs_of(program)
    for node in backward.module.graph.nodes:
        if node.op == "call_function" and notes_of(node).phase == "forward":
            found.setdefault(node.name, "recomputed")
    return found


def _value_of_row(row: Row) -> DrawnValue:
    return DrawnValue(
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


def _build_of_graph(
    graph: fx.GraphModule, cost_model: CostModel | None, title: str, num_consts: int
) -> Picture:
    timeline = _timeline_of(graph)
    notes = ProgramNotes({}, {}, {}, timeline, cost_model, num_consts=num_consts)
    values = ValueBuilder(notes).of(graph, None)
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
