"""A traced function under a policy: the program that every checkpoint starts from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from torch import fx

from torchremat import _torch, config
from torchremat.autodiff.gradient_parts import slots_of
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.matching import match_forward
from torchremat.autodiff.partial_eval import Residuals
from torchremat.autodiff.replay_rules import draws_in_forward
from torchremat.autodiff.rewrites.encoding_ops import is_encoding, is_exact_encoding
from torchremat.autodiff.rewrites.encodings import encode_at_once, value_of_encoding
from torchremat.autodiff.specialize import specialize_joint
from torchremat.graph.hand_outs import Groups, Targets
from torchremat.graph.nodes import base_of, is_forward, is_identity
from torchremat.graph.notes import graph_notes_of, note_graph, note_roles, notes_of
from torchremat.graph.ops import is_factorisation
from torchremat.graph.schedule import GraphSchedule, build_scheduled_graph
from torchremat.graph.slicing import prune_bodies, slice_graph
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.graph.write_order import is_outcome, move_checks_before_writes
from torchremat.policies.builtin import nothing_saveable
from torchremat.policies.policy import Policy
from torchremat.remat.offload.graph_nodes import memory_of, put_out_copies
from torchremat.remat.program.compiled_graph import (
    CompiledGraph,
    copy_inputs_among_last,
)
from torchremat.remat.program.compilers import Compiler
from torchremat.remat.program.decisions import PolicyDecisions, find_inputs_behind
from torchremat.remat.program.nested import NestedProgram, NestedSplit, open_nested, rejoin_opened
from torchremat.remat.program.program import Program
from torchremat.remat.program.random_replay import output_generator_states
from torchremat.remat.program.region import Mask, Region
from torchremat.remat.program.stages import ONE_BY_ONE, USUAL, find_stages, is_long
from torchremat.remat.program.written_outputs import find_written_outputs, find_written_residuals
from torchremat.tracing.modules.module_paths import below

# Each has a copy of the joint graph. Chosen by hand: beyond it all are dropped and made anew.
_MOST_SIZES = 8


def _fuses(compiler: Compiler | None) -> bool:
    return compiler is not None and compiler.fuses


class FunctionProgram(Program):
    """A traced function under a policy.

    `chosen`: the joint graph and the decisions on its values, where they were made before.
    """

    root_joint: Joint
    may_run_again: ClassVar[bool] = True
    """Whether random operators may run again, in the backward graph, from a generator's state."""
    may_have_stages: ClassVar[bool] = True
    """Whether it may hand out gradients before the end, as a compiled graph never does."""

    def __init__(
        self,
        region: Region,
        policy: Policy,
        *,
        module_prefix: str = "",
        chosen: tuple[Joint, PolicyDecisions] | None = None,
        compiler: Compiler | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        if chosen is None and compiler is None and self.may_have_stages:
            policy = policy.with_updates(region)
        super().__init__(region, policy, compiler=compiler)
        self.module_prefix = module_prefix
        self.is_logged = False
        """Whether its residuals have been logged at WARNING."""
        self.is_warned_of = False
        """Whether the policy says what cannot be: each checkpoint that runs it warns once."""
        self._specialized: dict[tuple[int, ...], FunctionProgram] = {}
        self.by_sizes: dict[tuple[int, ...], FunctionProgram] | None = None
        """The program for each size that was met, if a policy decides by sizes; this is one."""
        if chosen is None:
            joint = _joint_under(policy, region, module_prefix)
            if sizes is None and region.dynamic is not None:
                sizes = region.dynamic.traced_sizes
            if compiler is None or policy.wants_tiles:
                with _torch.isolate():
                    joint = policy.prepare_joint(joint, sizes, fuses=_fuses(compiler))
            chosen = joint, self._decide(joint, self._find_schedule(joint, sizes))
            if sizes is not None and policy.is_whole_graph:
                self.by_sizes = {tuple(sizes.values()): self}
        self.root_joint, self.decisions = chosen
        if policy.is_whole_graph:
            self.assumed_outputs = region.usual_outputs
            self.decides_anew = policy.without_job() is not policy
        self.schedule = self.decisions.schedule
        self._describe()

    def _decide(self, joint: Joint, schedule: GraphSchedule | None) -> PolicyDecisions:
        with _torch.isolate():  # a trace around must not see what reads the sizes of values
            decisions = PolicyDecisions(joint, self.policy, self.module_prefix, schedule=schedule)
            decisions.runs_again = self.compiler is None and self.may_run_again
            decisions.save_after_writes(joint)
            return decisions

    def _find_schedule(self, joint: Joint, sizes: Sizes | None) -> GraphSchedule | None:
        """The schedule of a policy that decides on whole graphs; `None` for others."""
        if not self.policy.is_whole_graph:
            return None
        with _torch.isolate():
            return self.policy.schedule(joint, fuses=_fuses(self.compiler), sizes=sizes)

    def at(self, sizes: Sizes | None) -> "FunctionProgram | None":
        """The program for calls of these sizes; `None` if the policy has not decided on them."""
        if self.by_sizes is None or sizes is None:
            return self
        return self.by_sizes.get(tuple(sizes.values()))

    def decide_at(self, sizes: Sizes) -> "FunctionProgram":
        """`at`, where the policy decides now: as for another size, or otherwise."""
        assert self.by_sizes is not None
        schedule = self._find_schedule(self.root_joint, sizes)
        known = dict.fromkeys(self.by_sizes.values())
        found = next((p for p in known if p.schedule is schedule), None)
        if found is None:
            decisions = self._decide(self.root_joint, schedule)
            found = self._replace(self.region, (self.root_joint, decisions))
            found.by_sizes, found.prevent_cse = self.by_sizes, self.prevent_cse
            found.is_logged, found.is_warned_of = self.is_logged, self.is_warned_of
        self.by_sizes[tuple(sizes.values())] = found
        return found

    def _describe(self) -> None:
        region = self.region
        inputs, mutations = self.root_joint.inputs, region.joint.mutations
        self.writes = tuple(i for i, _ in mutations)
        self.written_outputs = find_written_outputs(self.output_nodes, mutations)
        self.views = _find_views(self.output_nodes, set(region.joint.inputs))
        self.gradient_slots = slots_of(self.root_joint.parts, region.joint.parts, self.num_inputs)
        found = _find_residuals(region.joint, self.root_joint, self.decisions)
        self.recomputed = found.recomputed
        """The values of the forward pass that the backward pass recomputes."""
        read = set(found.inputs)
        copied = [i for i in self.writes if inputs[i] in read]
        self.saved_inputs = tuple(
            i for i, node in enumerate(inputs) if node in read and i not in copied
        )
        self._num_copies = len(copied)
        self.residuals = (*found.values, *(inputs[i] for i in copied))
        if self.compiler is None:  # a compiler neither replays generators nor offloads
            from_states, by_value = self.decisions.from_states, self.decisions.by_value
            nodes = list(enumerate(self.residuals))
            self.replayed_random = tuple(i for i, node in nodes if node in from_states)
            self.offloaded = tuple(
                i for i, node in nodes if node in by_value and by_value[node].outcome == "offloaded"
            )
            elsewhere = {*self.replayed_random, *self.offloaded}
            written = find_written_residuals(self.residuals, self.root_joint.mutations)
            self.written_residuals = tuple(r for r in written if r.position not in elsewhere)

    @cached_property
    def stages(self) -> Groups:  # type: ignore[override]
        inputs = set(self.region.joint.inputs)
        if self.compiler or self.written_outputs or inputs.intersection(self.output_nodes):
            return ()  # autograd asks a node whose output lies in an input to have it as input
        closeness = ONE_BY_ONE if self.policy.steps_in_backward else USUAL
        return find_stages(
            self.region, self.root_joint, self.schedule, self.gradient_slots, closeness
        )

    @cached_property
    def is_long(self) -> bool:  # type: ignore[override]
        return is_long(self.root_joint, self.schedule)

    @cached_property
    def gradient_targets(self) -> Targets:  # type: ignore[override]
        inputs = self.root_joint.inputs
        place = {node: i for i, node in enumerate(inputs)}
        read = [*(inputs[i] for i in self.saved_inputs), *self.residuals]
        owners = [place.get(base_of(node)) for node in read]
        slots = self.by_slot(range(self.num_inputs))
        return tuple((k, j) for j, i in enumerate(owners) for k, s in enumerate(slots) if s == i)

    def specialize(self, sizes: Sizes) -> "FunctionProgram":
        """The program with numbers for its symbols. It saves the same values, in the same order."""
        key = tuple(sizes.values())
        if key not in self._specialized:
            region, nodes = self.region.specialize(sizes)
            joint = region.joint
            if self.root_joint is not self.region.joint:
                joint, nodes = specialize_joint(self.root_joint, sizes)
            if len(self._specialized) >= _MOST_SIZES:
                self._specialized.clear()
            program = self._replace(region, (joint, self.decisions.copy_to(nodes)))
            program.prevent_cse = self.prevent_cse
            self._specialized[key] = program
        return self._specialized[key]

    def _replace(self, region: Region, chosen: tuple[Joint, PolicyDecisions]) -> "FunctionProgram":
        found = type(self)(
            region,
            self.policy,
            module_prefix=self.module_prefix,
            chosen=chosen,
            compiler=self.compiler,
        )
        found.assumed_outputs = self.assumed_outputs
        return found

    why_none_offloaded = "graphs that are compiled do not"
    """Why nothing is offloaded, where a policy says so of values."""

    def warn_of_policy(self) -> None:
        self.is_warned_of = any([*self._warnings()])

    def _warnings(self) -> Iterator[bool]:
        """Give each kind of warning, and whether there was one."""
        yield self.decisions.warn_of_unmatched()
        yield self.decisions.warn_of_places(is_compiled=self.compiler is not None)

    def joint_for(self, outputs_with_cotangent: Mask) -> Joint:
        """The root joint graph for the outputs that it was traced for, else another trace."""
        if outputs_with_cotangent == self.assumed_outputs or (
            self.assumed_outputs is None and all(outputs_with_cotangent)
        ):
            return self.root_joint
        return super().joint_for(outputs_with_cotangent)

    @property
    def is_outdated(self) -> bool:
        """Whether steps are not as the policy assumed, and it can decide anew."""
        return self.decides_anew and (
            self.assumed_outputs != self.region.usual_outputs
            or (
                self.compiler is None
                and self.may_have_stages
                and not self.policy.is_current(self.region)
            )
        )

    @cached_property
    def forward(self) -> CompiledGraph:
        return self._share(("forward",), lambda: self._compile_forward(()))

    @cached_property
    def runtime_forward(self) -> CompiledGraph:
        """`forward` with states of generators, and copies on the host, in place of residuals."""
        return self._share(
            ("runtime forward",),
            lambda: self._compile_forward(self.replayed_random, self.offloaded),
        )

    def _compile_backward(
        self, outputs_with_cotangent: Mask, inputs_needing_grad: Mask, with_states: bool
    ) -> CompiledGraph:
        masks = outputs_with_cotangent, inputs_needing_grad, with_states
        compile_own = super()._compile_backward
        joint = self.joint_for(outputs_with_cotangent)
        if joint is not self.root_joint and not self.region.shares(joint):
            return compile_own(*masks)
        compiled = self._share(("backward", joint, *masks), lambda: compile_own(*masks))
        if with_states and self.offloaded:
            self.fetched_first[:] = graph_notes_of(compiled.module).fetched_first
        return compiled

    def _share(self, form: tuple[Any, ...], make: Callable[[], CompiledGraph]) -> CompiledGraph:
        """The graph that `make` compiles, or that an alike layer with alike decisions has."""
        graphs = self.region.graphs
        is_shared = type(self) is FunctionProgram and self.region.shares(self.root_joint)
        if graphs is None or not is_shared:
            return make()
        by_value = self.decisions.by_value
        places = tuple(by_value[self.residuals[i]].place for i in self.offloaded)
        key = (
            *form,
            self.root_joint,
            self.saved_inputs,
            self.residuals,
            self.replayed_random,
            self.offloaded,
            places,
            self.schedule and self.schedule.choices,
            self.prevent_cse,
            self.compiler,
            self.policy.recomputes_at_once,
            self.policy.honours_others,
            config.offload_prefetch,
        )
        return graphs.compile_once(key, make, self)

    def _compile_forward(
        self, replayed_random: Sequence[int], offloaded: Sequence[int] = ()
    ) -> CompiledGraph:
        joint = self.root_joint
        outputs = [o for o in joint.outputs if isinstance(o, fx.Node)]
        writes = [value for _, value in joint.mutations]
        results = [*outputs, *writes, *_as_outputs(self.residuals, outputs)]
        if self.schedule is None:
            module = slice_graph(joint.module, joint.inputs, results, always_run=draws_in_forward)
            encode_at_once(module.graph)
        else:
            order = self.schedule.forward
            module = build_scheduled_graph(
                joint.module, joint.inputs, results, order, always_run=draws_in_forward
            )
        rejoin_opened(module)
        prune_bodies(module, always_run=draws_in_forward)
        inputs = module.graph.find_nodes(op="placeholder")
        move_checks_before_writes(module.graph, [inputs[i] for i in self.writes])
        copy_inputs_among_last(module.graph, self._num_copies)
        start = len(outputs) + len(writes)
        output_generator_states(module.graph, [start + i for i in replayed_random])
        if offloaded:
            memories = [memory_of(self.residuals[i]) for i in offloaded]
            positions = [start + i for i in offloaded]
            is_planned = self.schedule is not None
            put_out_copies(module.graph, positions, memories, is_planned=is_planned)
        written = {output.position for output in self.written_outputs}
        written.update(i for i, output in enumerate(outputs) if is_outcome(output))
        roles = ["write" if i in written else "output" for i, _ in enumerate(outputs)]
        roles += ["write"] * len(writes) + self.roles_of_residuals("write")
        note_roles(module, roles)
        note_graph(
            module, new_values={i: len(outputs) + r for r, (i, _) in enumerate(joint.mutations)}
        )
        return CompiledGraph.of(module, "forward", self, self.compiler)


def _joint_under(policy: Policy, region: Region, module_prefix: str) -> Joint:
    """The joint graph that the policy decides on, with checkpoints inside opened for it."""
    if policy.is_whole_graph:
        return region.joint_for(region.usual_outputs)
    if not policy.applies_to_nested:
        return region.joint
    return open_nested(
        region.joint,
        lambda inner, module: _find_split(inner, [(policy, below(module_prefix, module))]),
    )


def _find_split(inner: NestedProgram, policies: Sequence[tuple[Policy, str]]) -> NestedSplit | None:
    own = inner.decisions
    everyone = list(policies)
    if own.policy.applies_to_nested:
        everyone.append((own.policy, own.module_prefix))
    joint = open_nested(
        inner.region.joint,
        lambda within, module: _find_split(
            within, [(policy, below(prefix, module)) for policy, prefix in everyone]
        ),
    )
    wanted = [v for v in (*joint.gradients, *joint.outputs) if isinstance(v, fx.Node)]
    kept = {
        value
        for policy, prefix in policies
        for value in PolicyDecisions(joint, policy, prefix).residuals_for(joint, wanted).values
    }
    if not kept:
        return None
    in_order = tuple(node for node in joint.module.graph.nodes if node in kept)
    own_decisions = PolicyDecisions(joint, own.policy, own.module_prefix)
    return NestedSplit(joint, in_order, own_decisions.residuals(joint).values)


def _as_outputs(residuals: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """The residuals; one that an output is an alias of (of a name, say) as that output.

    So a write to the output before the backward pass is noticed: the two are one tensor.
    """
    aliases: dict[fx.Node, fx.Node] = {}
    for output in outputs:
        node = output
        while is_identity(node) and isinstance(source := node.args[0], fx.Node):
            aliases.setdefault(source, output)
            node = source
    return [aliases.get(node, node) for node in residuals]


def _find_residuals(joint: Joint, root_joint: Joint, decisions: PolicyDecisions) -> Residuals:
    """The values that derivatives of every order read; `joint` is the one of the region."""
    found = decisions.residuals(root_joint)
    found = replace(found, inputs=(*found.inputs, *find_inputs_behind(found)))
    # nor does the first derivative of a factorisation, or of a rule for tangents, read all that its
    # second does
    live = joint.find_live_forward_nodes()
    wanted = [n for n in live if is_factorisation(n.target) or notes_of(n).is_rerun]
    if root_joint is not joint or not all(map(_is_forward_or_encoded, found.values)):
        # a second derivative cannot use residuals from inside, nor what only the first computes:
        # it starts from the inputs
        wanted += [g for g in joint.gradients if g is not None]
    if not wanted:
        return found
    saved = None
    known = {value_of_encoding(v) if is_exact_encoding(v) else v for v in found.values}
    if decisions.schedule is not None and joint is not root_joint:
        there = match_forward(root_joint, joint, [*filter(is_forward, known)], strict=False)
        saved = GraphSchedule(frozenset(there.values()), (), ())
    by_itself = PolicyDecisions(joint, nothing_saveable, schedule=saved)
    everything = by_itself.residuals_for(joint, wanted)
    by_name = {node.name: node for node in root_joint.inputs}
    inputs = dict.fromkeys((*found.inputs, *(by_name[n.name] for n in everything.inputs)))
    values = dict.fromkeys(found.values)
    if decisions.schedule is not None and joint is not root_joint:
        # what must not run again is saved also for outputs that the plan gives no cotangent
        pairs = match_forward(joint, root_joint, everything.values, strict=False)
        further = (pairs[v] for v in everything.values if v in pairs)
        values |= dict.fromkeys(v for v in further if v not in known)
    return replace(found, values=tuple(values), inputs=tuple(inputs))


def _is_forward_or_encoded(value: fx.Node) -> bool:
    return is_forward(value) or is_encoding(value)


def _find_views(outputs: Sequence[fx.Node], inputs: set[fx.Node]) -> tuple[int, ...]:
    """The outputs in whose memory an input, or another output, lies."""
    bases = [base_of(node) for node in outputs]
    return tuple(
        i
        for i, base in enumerate(bases)
        if outputs[i] not in inputs and (base in inputs or bases.count(base) > 1)
    )
