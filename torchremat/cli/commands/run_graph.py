"""`torchremat graph`."""

from dataclasses import dataclass
from typing import Any

from torchremat.cli.arguments.read_policies import OnePolicyOptions, apply_policy
from torchremat.cli.terminal.output import show, show_progress_of, write_json, write_page
from torchremat.planning.api import plan
from torchremat.remat.op.make_graph import make_graph
from torchremat.tracing.ambient_state import meta_as_cpu
from torchremat.typed_graph.typed_graph import TypedGraph


@dataclass(frozen=True)
class GraphOptions(OnePolicyOptions):
    """The options of `torchremat graph`; `sources` prints the user's line beside each operator."""

    sources: bool = False


def run_graph(options: GraphOptions) -> None:
    """Trace the target and print its graph, or write it as a page or as JSON."""
    target, chosen = options.load()
    fun = apply_policy(target, chosen, options.select)
    with show_progress_of("tracing"), meta_as_cpu():
        graph = make_graph(fun)(*target.args, **target.kwargs)
    if options.html is None and options.json_path != "-":
        show(graph.text(sources=options.sources))
    if options.html is not None:
        drawn = graph
        if options.budget is not None and options.select is None:
            drawn = plan(target.fun, *target.args, budget=options.budget, **target.kwargs)
        write_page(drawn, options.html)
    if options.json_path is not None:
        write_json(equations_of(graph), options.json_path)


def equations_of(graph: TypedGraph) -> dict[str, Any]:
    """A graph as JSON takes it: an entry for each equation, with the user's line.

    >>> import torch
    >>> graph = make_graph(lambda x: torch.sin(x).sum())(torch.ones(3))
    >>> equations_of(graph)["eqns"][0]["outputs"]
    ['b:f32[3]']
    """
    return {
        "in_avals": list(map(str, graph.in_avals)),
        "out_avals": list(map(str, graph.out_avals)),
        "eqns": [
            {
                "op": str(eqn.op),
                "inputs": [f"{value}:{value.aval}" for value in eqn.inputs],
                "outputs": [f"{value}:{value.aval}" for value in eqn.outputs],
                "params": {name: str(value) for name, value in eqn.params.items()},
                "module": eqn.module,
                "source": None if eqn.source is None else str(eqn.source),
            }
            for eqn in graph.eqns
        ],
    }
