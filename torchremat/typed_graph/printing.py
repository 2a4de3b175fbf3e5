"""Graphs as text, in the manner of a jaxpr."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.core.avals import dtype_name
from torchremat.graph.nodes import results_of
from torchremat.typed_graph.equations import Eqn, Literal, Names, Number, equations

_INDENT = "    "


def format_graph(
    module: fx.GraphModule,
    *,
    num_consts: int = 0,
    sources: bool = False,
    mark: fx.Node | None = None,
) -> str:
    """The graph as text: constants and inputs, equations, outputs; bodies are indented.

    With `sources`, each equation tells the user's line and the module that ran it. The equation of
    `mark` gets an arrow.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(lambda x: torch.sin(x) * 2.0)(torch.ones(3))
    >>> print(format_graph(g.graph_module))
    { lambda ; a:f32[3]. let
        b:f32[3] = aten.sin a
        c:f32[3] = aten.mul.Tensor b 2.0:f32[]
      in (c,) }
    """
    return "\n".join(_GraphPrinter(sources, mark).graph(module, num_consts))


class _GraphPrinter:
    def __init__(self, sources: bool, mark: fx.Node | None) -> None:
        self.names = Names()
        self.sources = sources
        self.mark = mark

    def graph(self, module: fx.GraphModule, num_consts: int) -> list[str]:
        inputs = [self._declare(n) for n in module.graph.find_nodes(op="placeholder")]
        consts, inputs = inputs[:num_consts], inputs[num_consts:]
        lines = [f"{{ lambda {' '.join(consts)}; {' '.join(inputs)}. let"]
        for eqn in equations(module, self.names):
            lines += [_INDENT + line for line in self._equation(eqn)]
        return [*lines, f"  in {self._outputs(results_of(module))} }}"]

    def _declare(self, node: fx.Node) -> str:
        if not isinstance(node.meta.get("val"), Tensor) and not node.users:
            return "_"  # a number, which PyTorch hands to the body of a `cond` for a size
        var = self.names.var(node)
        return f"{var.name}:{var.aval}"

    def _outputs(self, results: Any) -> str:
        values = results if isinstance(results, Sequence) else (results,)
        texts = [self._value(value) for value in values]
        return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names.of(value)
        return repr(Literal(value)) if isinstance(value, Number) else repr(value)

    def _equation(self, eqn: Eqn) -> list[str]:
        outputs = " ".join(f"{v.name}:{v.aval}" for v in eqn.outputs)
        first, *rest = self._call(eqn)
        lines = [f"{outputs} = {first}" if outputs else first, *rest]
        if self.sources and eqn.source is not None:
            lines[0] += f"  # {eqn.source}" + (f" {eqn.module}" if eqn.module else "")
        if eqn.node is self.mark:
            lines[0] += "  <--"
        return lines

    def _call(self, eqn: Eqn) -> list[str]:
        inputs = "".join(f" {value!r}" for value in eqn.inputs)
        if not eqn.params:
            return [eqn.name + inputs]
        params = {name: self._param(value) for name, value in eqn.params.items()}
        if all(len(lines) == 1 for lines in params.values()):
            texts = (f"{name}={lines[0]}" for name, lines in params.items())
            return [f"{eqn.name}[{' '.join(texts)}]{inputs}"]
        block = []
        for name, (first, *rest) in params.items():
            block += ["  " + line for line in (f"{name}={first}", *rest)]
        return [f"{eqn.name}[", *block, f"]{inputs}"]

    def _param(self, value: Any) -> list[str]:
        if isinstance(value, fx.GraphModule):
            return self.graph(value, 0)
        return [dtype_name(value) if isinstance(value, torch.dtype) else repr(value)]
