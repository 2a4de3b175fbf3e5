"""Exports: a graph as DOT, JSON, a Perfetto trace, and for Google's Model Explorer."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torchremat.core.formatting import human_bytes
from torchremat.errors import PlanError, make_printable
from torchremat.planning.cost_model import CostModel
from torchremat.viz.figure.styles import STACK, STYLES
from torchremat.viz.picture.build import Drawable, picture_of
from torchremat.viz.picture.picture import DrawnValue, Picture

_DOT_SHAPES = {"box": "box", "cut": "note", "slanted": "parallelogram", "hexagon": "hexagon",
               "round": "oval"}  # fmt: skip


def to_dot(plan_or_graph: Drawable, *, title: str | None = None) -> str:
    r"""The graph in the DOT language, a cluster for each module.

    Errors are those of `graph_html`.

    Graphviz takes minutes over a few hundred nodes: for more, `graph_html`.

    >>> import torch, torchremat as tr
    >>> print(to_dot(tr.make_graph(lambda x: x.sin())(torch.ones(4))))
    digraph "A graph" {
      node [style=filled, fontname="sans-serif"]
      x [label="x\nf32[4] 16 B", fillcolor="#69b591", fontcolor="#06231a", shape=parallelogram]
      sin [label="sin\nf32[4] 16 B", fillcolor="#3b4654", fontcolor="#ffffff", shape=box]
      x -> sin
    }
    """
    picture = picture_of(plan_or_graph, title=title)
    lines = [f"digraph {_quote(picture.title)} {{",
             '  node [style=filled, fontname="sans-serif"]']  # fmt: skip
    lines += _dot_modules(_nest_values(picture.values), "  ", "")
    for value in picture.values:
        for read in value.reads:
            lines.append(f"  {_dot_name(picture.values[read])} -> {_dot_name(value)}")
    return "\n".join([*lines, "}"])


def _nest_values(values: tuple[DrawnValue, ...]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for value in values:
        inner = tree
        for part in filter(None, value.module.split(".")):
            inner = inner.setdefault(part, {})
        inner.setdefault("", []).append(value)
    return tree


def _dot_modules(tree: dict[str, Any], indent: str, path: str) -> Iterator[str]:
    for part, inner in tree.items():
        if part == "":
            for value in inner:
                yield f"{indent}{_dot_name(value)} [{_dot_style(value)}]"
            continue
        inside = f"{path}.{part}" if path else part
        yield f"{indent}subgraph {_quote('cluster ' + inside)} {{"
        yield f"{indent}  label={_quote(part)}"
        yield from _dot_modules(inner, indent + "  ", inside)
        yield f"{indent}}}"


def _dot_style(value: DrawnValue) -> str:
    look = STYLES[value.kind]
    size = f" {human_bytes(value.nbytes)}" if value.nbytes else ""
    parts = filter(None, (value.label, f"{value.aval}{size}"))
    label = "\\n".join(_quote(part)[1:-1] for part in parts)
    style = ', style="filled,dashed"' if look.border == "dashed" else ""
    return (
        f'label="{label}", fillcolor="{look.fill}", fontcolor="{look.ink}", '
        f"shape={_DOT_SHAPES[look.shape]}{style}"
    )


def _dot_name(value: DrawnValue) -> str:
    return value.name if value.name.isidentifier() else _quote(value.name)


def _quote(text: str) -> str:
    return '"' + make_printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def to_json(
    plan_or_graph: Drawable, *, title: str | None = None, cost_model: CostModel | None = None
) -> str:
    """The content of the page as JSON; errors are those of `graph_html`.

    An object with `title`, `figures`, `totals` (bytes by kind), `values` (a list of objects with
    the attributes of a value: name, op, phase, kind, module, source, aval, nbytes, seconds, reason,
    and `reads`, the names of what it reads), and `timeline`: for each operator its name, phase and
    the bytes alive, and for each category the bytes alive at each operator; `null` if unknown.

    >>> import json, torch, torchremat as tr
    >>> found = json.loads(to_json(tr.make_graph(lambda x: x.sin())(torch.ones(4))))
    >>> [(value["name"], value["reads"]) for value in found["values"]], found["timeline"]["peak"]
    ([('x', []), ('sin', ['x'])], 16)
    """
    picture = picture_of(plan_or_graph, title=title, cost_model=cost_model)
    names = [value.name for value in picture.values]
    content = {
        "title": picture.title,
        "figures": dict(picture.figures),
        "totals": picture.totals(),
        "values": [asdict(v) | {"reads": [names[i] for i in v.reads]} for v in picture.values],
        "timeline": _timeline_json(picture),
    }
    return json.dumps(content, indent=1)


def _timeline_json(picture: Picture) -> dict[str, Any] | None:
    timeline = picture.timeline
    if timeline is None:
        return None
    return {
        "peak": timeline.peak,
        "saved_bytes": timeline.saved_bytes,
        "points": [asdict(point) for point in timeline],
        "by_category": timeline.by_category(),
        "lifetimes": [asdict(lifetime) for lifetime in timeline.lifetimes],
    }


def to_perfetto(
    plan_or_graph: Drawable, *, title: str | None = None, cost_model: CostModel | None = None
) -> str:
    """The step as a trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

    Each operator is a slice of the time that it takes by the cost model, or of 1 us without one.
    Forward, recomputed and backward operators are threads, and the bytes alive by category are a
    counter. Errors are those of `timeline`.

    >>> import json, torch, torchremat as tr
    >>> trace = json.loads(to_perfetto(tr.make_graph(lambda x: x.sin())(torch.ones(4))))
    >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    ['sin']
    """
    picture = picture_of(plan_or_graph, title=title, cost_model=cost_model)
    if picture.timeline is None:
        raise PlanError(f"{plan_or_graph!r} has no timeline, which a trace is made of")
    return json.dumps({"traceEvents": list(_list_events(picture)), "displayTimeUnit": "ms"})


_THREADS = ("forward", "recomputed", "backward")


def _list_events(picture: Picture) -> Iterator[dict[str, Any]]:
    timeline = picture.timeline
    assert timeline is not None
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": picture.title}}
    for number, thread in enumerate(_THREADS):
        yield {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": thread}}
    stacks = timeline.by_category()
    now = 0.0
    for i, point in enumerate(timeline):
        position = picture.position_of(point.name)
        value = None if position is None else picture.values[position]
        known = value is not None and value.seconds is not None
        took = 1e6 * (value.seconds or 0.0) if value is not None and known else 1.0
        thread = point.phase
        if value is not None and point.phase == "backward" and value.phase == "forward":
            thread = "recomputed"
        yield {
            "ph": "X", "pid": 1, "tid": _THREADS.index(thread), "ts": now, "dur": took,
            "name": point.name if value is None else value.label, "cat": thread,
            "args": {"node": point.name} | _arguments(value),
        }  # fmt: skip
        yield {"ph": "C", "pid": 1, "ts": now, "name": "bytes alive",
               "args": {category: stacks[category][i] for category in STACK}}  # fmt: skip
        now += took


def _arguments(value: DrawnValue | None) -> dict[str, Any]:
    if value is None:
        return {}
    found = {"module": value.module, "shape": value.aval, "bytes": value.nbytes,
            "decision": value.kind, "line": value.source}  # fmt: skip
    return {name: text for name, text in found.items() if text}


def to_model_explorer(
    plan_or_graph: Drawable, *, title: str | None = None, cost_model: CostModel | None = None
) -> str:
    """The graph in the JSON format of Google's Model Explorer, which its viewer opens as a file.

    The forward and the backward pass are two outermost groups, and modules the groups inside.
    Errors are those of `graph_html`.

    >>> import json, torch, torchremat as tr
    >>> made = json.loads(to_model_explorer(tr.make_graph(lambda x: x.sin())(torch.ones(4))))
    >>> [(node["id"], node["namespace"]) for node in made["graphs"][0]["nodes"]]
    [('x', 'forward'), ('sin', 'forward')]
    """
    picture = picture_of(plan_or_graph, title=title, cost_model=cost_model)
    nodes = [
        {
            "id": value.name,
            "label": value.label,
            "namespace": "/".join(filter(None, (value.phase, *value.module.split(".")))),
            "attrs": [
                {"key": key, "value": str(said)}
                for key, said in (
                    ("operator", value.op), ("shape", value.aval), ("bytes", value.nbytes),
                    ("seconds", value.seconds), ("decision", value.kind),
                    ("reason", value.reason), ("line", value.source),
                )
                if said
            ],
            "incomingEdges": [
                {"sourceNodeId": picture.values[read].name, "sourceNodeOutputId": "0",
                 "targetNodeInputId": str(i)}
                for i, read in enumerate(value.reads)
            ],
            "style": {"backgroundColor": STYLES[value.kind].fill},
        }
        for value in picture.values
    ]  # fmt: skip
    content = {"label": picture.title, "graphs": [{"id": picture.title, "nodes": nodes}]}
    return json.dumps(content, indent=1)
