"""The bytes alive at each operator of a forward and a backward graph, without running them.

It counts the storages of the functions that `graph/codegen.py` makes of the graphs: each once, from
the operator that makes one until the last tensor in it is dropped.

    forward         alive         backward           alive
    y = mm(x, w)    y             c = cos(y)         s, y, ct, c      s is an output,
    s = sin(y)      y, s          g = mul(ct, c)     s, ct, c, g      y was saved,
    return s, y                   dw = mm(xT, g)     s, g, dw         ct was read for the last time

Inputs and parameters, which outlive the step, are not counted. An offloaded value is alive until it
is copied, and again from when it begins to come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchremat.errors import ArgumentTypeError, GraphError
from torchremat.graph.nodes import results_of
from torchremat.graph.notes import roles_of
from torchremat.planning.memory.interpreter import (
    MemoryInterpreter,
    is_freed_at_last_reader,
    storages_in,
)
from torchremat.planning.memory.timeline import Timeline


def simulate(
    forward_graph: fx.GraphModule,
    backward_graph: fx.GraphModule | None = None,
    *,
    device: torch.device | str | None = None,
) -> Timeline:
    """The bytes alive at each operator of a step that runs `forward_graph` and `backward_graph`.

    On the CPU they are those that a dispatch mode counts. On a GPU they are those requested from
    the allocator, apart from the workspaces of kernels. Sizes that vary count as when traced.

    A placeholder of the backward graph with the name of a node of the forward graph is that value.
    Any other is a cotangent. It is alive to its last reader; that of a scalar, a loss, through the
    whole backward pass, since autograd holds it. Results of the forward graph that the backward
    graph does not take are outputs, alive to the end of the step, and so are gradients. A result
    that is there once more than it is taken is an output too. Where the modules have noted roles,
    these decide: of the forward module, for each result, `"output"`, `"write"` or `"residual"`. A
    `"write"` is the new value of an input, alive to the end of the forward pass. Of the backward
    module they are, for each placeholder, `"input"`, `"residual"` (in the same order) or
    `"cotangent"`.

    Args:
        forward_graph: from inputs to a tuple of outputs and what the backward graph reads. It has
            ATen operators, each node with its value, a fake tensor, in `meta["val"]`.
        backward_graph: from what it reads of the forward graph, and cotangents, to gradients.
        device: the kind of device whose memory is counted, `"cuda"` say; `None` counts them all.

    Returns:
        The `Timeline` of the step.

    Raises:
        TypeError: if an argument is no `fx.GraphModule`.
        GraphError: (a `ValueError`) if a node lacks its value, or the graphs do not fit together.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(lambda x: x.sin().exp().sum())(torch.ones(256))    # 1024 bytes
    >>> timeline = simulate(g.graph_module)
    >>> timeline.live                            # sin; sin and exp; exp and the sum
    (1024, 2048, 1028)
    >>> print(timeline)
    peak 2.00 KiB at exp (forward, 2 of 3); 0 B saved by the forward pass
      1.00 KiB sin (temporary)
      1.00 KiB exp (temporary)
    """
    _check(forward_graph, "forward_graph")
    if backward_graph is not None:
        _check(backward_graph, "backward_graph")
    links = _Links.between(forward_graph, backward_graph)
    interpreter = MemoryInterpreter(None if device is None else torch.device(device).type)
    placeholders = forward_graph.graph.find_nodes(op="placeholder")
    results = interpreter.run(forward_graph, [None] * len(placeholders))
    outputs = [r for r, role in zip(results, links.roles, strict=True) if role == "output"]
    interpreter.hold(outputs, "output")
    residuals = [r for r, role in zip(results, links.roles, strict=True) if role == "residual"]
    interpreter.hold(residuals, "saved")
    interpreter.release(results)
    saved = {id(s): s.nbytes for s in storages_in(residuals) if s.category == "saved"}
    away = {id(s): s.host_nbytes for s in storages_in(residuals)}
    if backward_graph is not None:
        interpreter.phase = "backward"
        interpreter.computed = frozenset(n.name for n in forward_graph.graph.nodes)
        operands = [
            interpreter.cotangent(node)
            if source is None
            else None
            if source < 0
            else results[source]
            for node, source in zip(links.placeholders, links.sources, strict=True)
        ]
        interpreter.hold(operands)
        interpreter.release(residuals)
        placed = zip(links.placeholders, links.sources, operands, strict=True)
        for node, source, memory in placed:
            if source is None and is_freed_at_last_reader(node):
                interpreter.release(memory)
        interpreter.hold(interpreter.run(backward_graph, operands), "gradient")
    return interpreter.timeline(sum(saved.values()), sum(away.values()))


def _check(graph: Any, name: str) -> None:
    if not isinstance(graph, fx.GraphModule):
        raise ArgumentTypeError(
            f"simulate reads graphs, {name} an fx.GraphModule, but it was given {type(graph)!r}. "
            "Of a function: make_graph(fun)(*args).graph_module"
        )


@dataclass(frozen=True)
class _Links:
    """Roles of the forward graph's results, and sources of the backward graph's placeholders.

    A source is the position of a result, -1 for an input of the forward graph, or `None` for a
    cotangent.
    """

    roles: tuple[str, ...]
    placeholders: tuple[fx.Node, ...]
    sources: tuple[int | None, ...]

    @classmethod
    def between(cls, forward: fx.GraphModule, backward: fx.GraphModule | None) -> "_Links":
        results = results_of(forward)
        placeholders = () if backward is None else backward.graph.find_nodes(op="placeholder")
        given = None if backward is None else roles_of(backward)
        roles = roles_of_results(forward)
        if roles is not None and given is not None:
            return cls(roles, tuple(placeholders), _sources_by_order(roles, given))
        positions = {r.name: i for i, r in enumerate(results) if isinstance(r, fx.Node)}
        others = {n.name: n.op for n in forward.graph.nodes if n.name not in positions}
        sources = tuple(_source_by_name(p, positions, others) for p in placeholders)
        if roles is None:
            taken = {source for source in sources if source is not None}
            roles = tuple("residual" if i in taken else "output" for i in range(len(results)))
        return cls(roles, tuple(placeholders), sources)


def _sources_by_order(roles: Sequence[str], given: Sequence[str]) -> tuple[int | None, ...]:
    residuals = [i for i, role in enumerate(roles) if role == "residual"]
    if given.count("residual") != len(residuals):
        raise GraphError(
            f"the graphs do not fit together: the forward graph gives {len(residuals)} residuals, "
            f"and the backward graph takes {given.count('residual')}. Give simulate two of one "
            "program"
        )
    rest = iter(residuals)
    return tuple(
        next(rest) if role == "residual" else -1 if role == "input" else None for role in given
    )


def _source_by_name(
    placeholder: fx.Node, positions: dict[str, int], others: dict[str, str]
) -> int | None:
    """The last result of that name: where it is there twice, the first is an output."""
    name = placeholder.name
    if name in positions:
        return positions[name]
    op = others.get(name)
    if op is None:
        return None if placeholder.users or "val" in placeholder.meta else -1
    if op == "call_function" and placeholder.users:
        raise GraphError(
            f"the backward graph takes {name}, which the forward graph computes but does not give: "
            f"its results are {', '.join(positions) or 'none'}. Add it to them, or rename the "
            "placeholder if it is a cotangent"
        )
    return -1


def roles_of_results(graph: fx.GraphModule) -> tuple[str, ...] | None:
    """The roles of the results of a forward graph; `None` if it has no notes of them."""
    roles = roles_of(graph)
    return None if roles is None or "cotangent" in roles or "input" in roles else roles
