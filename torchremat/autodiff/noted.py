"""Run a graph inside a trace, so that what is written down knows where it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from torchremat.autodiff.bodies import Body
from torchremat.graph.sizes import Interpreter
from torchremat.graph.tracing import Tracing


class NotedInterpreter(Interpreter):
    """Runs a graph in a trace; what an operator turns into gets its module and source line."""

    def __init__(self, module: fx.GraphModule, tracing: Tracing) -> None:
        super().__init__(module)
        self.tracing = tracing

    def run_node(self, n: fx.Node) -> Any:
        """Run one operator, with its notes, in the phase that the trace is in."""
        self.tracing.notes = n.meta | {"phase": self.tracing.phase}
        try:
            return super().run_node(n)
        finally:
            self.tracing.notes = None


@dataclass(frozen=True, eq=False)
class NotedBody(Body):
    """The function that runs a graph. Each operator is noted as what it comes from."""

    module: fx.GraphModule

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs of the graph."""
        return list(NotedInterpreter(self.module, tracing).run(*inputs))
