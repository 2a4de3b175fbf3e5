"""Programs: what a checkpoint runs forward, what it keeps, and what it runs backward.

A program is a function of flat tensors with a joint graph and a choice of residuals. Its inputs are
those of its body, and then `known`: values of the body's forward pass that somebody kept.

    forward     inputs                              -> outputs, writes, residuals
    backward    saved inputs, residuals, cotangents -> cotangents of the inputs

The vector-Jacobian product of a program is a program again, of inputs and cotangents, in which the
residuals are known; so derivatives of any order, with what was kept put to use, need no more code.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import fx

from torchremat.autodiff.bodies import BatchedBody, GraphBody, JvpBody, VjpBody
from torchremat.autodiff.joint import Joint, TraceOptions
from torchremat.autodiff.matching import match_forward
from torchremat.autodiff.partial_eval import Residuals
from torchremat.autodiff.specialize import joint_at
from torchremat.graph.nodes import base_of, inner_graphs_of, is_forward, is_identity, is_inexact
from torchremat.graph.notes import graph_notes_of, note, note_roles
from torchremat.graph.ops import is_factorisation
from torchremat.graph.schedule import GraphSchedule, scheduled_graph
from torchremat.graph.slicing import prune_bodies, slice_graph
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.policies.builtin import Policy, nothing_saveable
from torchremat.policies.replay_rules import draws_forward
from torchremat.remat.offload.graph_nodes import memory_of, put_out_copies
from torchremat.remat.program.compiled_graph import (
    Compiled,
    Given,
    compile_backward,
    copy_inputs_among_last,
)
from torchremat.remat.program.compilers import Compiler
from torchremat.remat.program.decisions import Choices
from torchremat.remat.program.nested import Opening, expose_inner, join_exposed
from torchremat.remat.program.random_replay import put_out_states, state_nbytes
from torchremat.remat.program.region import MappedAxis, Mask, Region
from torchremat.remat.program.split_backward import TwoParts
from torchremat.remat.program.written_outputs import WrittenOutput, written_outputs
from torchremat.tracing.axes.named_axes import AxisName, axis_names_in
from torchremat.tracing.input_spec import InputSpec


class Program(ABC):
    """See the module. `absent` are inputs of which only the place in autograd's graph is given."""

    def __init__(
        self, region: Region, policy: Policy, absent: frozenset[int] = frozenset()
    ) -> None:
        self.region = region
        self.policy = policy
        self.absent = absent
        self.prevent_cse = (True,) * len(region.specs)
        """Of each input of the body, whether a compiler keeps what is computed again apart."""
        self.compiler: Compiler | None = None
        """What runs the graphs, also of derivatives; without one, operator by operator."""
        self.jitted_name = ""
        """The name of the function, if `jit` made the program of it."""
        self._backwards: dict[tuple[Mask, Mask, bool], Compiled] = {}
        self._in_parts: dict[tuple[Mask, Mask, Mask, bool], TwoParts] = {}
        self._vjps: dict[tuple[Mask, frozenset[int]], VjpProgram] = {}
        self._batched: dict[Any, Program] = {}
        self._jvps: dict[Any, FunctionProgram] = {}

    # --- inputs and outputs ----------------------------------------------------------------------

    @property
    @abstractmethod
    def root_joint(self) -> Joint:
        """The joint graph that `known` and `residuals` are values of."""

    @property
    def known(self) -> tuple[fx.Node, ...]:
        """Values of the forward pass that are inputs."""
        return ()

    @property
    def residuals(self) -> tuple[fx.Node, ...]:
        """Values of the forward pass that the program hands on to its derivative."""
        return ()

    @property
    @abstractmethod
    def saved_inputs(self) -> tuple[int, ...]:
        """The positions of the inputs that the backward pass reads."""

    @cached_property
    def num_inputs(self) -> int:
        """The number of inputs: the body's and the known values."""
        return len(self.region.specs) + len(self.known)

    @cached_property
    def output_nodes(self) -> tuple[Any, ...]:
        """The tensor outputs."""
        return tuple(o for o in self.region.joint.outputs if isinstance(o, fx.Node))

    @cached_property
    def num_outputs(self) -> int:
        """The number of tensor outputs, without writes and residuals."""
        return len(self.output_nodes)

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """Positions among the tensor outputs of those that have a derivative."""
        outputs = self.region.joint.outputs
        positions = [i for i, output in enumerate(outputs) if isinstance(output, fx.Node)]
        return tuple(positions.index(i) for i in self.region.differentiable)

    @cached_property
    def non_differentiable(self) -> tuple[int, ...]:
        """Positions among the tensor outputs of the others."""
        return tuple(i for i in range(self.num_outputs) if i not in self.differentiable)

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """The positions of the inputs that the body writes to."""
        return ()

    @property
    def written_outputs(self) -> tuple[WrittenOutput, ...]:
        """The outputs that lie in the memory of an input that is written to."""
        return ()

    @cached_property
    def views(self) -> tuple[int, ...]:
        """Positions of the tensor outputs in whose memory an input, or another output, lies."""
        return ()

    @property
    def schedule(self) -> GraphSchedule | None:
        """What runs when, if a policy that decides on all values at once has said so."""
        return None

    @property
    def drawn_again(self) -> tuple[int, ...]:
        """Positions of residuals that are random: outside traces the generator's state is kept."""
        return ()

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Positions of residuals that are in the host's memory: outside traces, in eager mode."""
        return ()

    @cached_property
    def fetched_first(self) -> list[int]:
        """Which of what is offloaded the backward graph compiled last fetches when it starts."""
        return []

    @property
    def forward_with_states(self) -> Compiled:
        """`forward`, with states of generators in place of the residuals that are drawn again.

        And with copies in the host's memory in place of those that are offloaded.
        """
        return self.forward

    @cached_property
    @abstractmethod
    def forward(self) -> Compiled:
        """From inputs to outputs, new values of inputs that are written to, and residuals."""

    @cached_property
    def axis_names(self) -> frozenset[AxisName]:
        """The named axes that operators of the forward graph are over."""
        return axis_names_in(self.forward.module)

    # --- derivatives -----------------------------------------------------------------------------

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """Inputs that get a gradient, yet are not saved: a second derivative must reach them."""
        saved = set(self.saved_inputs)
        return tuple(i for i in self.region.wrt if i not in saved)

    def gradients(self, given: Mask) -> tuple[int, ...]:
        """The positions of the inputs that have a gradient when `given` outputs have one."""
        joint = self.region.joint_for(given)
        return tuple(i for i, g in enumerate(joint.gradients) if g is not None)

    def backward(self, given: Mask, needed: Mask, *, with_states: bool = False) -> Compiled:
        """From saved inputs, residuals and `given` cotangents to gradients of `needed` inputs.

        `with_states`: some residuals are states or on the host, as `forward_with_states` has them.
        """
        key = (given, needed, with_states)
        if key not in self._backwards:
            self._backwards[key] = self._compile_backward(given, needed, with_states)
        return self._backwards[key]

    def backward_in_parts(
        self, given: Mask, needed: Mask, first: Mask, *, with_states: bool
    ) -> TwoParts:
        """`backward`, cut in two: the gradients of the inputs `first` before the others."""
        key = (given, needed, first, with_states)
        if key not in self._in_parts:
            whole = self.backward(given, needed, with_states=with_states)
            self._in_parts[key] = TwoParts.of(whole, first, self)
        return self._in_parts[key]

    def _compile_backward(self, given: Mask, needed: Mask, with_states: bool) -> Compiled:
        joint = self.joint_for(given)
        known = self.values_in(joint, (*self.known, *self.residuals))
        inputs: list[fx.Node | None] = [*joint.inputs, *known[: len(self.known)]]
        saved = [inputs[i] for i in self.saved_inputs]
        saved += known[len(self.known) :]
        saved += [ct for ct in joint.cotangents if ct is not None]
        wanted: list[Any] = [
            g if n else None for g, n in zip(joint.gradients, needed, strict=False)
        ]
        wanted += [None] * len(self.known)
        draws, copies = {}, {}
        if with_states:
            start = len(self.saved_inputs)
            draws = {start + i: self.residuals[i] for i in self.drawn_again}
            copies = {start + i: memory_of(self.residuals[i]) for i in self.offloaded}
        schedule = self.schedule if joint is self.root_joint else None
        num_inputs, num_residuals = len(self.saved_inputs), len(self.residuals)
        roles = (
            *["input"] * num_inputs,
            *["residual"] * num_residuals,
            *["cotangent"] * (len(saved) - num_inputs - num_residuals),
        )
        compiled = compile_backward(
            joint, saved, wanted, self,
            given=Given(roles, draws, copies), schedule=schedule, compiler=self.compiler,
        )  # fmt: skip
        if copies:
            self.fetched_first[:] = graph_notes_of(compiled.module).fetched_first
        asked = [*self.prevent_cse, *[True] * len(self.known)]
        _keep_apart(compiled.module, [asked[i] for i in self.saved_inputs])
        return compiled

    def at(self, sizes: Sizes | None) -> "Program":
        """The program with numbers for the symbols in it, of which only a function's has any."""
        return self

    def backward_at(
        self, sizes: Sizes | None, given: Mask, needed: Mask, *, with_states: bool
    ) -> Compiled:
        """`backward` for such sizes."""
        return self.backward(given, needed, with_states=with_states)

    def joint_for(self, given: Mask) -> Joint:
        """The joint graph that derivatives with respect to the `given` outputs are taken from."""
        return self.region.joint_for(given)

    def values_in(self, joint: Joint, values: Sequence[fx.Node]) -> list[fx.Node | None]:
        """The nodes of `joint` for `values` of the root joint graph.

        There is none for a value inside a checkpoint within this one, nor for one that only the
        backward pass has.
        """
        if joint is self.root_joint or not values:
            return list(values)
        forward = [node for node in values if node.op == "placeholder" or is_forward(node)]
        pairs = match_forward(self.root_joint, joint, forward, strict=not self.root_joint.opened)
        return [pairs.get(node) for node in values]

    def vjp(self, given: Mask, absent: frozenset[int]) -> "VjpProgram":
        """The program of `backward`, as a function of inputs, cotangents and known values."""
        key = (given, absent)
        if key not in self._vjps:
            self._vjps[key] = VjpProgram(self, given, absent)
        return self._vjps[key]

    def jvp(
        self, wrt: tuple[int, ...], specs: tuple[InputSpec, ...], *, keep_primals: bool = False
    ) -> "FunctionProgram":
        """The program of tangents: inputs, then tangents of inputs `wrt`, to tangents of outputs.

        With `keep_primals` the outputs themselves come first.
        """
        key = (wrt, specs, keep_primals)
        if key not in self._jvps:
            region = self.region
            outputs = self.floating_outputs
            body = JvpBody(region.body, len(region.specs), wrt, outputs, keep_primals)
            names = (*region.names, *(f"tangent_{i}" for i in wrt))
            options = TraceOptions(
                any(spec.requires_grad for spec in specs),
                opens_calls=region.options.opens_calls,
            )
            traced = Region(body, specs, names, region.paths, options)
            self._jvps[key] = FunctionProgram(traced, self.policy, compiler=self.compiler)
        return self._jvps[key]

    @cached_property
    def floating_outputs(self) -> tuple[int, ...]:
        """Positions among all outputs of the tensors that may have a tangent."""
        outputs = enumerate(self.region.joint.outputs)
        return tuple(i for i, o in outputs if isinstance(o, fx.Node) and is_inexact(o))

    @cached_property
    def floating_tensors(self) -> tuple[int, ...]:
        """`floating_outputs` as positions among the tensor outputs."""
        nodes = self.region.joint.outputs
        positions = [i for i, output in enumerate(nodes) if isinstance(output, fx.Node)]
        return tuple(positions.index(i) for i in self.floating_outputs)

    @cached_property
    def discrete(self) -> tuple[int, ...]:
        """Positions among the tensor outputs of those that are integers or booleans."""
        nodes = self.output_nodes
        return tuple(i for i, node in enumerate(nodes) if not is_inexact(node))

    # --- batching --------------------------------------------------------------------------------

    def batched(self, specs: tuple[InputSpec, ...], axis: MappedAxis, *, emits: bool) -> "Program":
        """This program mapped over an axis of its inputs, which are `specs` with the axis.

        With `emits` the residuals are outputs: a level of `torch.func` above keeps them.
        """
        key = (specs, axis, emits)
        if key not in self._batched:
            self._batched[key] = self._batch(specs, axis, emits=emits)
        return self._batched[key]

    def _batch(self, specs: tuple[InputSpec, ...], axis: MappedAxis, *, emits: bool) -> "Program":
        return BatchedProgram(self, specs, axis)

    @property
    def out_dims(self) -> tuple[int | None, ...]:
        """Where the mapped axis is in each output of a batched program."""
        raise AssertionError("the program is not batched")


_MOST_SIZES = 8


class FunctionProgram(Program):
    """A traced function under a policy."""

    def __init__(
        self,
        region: Region,
        policy: Policy,
        *,
        module_prefix: str = "",
        chosen: tuple[Joint, Choices] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__(region, policy)
        self.compiler = compiler
        self.module_prefix = module_prefix
        self.is_logged = False
        """Whether what it saves has been logged at WARNING."""
        self.is_warned_of = False
        """Whether the policy says what cannot be: each checkpoint that runs it warns once."""
        self._at: dict[tuple[int, ...], FunctionProgram] = {}
        if chosen is not None:
            self._root_joint, self.choices = chosen
            return
        if policy.is_whole:
            self._root_joint = region.joint_for(region.usual_given)
        elif not policy.looks_inside:
            self._root_joint = region.joint
        else:
            self._root_joint = expose_inner(
                region.joint,
                lambda inner, module: _opening(inner, [(policy, _joined(module_prefix, module))]),
            )
        fuses = compiler is not None and compiler.fuses
        self.choices = Choices(self._root_joint, policy, module_prefix, fuses=fuses)

    def at(self, sizes: Sizes | None) -> "FunctionProgram":
        """See `Program.at`. It keeps the same values, in the same order."""
        if not sizes:
            return self
        key = tuple(sizes.values())
        if key not in self._at:
            region, nodes = self.region.at(sizes)
            joint = region.joint
            if self._root_joint is not self.region.joint:
                joint, nodes = joint_at(self._root_joint, sizes)
            if len(self._at) >= _MOST_SIZES:
                self._at.clear()
            program = self._at[key] = type(self)(
                region,
                self.policy,
                module_prefix=self.module_prefix,
                chosen=(joint, self.choices.renamed(nodes)),
            )
            program.prevent_cse, program.compiler = self.prevent_cse, self.compiler
            # which it is was settled when the forward pass ran, whatever takes less at these sizes
            program.__dict__["drawn_again"] = self.drawn_again
            program.__dict__["offloaded"] = self.offloaded
        return self._at[key]

    def backward_at(
        self, sizes: Sizes | None, given: Mask, needed: Mask, *, with_states: bool
    ) -> Compiled:
        """See `Program.backward_at`."""
        compiled = self.backward(given, needed, with_states=with_states)
        if sizes and not self.region.holds(sizes):  # by what the trace of a variant assumed
            return self.at(sizes).backward(given, needed, with_states=with_states)
        return compiled

    @cached_property
    def drawn_again(self) -> tuple[int, ...]:
        """See `Program.drawn_again`: those that the policy would not save, where it takes less.

        None if there is a compiler, which knows nothing of generators.
        """
        forced = self.choices.forced if self.compiler is None else set()
        return tuple(
            i
            for i, node in enumerate(self.residuals)
            if node in forced and state_nbytes(node) is not None
        )

    @cached_property
    def offloaded(self) -> tuple[int, ...]:
        """See `Program.offloaded`. None if there is a compiler."""
        if self.compiler is not None or not self.choices.offloads:
            return ()
        choices = self.choices.choices
        return tuple(
            i
            for i, node in enumerate(self.residuals)
            if node in choices and choices[node].decision == "offloaded"
        )

    why_none_offloaded = "graphs that are compiled do not"
    """Why nothing is offloaded, where a policy says so of values."""

    def warn_of_policy(self) -> None:
        """Warn of what the policy says and cannot be."""
        self.is_warned_of = any([*self._warnings()])

    def _warnings(self) -> Iterator[bool]:
        """Give each kind of warning, and whether there was one."""
        yield self.choices.warn_of_unmatched()
        yield self.choices.warn_of_places(is_compiled=self.compiler is not None)

    @property
    def schedule(self) -> GraphSchedule | None:
        """See `Program.schedule`."""
        return self.choices.schedule

    @property
    def root_joint(self) -> Joint:
        """The joint graph of the function itself, checkpoints inside it opened for the policy."""
        return self._root_joint

    def joint_for(self, given: Mask) -> Joint:
        """See `Program.joint_for`."""
        given_to_root = self.region.usual_given if self.policy.is_whole else (True,) * len(given)
        return self.root_joint if given == given_to_root else super().joint_for(given)

    @cached_property
    def _found(self) -> Residuals:
        found = self.choices.residuals(self.root_joint)
        joint = self.region.joint
        if self.root_joint is not joint or not all(map(is_forward, found.values)):
            # a second derivative cannot use what is kept from inside, nor what only the first
            # computes: it starts from the inputs
            wanted = [g for g in joint.gradients if g is not None]
        else:
            # nor does the first derivative of a factorisation read all that its second does
            wanted = [n for n in joint.needed_forward_nodes() if is_factorisation(n.target)]
        if not wanted:
            return found
        everything = Choices(joint, nothing_saveable).residuals_for(joint, wanted)
        by_name = {node.name: node for node in self.root_joint.inputs}
        inputs = dict.fromkeys((*found.inputs, *(by_name[n.name] for n in everything.inputs)))
        values = dict.fromkeys(found.values)
        if self.schedule is not None and joint is not self.root_joint:
            # what must not run again is kept also for outputs that the plan gives no cotangent
            pairs = match_forward(joint, self.root_joint, everything.values, strict=False)
            values |= dict.fromkeys(pairs[v] for v in everything.values if v in pairs)
        return replace(found, values=tuple(values), inputs=tuple(inputs))

    @property
    def recomputed(self) -> frozenset[fx.Node]:
        """What the backward pass computes again."""
        return self._found.recomputed

    @property
    def residuals(self) -> tuple[fx.Node, ...]:
        """See `Program.residuals`."""
        return self.kept

    @cached_property
    def kept(self) -> tuple[fx.Node, ...]:
        """What the policy keeps of what the backward pass needs, and inputs before they change."""
        return (*self._found.values, *(self.root_joint.inputs[i] for i in self._copied_inputs))

    @cached_property
    def _copied_inputs(self) -> tuple[int, ...]:
        needed = set(self._found.inputs)
        return tuple(i for i in self.writes if self.root_joint.inputs[i] in needed)

    @cached_property
    def saved_inputs(self) -> tuple[int, ...]:
        """The inputs that the backward pass reads."""
        needed = set(self._found.inputs)
        inputs = self.root_joint.inputs
        copied = self._copied_inputs
        return tuple(i for i, n in enumerate(inputs) if n in needed and i not in copied)

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """The positions of the inputs that the body writes to."""
        return tuple(i for i, _ in self.region.joint.mutations)

    @cached_property
    def written_outputs(self) -> tuple[WrittenOutput, ...]:
        """See `Program.written_outputs`."""
        return written_outputs(self.output_nodes, self.region.joint.mutations)

    @cached_property
    def views(self) -> tuple[int, ...]:
        """See `Program.views`."""
        nodes = self.output_nodes
        bases = [base_of(node) for node in nodes]
        inputs = set(self.region.joint.inputs)
        return tuple(
            i
            for i, base in enumerate(bases)
            if nodes[i] not in inputs and (base in inputs or bases.count(base) > 1)
        )

    @cached_property
    def forward(self) -> Compiled:
        """See `Program.forward`. Inputs that are written to are copied before, where needed."""
        return self._compile_forward(())

    @cached_property
    def forward_with_states(self) -> Compiled:
        """See `Program.forward_with_states`."""
        return self._compile_forward(self.drawn_again, self.offloaded)

    def _compile_forward(
        self, drawn_again: Sequence[int], offloaded: Sequence[int] = ()
    ) -> Compiled:
        joint = self.root_joint
        outputs = [o for o in joint.outputs if isinstance(o, fx.Node)]
        writes = [value for _, value in joint.mutations]
        results = [*outputs, *writes, *_as_outputs(self.residuals, outputs)]
        if self.schedule is None:
            module = slice_graph(joint.module, joint.inputs, results, must_run=draws_forward)
        else:
            order = self.schedule.forward
            module = scheduled_graph(
                joint.module, joint.inputs, results, order, must_run=draws_forward
            )
        join_exposed(module)
        prune_bodies(module, must_run=draws_forward)
        copy_inputs_among_last(module.graph, len(self._copied_inputs))
        start = len(outputs) + len(writes)
        put_out_states(module.graph, [start + i for i in drawn_again])
        if offloaded:
            memories = [memory_of(self.residuals[i]) for i in offloaded]
            positions = [start + i for i in offloaded]
            is_planned = self.schedule is not None
            put_out_copies(module.graph, positions, memories, is_planned=is_planned)
        elsewhere = {output.position for output in self.written_outputs}
        roles = ["write" if i in elsewhere else "output" for i, _ in enumerate(outputs)]
        roles += ["write"] * len(writes) + ["residual"] * len(self.residuals)
        note_roles(module, roles)
        return Compiled.of(module, "forward", self, self.compiler)

    def _batch(self, specs: tuple[InputSpec, ...], axis: MappedAxis, *, emits: bool) -> Program:
        if emits:
            return super()._batch(specs, axis, emits=emits)
        region = self.region
        body = BatchedBody(region.body, axis.in_dims, axis.size, axis.randomness, axis.name)
        grad_enabled = region.options.grad_enabled
        options = TraceOptions(
            grad_enabled and any(spec.requires_grad for spec in specs),
            grad_enabled=grad_enabled,
            opens_calls=region.options.opens_calls,
        )
        batched = Region(body, specs, region.names, region.paths, options)
        return FunctionProgram(
            batched, self.policy, module_prefix=self.module_prefix, compiler=self.compiler
        )

    @property
    def out_dims(self) -> tuple[int | None, ...]:
        """See `Program.out_dims`."""
        body = self.region.body
        assert isinstance(body, BatchedBody)
        outputs = zip(body.out_dims, self.region.joint.outputs, strict=True)
        return tuple(dim for dim, output in outputs if isinstance(output, fx.Node))


def _opening(inner: FunctionProgram, policies: Sequence[tuple[Policy, str]]) -> Opening | None:
    """What `policies`, each with the name of the module around, keep of a checkpoint inside."""
    everyone = list(policies)
    if inner.policy.looks_inside:
        everyone.append((inner.policy, inner.module_prefix))
    joint = expose_inner(
        inner.region.joint,
        lambda within, module: _opening(
            within, [(policy, _joined(prefix, module)) for policy, prefix in everyone]
        ),
    )
    wanted = _tensors([*joint.gradients, *joint.outputs])
    kept = [
        Choices(joint, policy, prefix).residuals_for(joint, wanted).values
        for policy, prefix in policies
    ]
    if not any(kept):
        return None
    order = {node: i for i, node in enumerate(joint.module.graph.nodes)}
    own = Choices(joint, inner.policy, inner.module_prefix).residuals(joint).values
    return Opening(joint, tuple(sorted({v for k in kept for v in k}, key=order.__getitem__)), own)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


class VjpProgram(Program):
    """The vector-Jacobian product of a program: body inputs, cotangents and known values in.

    It keeps nothing but its inputs: what a derivative of higher order needs is computed again.
    """

    def __init__(self, of: Program, given: Mask, absent: frozenset[int]) -> None:
        region = of.region
        self.of = of
        self.num_body = len(region.specs)
        self.wrt = of.gradients(given)
        self._joint = of.joint_for(given)
        if not any(inner_graphs_of(node) for node in region.joint.module.graph.nodes):
            # the formulas that plain autograd uses with create_graph; a checkpoint inside has them
            # where it is applied itself
            self._joint = region.joint_for(given, create_graph=True)
        self._cotangents = tuple(ct for ct in self._joint.cotangents if ct is not None)
        chosen = tuple(i for i, g in zip(region.differentiable, given, strict=True) if g)
        specs = (InputSpec.of(ct.meta["val"]) for ct in self._cotangents)
        vjp_region = Region(
            VjpBody(region.body, self.num_body, self.wrt, chosen),
            (*region.specs, *(replace(spec, requires_grad=True) for spec in specs)),
            (*region.names, *(ct.name for ct in self._cotangents)),
            region.paths,
            TraceOptions(True, opens_calls=region.options.opens_calls),
            forward_of=region,
        )
        super().__init__(vjp_region, of.policy, absent)
        self.compiler = of.compiler

    @property
    def root_joint(self) -> Joint:
        """That of the function at the bottom."""
        return self.of.root_joint

    @property
    def known(self) -> tuple[fx.Node, ...]:
        """What was known, and what was kept."""
        return (*self.of.known, *self.of.residuals)

    @cached_property
    def saved_inputs(self) -> tuple[int, ...]:
        """All that are there."""
        return tuple(i for i in range(self.num_inputs) if i not in self.absent)

    @cached_property
    def output_nodes(self) -> tuple[Any, ...]:
        """The gradients, as nodes of the joint graph of the program below."""
        return tuple(g for g in self._joint.gradients if g is not None)

    @cached_property
    def non_differentiable(self) -> tuple[int, ...]:
        """Not asked: the joint graph of a derivative is traced only when it is differentiated."""
        return ()

    @cached_property
    def forward(self) -> Compiled:
        """The backward pass of the program below, from all of its inputs."""
        known = self.of.values_in(self._joint, self.known)
        inputs: list[fx.Node | None] = [*self._joint.inputs, *self._cotangents, *known]
        compiled = compile_backward(
            self._joint, inputs, self.output_nodes, self, compiler=self.compiler
        )
        _keep_apart(compiled.module, self.of.prevent_cse)
        return compiled


def _as_outputs(residuals: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """The residuals; one that an output hands on (a name's, say) as that output.

    So a write to the output before the backward pass is noticed: the two are one tensor.
    """
    handed_on: dict[fx.Node, fx.Node] = {}
    for output in outputs:
        node = output
        while is_identity(node) and isinstance(source := node.args[0], fx.Node):
            handed_on.setdefault(source, output)
            node = source
    return [handed_on.get(node, node) for node in residuals]


class BatchedProgram(Program):
    """A program mapped over an axis: the outputs and the residuals of the program below.

    It keeps nothing but its inputs.
    """

    def __init__(self, of: Program, specs: tuple[InputSpec, ...], axis: MappedAxis) -> None:
        self.of = of
        region = of.region
        num_body = len(region.specs)
        self._num_known = len(specs) - num_body
        body = BatchedBody(
            region.body, axis.in_dims[:num_body], axis.size, axis.randomness, axis.name
        )
        options = TraceOptions(True, opens_calls=region.options.opens_calls)
        batched = Region(body, specs[:num_body], region.names, region.paths, options)
        super().__init__(batched, of.policy)
        self.compiler = of.compiler
        whole = BatchedBody(
            GraphBody(of.forward.module), axis.in_dims, axis.size, axis.randomness, axis.name
        )
        self._whole = Region.traced(
            whole,
            [replace(spec, requires_grad=False) for spec in specs],
            [f"input_{i}" for i in range(len(specs))],
            region.paths,
            TraceOptions(False),
        )
        self._out_dims = whole.out_dims

    @property
    def root_joint(self) -> Joint:
        """That of the mapped function."""
        return self.region.joint

    @property
    def out_dims(self) -> tuple[int | None, ...]:
        """See `Program.out_dims`."""
        return self._out_dims

    @cached_property
    def num_inputs(self) -> int:
        """As many as the program below has."""
        return len(self.region.specs) + self._num_known

    @cached_property
    def saved_inputs(self) -> tuple[int, ...]:
        """The inputs of the body: a value known of each example is of no use to the batch's."""
        return tuple(range(len(self.region.specs)))

    @cached_property
    def output_nodes(self) -> tuple[Any, ...]:
        """The outputs and the residuals of the program below."""
        return self._whole.joint.outputs

    @cached_property
    def forward(self) -> Compiled:
        """The forward graph of the program below, mapped."""
        joint = self._whole.joint
        module = slice_graph(joint.module, joint.inputs, joint.outputs, must_run=draws_forward)
        return Compiled.of(module, "batched", compiler=self.compiler)


def _keep_apart(module: fx.GraphModule, flags: Iterable[bool]) -> None:
    """Note of the first inputs of a derivative whether what is computed of them stays apart.

    So it does of the others.
    """
    remaining = iter(flags)
    for node in module.graph.find_nodes(op="placeholder"):
        note(node, is_kept_apart=next(remaining, True))


def _tensors(values: Sequence[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]
