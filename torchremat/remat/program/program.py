"""Programs: what a checkpoint runs forward, what it saves, and what it runs backward.

A program is a function of flat tensors with a joint graph and a choice of residuals. Its inputs are
those of its body, and then `known`: values of the body's forward pass that another program saved.

    forward     inputs                              -> outputs, writes, residuals
    backward    saved inputs, residuals, cotangents -> cotangents of the inputs

There are three kinds: a function under a policy (`function_program.py`), the vector-Jacobian
product of a program, and a program mapped over an axis (`derived_programs.py`). A derivative is a
program again, in which the residuals are known; so derivatives of any order need no more code.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import fx

from torchremat.autodiff.gradient_parts import fill_slots
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.rewrites.matched_values import find_codes, match_values
from torchremat.core.interrupts import hold_interrupts
from torchremat.graph.hand_outs import Groups, Targets
from torchremat.graph.nodes import is_inexact
from torchremat.graph.notes import graph_notes_of, note
from torchremat.graph.schedule import GraphSchedule
from torchremat.policies.policy import Policy
from torchremat.remat.offload.graph_nodes import memory_of
from torchremat.remat.program.compiled_graph import (
    BackwardInputs,
    BackwardOrder,
    CompiledGraph,
    compile_backward,
)
from torchremat.remat.program.compilers import Compiler
from torchremat.remat.program.random_replay import is_run_again
from torchremat.remat.program.region import Mask, Region
from torchremat.remat.program.written_outputs import WrittenOutput
from torchremat.tracing.axes.named_axes import AxisName, axis_names_in


class Program(ABC):
    """A forward graph and the backward graphs that go with it."""

    root_joint: Joint | None = None
    """The joint graph that `known` and `residuals` are values of, if there are any."""
    saved_inputs: tuple[int, ...]
    """The positions of the inputs that the backward pass reads."""
    residuals: tuple[fx.Node, ...] = ()
    """Values of the forward pass that the program passes to its derivative."""
    writes: tuple[int, ...] = ()
    """The positions of the inputs that the body writes to."""
    written_outputs: tuple[WrittenOutput, ...] = ()
    """The outputs that lie in the memory of an input that is written to."""
    written_residuals: tuple[WrittenOutput, ...] = ()
    """Likewise the residuals, outside traces."""
    views: tuple[int, ...] = ()
    """Positions of the tensor outputs in whose memory an input, or another output, lies."""
    schedule: GraphSchedule | None = None
    """The order of both passes, if a policy that decides on all values at once gives one."""
    replayed_random: tuple[int, ...] = ()
    """Positions of random residuals: outside traces the generator's state is saved instead."""
    offloaded: tuple[int, ...] = ()
    """Positions of residuals in the host's memory: outside traces, in eager mode."""
    gradient_slots: tuple[int, ...] = ()
    """The input that each returned gradient is for, if some have one for each of their readers."""
    stages: Groups = ()
    """The slots of gradients that are handed out together, in order; empty if all of them are."""
    is_long: bool = False
    """Whether the stages are worth their price if nobody is seen to wait for gradients."""
    gradient_targets: Targets = ()
    """Slots of gradients with the inputs of backward graphs that lie in the parameter of each."""
    assumed_outputs: Mask | None = None
    """The outputs that a backward pass gives a cotangent, if the policy decided by that."""
    decides_anew = False
    """Whether the policy plans for all calls of a job, and can plan for other outputs, too."""
    jitted_name = ""
    """The name of the function, if `jit` made the program of it."""

    def __init__(
        self,
        region: Region,
        policy: Policy,
        *,
        known_values: tuple[fx.Node, ...] = (),
        missing_inputs: frozenset[int] = frozenset(),
        compiler: Compiler | None = None,
    ) -> None:
        self.region = region
        self.policy = policy
        self.known_values = known_values
        """Values of the forward pass that are inputs."""
        self.num_inputs = len(region.specs) + len(known_values)
        self.missing_inputs = missing_inputs
        """Inputs without a value: only their place in autograd's graph is passed."""
        self.prevent_cse = (True,) * len(region.specs)
        """For each input of the body, whether a compiler must not merge what is recomputed."""
        self.compiler = compiler
        """Runs the graphs, also of derivatives; without one they run operator by operator."""
        self.fetched_first: list[int] = []
        """The members of `offloaded` that the newest backward graph fetches when it starts."""
        self.derived: dict[Any, Any] = {}
        """Results of functions under `cache_by_program` for this program."""
        self._backwards: dict[tuple[Mask, Mask, bool], CompiledGraph] = {}

    @cached_property
    def output_nodes(self) -> tuple[Any, ...]:
        return tuple(o for o in self.region.joint.outputs if isinstance(o, fx.Node))

    @cached_property
    def num_outputs(self) -> int:
        return len(self.output_nodes)

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        outputs = self.region.joint.outputs
        positions = [i for i, output in enumerate(outputs) if isinstance(output, fx.Node)]
        return tuple(positions.index(i) for i in self.region.differentiable)

    @cached_property
    def device(self) -> torch.device:
        """The device of the outputs that have gradients."""
        value: torch.Tensor = self.output_nodes[self.differentiable[0]].meta["val"]
        return value.device

    @cached_property
    def non_differentiable(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_outputs) if i not in self.differentiable)

    @cached_property
    def discrete(self) -> tuple[int, ...]:
        return tuple(i for i, node in enumerate(self.output_nodes) if not is_inexact(node))

    @cached_property
    def grad_edges(self) -> tuple[int, ...]:
        """Inputs that get a gradient, yet are not saved: a second derivative must reach them."""
        saved = set(self.saved_inputs)
        return tuple(i for i in self.region.wrt if i not in saved)

    @cached_property
    @abstractmethod
    def forward(self) -> CompiledGraph:
        """The graph from inputs to outputs, new values of written inputs, and residuals."""

    @property
    def runtime_forward(self) -> CompiledGraph:
        """`forward` outside traces, where values are `replayed_random` or `offloaded`."""
        return self.forward

    @cached_property
    def axis_names(self) -> frozenset[AxisName]:
        return axis_names_in(self.forward.module)

    def backward(
        self, outputs_with_cotangent: Mask, inputs_needing_grad: Mask, *, with_states: bool = False
    ) -> CompiledGraph:
        """The graph from saved inputs, residuals and cotangents to gradients.

        `with_states`: some residuals are states or on the host, as `runtime_forward` has them.
        """
        key = (outputs_with_cotangent, inputs_needing_grad, with_states)
        if key not in self._backwards:
            with hold_interrupts():
                self._backwards[key] = self._compile_backward(*key)
        return self._backwards[key]

    def note_cotangents(self, given: Mask) -> None:
        """Take notice of the outputs to which a backward pass gives a cotangent."""
        if self.decides_anew and given != self.assumed_outputs:
            self.region.note_cotangents(given)

    def _compile_backward(
        self, outputs_with_cotangent: Mask, inputs_needing_grad: Mask, with_states: bool
    ) -> CompiledGraph:
        joint = self.joint_for(outputs_with_cotangent)
        num_others = self.num_inputs - len(self.region.specs)
        saved, residuals, codes = _find_inputs(self, joint)
        cotangents = [ct for ct in joint.cotangents if ct is not None]
        draws: dict[int, fx.Node] = {}
        copies = {}
        start = len(saved)
        if with_states:
            for i in self.replayed_random:
                draws[start + i] = residuals[i] or self.residuals[i]
                if is_run_again(self.residuals[i]):  # the graph computes it
                    residuals[i] = None
            copies = {start + i: memory_of(self.residuals[i]) for i in self.offloaded}
        roles = (
            *["input"] * start,
            *self.roles_of_residuals("input"),
            *["cotangent"] * len(cotangents),
        )
        compiled = compile_backward(
            joint,
            [*saved, *residuals, *cotangents],
            [*self.gradients_of(joint, inputs_needing_grad), *[None] * num_others],
            self,
            form=BackwardInputs(roles, draws, copies, codes),
            schedule=self.schedule if joint is self.root_joint else None,
            compiler=self.compiler,
            order=BackwardOrder(self.policy.recomputes_at_once, self.policy.honours_others),
        )
        if copies:
            self.fetched_first[:] = graph_notes_of(compiled.module).fetched_first
        flags = (*self.prevent_cse, *[True] * num_others)
        mark_kept_apart(compiled.module, [flags[i] for i in self.saved_inputs])
        return compiled

    def roles_of_residuals(self, role_in_input: str) -> list[str]:
        """`"residual"`, or else `role_in_input` where an input stands for it."""
        in_inputs = {residual.position for residual in self.written_residuals}
        count = len(self.residuals)
        return [role_in_input if i in in_inputs else "residual" for i in range(count)]

    def gradients_of(self, joint: Joint, inputs_needing_grad: Mask) -> list[Any]:
        """The values of `joint` that its backward pass returns: one a slot, or one an input."""
        values = [
            g if needed else None
            for g, needed in zip(joint.gradients, inputs_needing_grad, strict=False)
        ]
        if not self.gradient_slots:
            return values
        parts = [part for part in joint.parts if inputs_needing_grad[part[0]]]
        return fill_slots(self.gradient_slots, parts, values)

    def by_slot(self, values: Sequence[Any]) -> Sequence[Any]:
        """A value of each input, for each of its slots."""
        return [values[i] for i in self.gradient_slots] if self.gradient_slots else values

    @cached_property
    def first_slots(self) -> tuple[int, ...]:
        """The first slot of each input."""
        return tuple(map(self.gradient_slots.index, range(self.num_inputs)))

    def joint_for(self, outputs_with_cotangent: Mask) -> Joint:
        return self.region.joint_for(outputs_with_cotangent)

    def values_in(self, joint: Joint, values: Sequence[fx.Node]) -> list[fx.Node | None]:
        """The nodes of `joint` for `values` of the root joint graph.

        There is none for a value inside a checkpoint within this one, nor for one that only the
        backward pass or tiles have. For an exact encoding it is the value that it is of.
        """
        root = self.root_joint
        if root is None or joint is root:
            return list(values)
        strict = not root.opened and root.untiled is None
        return match_values(root, joint, values, strict=strict)


Nodes = list[fx.Node | None]


def _find_inputs(program: Program, joint: Joint) -> tuple[Nodes, Nodes, dict[int, fx.Node]]:
    """The saved inputs and the residuals in `joint`, and which of both are given as codes."""
    num_known = len(program.known_values)
    values = program.values_in(joint, (*program.known_values, *program.residuals))
    inputs = [*joint.inputs, *values[:num_known]]
    originals = [*joint.inputs, *program.known_values]
    saved, residuals = [inputs[i] for i in program.saved_inputs], values[num_known:]
    wanted = [*(originals[i] for i in program.saved_inputs), *program.residuals]
    return saved, residuals, find_codes(wanted, [*saved, *residuals])


Rule = TypeVar("Rule", bound=Callable[..., Any])


def cache_by_program(rule: Rule) -> Rule:
    """Let `rule(program, *arguments)` run once for each program and its arguments."""

    @functools.wraps(rule)
    def lookup(program: Program, *args: Any, **options: Any) -> Any:
        key = (rule, args, *options.items())
        if key not in program.derived:
            program.derived[key] = rule(program, *args, **options)
        return program.derived[key]

    return cast(Rule, lookup)


def mark_kept_apart(module: fx.GraphModule, flags: Iterable[bool]) -> None:
    """Mark the inputs of a derivative of which a compiler must not merge what is recomputed.

    `flags` are for the first inputs; all the others are marked.
    """
    remaining = iter(flags)
    for node in module.graph.find_nodes(op="placeholder"):
        note(node, is_kept_apart=next(remaining, True))
