"""Programs whose graphs a backend compiles, and which may use up inputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.compile.jit.donation_plan import Donation, write_at_the_end, write_by_operators
from torchremat.compile.lowering import lower
from torchremat.core.interrupts import hold_interrupts
from torchremat.graph.aliasing import view_in
from torchremat.graph.codegen import Runner, source_of
from torchremat.graph.nodes import base_of, inner_graphs_of, results_of
from torchremat.graph.notes import graph_notes_of
from torchremat.policies.policy import Policy
from torchremat.remat.program.compiled_graph import CompiledGraph
from torchremat.remat.program.compilers import compiler_named
from torchremat.remat.program.decisions import PolicyDecisions
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.region import Region


class JitProgram(FunctionProgram):
    """A program that writes outputs into donated inputs, and whose policy offloads nothing."""

    stages = ()
    may_have_stages = False

    def __init__(
        self,
        region: Region,
        policy: Policy,
        *,
        module_prefix: str = "",
        chosen: tuple[Joint, PolicyDecisions] | None = None,
        backend: str = "eager",
        donated: Sequence[tuple[int, str]] = (),
        written: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(
            region,
            policy,
            module_prefix=module_prefix,
            chosen=chosen,
            compiler=compiler_named(backend),
        )
        self.offloaded = ()
        self.backend = backend
        self.donated = tuple(donated)
        """Positions of donated inputs, with what the user calls them."""
        self.written = written or {}
        """By the position of an output, that of the input in whose storage it is written."""
        self.has_warned = False
        """Whether a call has warned of those that are of no use."""

    @cached_property
    def donating(self) -> "JitProgram":
        chosen = self.root_joint, self.decisions
        return self._replace(self.region, chosen, written=self.donation.written)

    def _replace(
        self,
        region: Region,
        chosen: tuple[Joint, PolicyDecisions],
        *,
        written: Mapping[int, int] | None = None,
    ) -> "JitProgram":
        return JitProgram(
            region,
            self.policy,
            module_prefix=self.module_prefix,
            chosen=chosen,
            backend=self.backend,
            written=written,
        )

    @cached_property
    def donation(self) -> Donation:
        """The use of the donated inputs; derivatives of `donating` have none."""
        positions = [i for i, _ in self.donated if i not in self.writes]
        module = super()._compile_forward(()).module
        found = Donation.of(module, self.num_outputs, positions, fuses=self.backend == "inductor")
        written_to = tuple(i for i, _ in self.donated if i in self.writes)
        return replace(found, unusable=(*found.unusable, *written_to))

    @cached_property
    def needed_backward(self) -> frozenset[int]:
        """The inputs that the backward needs: their values, or their nodes in autograd's graph."""
        wrt = self.region.wrt
        return frozenset((*wrt, *self.saved_inputs)) if wrt else frozenset()

    def as_no_views(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Make outputs in an input's storage no views, which they would be above autograd."""
        with _torch.below_autograd():
            return tuple(_alias(t) if i in self.written else t for i, t in enumerate(outputs))

    @cached_property
    def view_bases(self) -> Mapping[int, tuple[str, int]]:
        """By the position of an output, the input or the output before it that it is a view of.

        Only compiled graphs have any: PyTorch's operators make views as such themselves.
        """
        if self.compiler is None or not self.compiler.fuses:
            return {}
        inputs = {node: i for i, node in enumerate(self.region.joint.inputs)}
        outputs = [base_of(node) for node in self.output_nodes]
        found = {}
        for i in self.views:
            base, first = outputs[i], outputs.index(outputs[i])
            if i in self.written or (base not in inputs and first == i):
                continue
            found[i] = ("input", inputs[base]) if base in inputs else ("output", first)
        return found

    def as_views(self, bases: Mapping[int, Tensor], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Make outputs of a compiled graph views, so that autograd sees writes through them.

        `bases` has the inputs that they lie in, by position. Inductor gives a tensor on the same
        memory, with a version counter of its own.
        """
        found = list(outputs)
        for i, (kind, position) in self.view_bases.items():
            base = bases[position] if kind == "input" else found[position]
            found[i] = view_in(base, found[i])
        return tuple(found)

    def _warnings(self) -> Iterator[bool]:
        yield self.decisions.warn_of_unmatched()
        yield self.decisions.warn_of_places(is_compiled=True)
        for node in self.region.joint.module.graph.nodes:
            inner = next((graph_notes_of(body).program for body in inner_graphs_of(node)), None)
            if isinstance(inner, FunctionProgram) and inner.known_values == ():
                yield inner.decisions.warn_of_places(is_compiled=True)

    def _compile_forward(
        self, replayed_random: Sequence[int], offloaded: Sequence[int] = ()
    ) -> CompiledGraph:
        compiled = super()._compile_forward(replayed_random, offloaded)
        if not self.written:
            return compiled
        return CompiledGraph.around(
            compiled.module, _compile_writes(compiled.module, self.backend, self.written)
        )


def _compile_writes(module: fx.GraphModule, backend: str, written: Mapping[int, int]) -> Runner:
    if backend != "inductor":
        return lower(write_by_operators(module, written), backend)
    run = lower(write_at_the_end(module, written), backend)
    with hold_interrupts():  # around `except`, which would take one for an error of inductor
        try:
            source_of(run)  # compiles it
        except Exception:  # inductor 2.13 cannot fuse every write: a softmax over its own input
            return lower(module, backend)
    by_value = {results_of(module)[i]: number for i, number in written.items()}
    places = [(i, by_value[r]) for i, r in enumerate(results_of(module)) if r in by_value]

    def run_and_fill(inputs: list[Any]) -> tuple[Any, ...]:
        filled = [(i, _alias(inputs[number])) for i, number in places]
        results = list(run(inputs))
        for i, place in filled:
            results[i] = place
        return tuple(results)

    run_and_fill.source = source_of(run)  # type: ignore[attr-defined]
    return run_and_fill


_alias = _torch.get_boxed_call(torch.ops.aten.alias.default)
