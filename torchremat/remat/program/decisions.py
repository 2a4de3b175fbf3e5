"""The decision of a policy on each value of a forward pass, with the reason."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.partial_eval import Residuals, find_residuals
from torchremat.autodiff.replay_rules import body_value_of, reason_not_replayable, reason_to_save
from torchremat.autodiff.rewrites.encoding_ops import is_encoding, is_exact_encoding
from torchremat.autodiff.rewrites.encodings import value_of_encoding
from torchremat.autodiff.tiles.tiled_op import tiled_p
from torchremat.core.avals import Aval
from torchremat.core.source import warn_user
from torchremat.errors import OffloadWarning, UnmatchedWarning
from torchremat.graph.nodes import (
    base_of,
    call_of,
    inner_graphs_of,
    is_forward,
    is_item,
    is_staged_residual,
    is_view,
)
from torchremat.graph.notes import notes_of
from torchremat.graph.ops import split_arguments
from torchremat.graph.schedule import GraphSchedule, read_from_before
from torchremat.graph.write_forms import value_after_writes, values_after_writes
from torchremat.policies.ask_for_compiler import decide_for_compiler
from torchremat.policies.checkpoint_name import name_p
from torchremat.policies.policy import MATCHES_NOTHING, Policy, Value
from torchremat.policies.verdicts import NotSaved, Offloadable, Saveable, as_verdict
from torchremat.remat.offload.graph_nodes import OffloadRules
from torchremat.remat.program.random_replay import is_run_again, state_nbytes
from torchremat.remat.program.written_outputs import find_written_residuals, is_read_by_derivative
from torchremat.tracing.modules.module_paths import below

Outcome = Literal["saved", "recomputed", "offloaded", "tiled", "input", "parameter", "constant"]


@dataclass(frozen=True, slots=True)
class Decision:
    outcome: Outcome
    reason: str
    place: str = ""
    """Where an offloaded value is saved."""


class PolicyDecisions:
    """A policy's decision for each value of the forward half of a joint graph.

    Values are calls of operators, or the outputs of one that has several. The policy decides once
    on each, in program order; or on all at once: `schedule`, if that is known.
    """

    def __init__(
        self,
        joint: Joint,
        policy: Policy,
        module_prefix: str = "",
        *,
        schedule: GraphSchedule | None = None,
    ) -> None:
        self.policy = policy
        self.module_prefix = module_prefix
        self._by_compiler = joint.by_compiler
        self.values: dict[fx.Node, Value] = {}
        self.by_value: dict[fx.Node, Decision] = {}
        if schedule is None and policy.is_whole_graph:
            schedule = policy.schedule(joint, fuses=False, sizes=None)
        self.schedule = schedule
        names = _names_among(joint.forward_nodes)
        self.forced: set[fx.Node] = set()
        """Values that are saved against the policy: their operators must not run again."""
        self.runs_again = False
        """Whether operators of which only the generator's state is saved may run again as well."""
        self.not_moved: dict[str, str] = {}
        """Why a policy's offloading is impossible, with the name of the first such value."""
        self._rules = OffloadRules(joint)
        self._in_branches: list[Value] = []
        for node in joint.forward_nodes:
            if node.target is torch.ops.higher_order.cond:
                self._in_branches += _values_in_branches(node, module_prefix)
            if node.op == "call_function" and not is_view(node) and not _has_several_values(node):
                value = _value(node, names.get(node, ()), module_prefix)
                self.values[node] = value
                self.by_value[node] = self._choose(node, value)

    def _choose(self, node: fx.Node, value: Value) -> Decision:
        if self.schedule is not None:
            return self._decide_planned(node, self.schedule)
        if is_staged_residual(node):
            return Decision("recomputed", "a checkpoint inside saves it while it is replayed")
        if self._by_compiler:
            verdict = decide_for_compiler(self.policy, value)
        else:
            verdict = as_verdict(self.policy.decide(value), self.policy, value.op)
        if isinstance(verdict, Offloadable):
            return self._decide_offload(node, verdict)
        if isinstance(verdict, Saveable):
            return Decision("saved", f"{self.policy}")
        forced = reason_not_replayable(node)
        if forced is None and isinstance(verdict, NotSaved):
            forced = reason_to_save(node)
        if forced is not None:
            self.forced.add(node)
            return Decision("saved", forced)
        return Decision("recomputed", f"{self.policy} does not let it be saved")

    def _decide_offload(self, node: fx.Node, verdict: Offloadable) -> Decision:
        asked = self._rules.why_impossible(node, verdict)
        if asked is not None:
            self.not_moved.setdefault(asked, node.name)
        reason = asked or self._rules.why_kept(node)
        if reason is None:
            return Decision("offloaded", f"{self.policy}", str(verdict.dst))
        return Decision("saved", f"{self.policy} offloads it, but it stays, since {reason}")

    def _decide_planned(self, node: fx.Node, schedule: GraphSchedule) -> Decision:
        forced = reason_not_replayable(node)
        if node in schedule.saved and call_of(node).target is tiled_p:
            return Decision(
                "saved", f"{self.policy} saves it: the tiles of the forward pass make it"
            )
        if node in schedule.saved:
            reason = forced or reason_to_save(node) or "to recompute it would take longer"
            return Decision("saved", f"{self.policy} saves it: {reason}")
        if node in schedule.offloaded:
            return Decision("offloaded", f"{self.policy}", "pinned_host")
        if forced is not None:  # it is replayed from the generator's state
            self.forced.add(node)
            return Decision("saved", forced)
        return Decision("recomputed", f"{self.policy} recomputes it")

    def save_after_writes(self, joint: Joint) -> None:
        """Save what the user's code writes to as it is after that, so that no copy is needed.

        A value stays saved where the backward pass would else recompute it.
        """
        if self.schedule is not None:
            return
        last = {}
        for node, decision in self.by_value.items():
            if decision.outcome == "saved" and reason_not_replayable(node) is None:
                after = value_after_writes(node)
                if after is not node and after in self.by_value:
                    last[node] = after
        before = {n: self.by_value[n] for n in (*last, *last.values())}
        in_inputs = {base_of(value) for _, value in joint.mutations}
        for node, after in last.items():
            if before[after].outcome == "recomputed" and after not in in_inputs:
                self.by_value[after] = before[node]
            self.by_value[node] = _WRITTEN_LATER
        self._spare_copies(joint)
        for node in self.residuals(joint).recomputed.intersection(last) if last else ():
            self.by_value |= {n: before[n] for n in (node, last[node])}

    def _spare_copies(self, joint: Joint) -> None:
        """Save what is computed of inputs that are written to, where copies of them take more."""
        for i, value in joint.mutations:
            target, before = joint.inputs[i], self.residuals(joint)
            if target not in before.inputs:
                continue
            lying = values_after_writes(target)
            read = {node for node in joint.forward_nodes if lying & {*node.all_input_nodes}}
            readers = [n for n in self.by_value if call_of(n) in read and n not in lying]
            if value in self.by_value and is_read_by_derivative(value):
                readers.append(value)  # for which the input stands
            chosen = {n: self.by_value[n] for n in readers if n in before.recomputed}
            if any(is_staged_residual(n) for n in chosen):
                continue
            self.by_value |= dict.fromkeys(chosen, _SPARES_COPY)
            after = self.residuals(joint)
            if target in after.inputs or _nbytes_saved(joint, after) > _nbytes_saved(joint, before):
                self.by_value |= chosen

    @cached_property
    def from_states(self) -> set[fx.Node]:
        """Forced random values that a generator's state, which is smaller, can stand for."""
        return {n for n in self.replayable if self.runs_again or not is_run_again(n)}

    @property
    def replayable(self) -> set[fx.Node]:
        """Forced random values for which a state can stand, also those with arguments to read."""
        return {node for node in self.forced if state_nbytes(node) is not None}

    @cached_property
    def rerun(self) -> set[fx.Node]:
        """Results of operators that run again as they did, among `from_states`."""
        return {node for node in self.from_states if is_run_again(node)}

    def copy_to(self, nodes: Mapping[fx.Node, fx.Node]) -> "PolicyDecisions":
        other = copy.copy(self)
        other.values = {nodes[node]: value for node, value in self.values.items()}
        other.forced = {nodes[node] for node in self.forced}
        # settled when the forward pass ran, whatever takes less at the sizes of the copy
        other.from_states = {nodes[node] for node in self.from_states}
        other.rerun = {nodes[node] for node in self.rerun}
        other.by_value = {nodes[node]: decision for node, decision in self.by_value.items()}
        if self.schedule is not None:
            other.schedule = self.schedule.copy_to(nodes)
        return other

    def residuals(self, joint: Joint) -> Residuals:
        wanted = joint.returned_gradients
        if self.schedule is not None and self.schedule.backward:
            return self._residuals_of(self.schedule, joint, wanted)
        return self.residuals_for(joint, wanted)

    def _residuals_of(
        self, schedule: GraphSchedule, joint: Joint, wanted: Sequence[fx.Node]
    ) -> Residuals:
        order = [call for call in schedule.backward if self._runs(call)]
        needed = read_from_before(order, wanted)
        inside = [node for node in joint.module.graph.nodes if node in needed]
        inputs = set(joint.inputs)
        found = Residuals(
            tuple(node for node in inside if node.op == "call_function"),
            tuple(node for node in inside if node in inputs),
            frozenset(
                value
                for call in order
                if is_forward(call)
                for value in (call, *(user for user in call.users if is_item(user)))
            ),
        )
        return self._with_states(joint, found)

    def _runs(self, call: fx.Node) -> bool:
        """Whether a call of a schedule's backward pass runs there; else its results are saved."""
        forced = {value for value in (call, *call.users) if value in self.forced}
        return not forced or bool(forced & self.rerun)

    def _with_states(self, joint: Joint, found: Residuals) -> Residuals:
        """Add what runs again: its generator's state is saved, in the place of each result."""
        if found.recomputed.isdisjoint(self.rerun):
            return found
        wanted = {*found.values, *(found.recomputed & self.rerun)}
        return replace(found, values=tuple(n for n in joint.module.graph.nodes if n in wanted))

    def residuals_for(self, joint: Joint, wanted: Sequence[fx.Node]) -> Residuals:
        encodings = {node for node in joint.module.graph.nodes if is_encoding(node)}
        known = {*joint.inputs, *joint.forward_nodes, *encodings}
        if self.schedule is not None:
            known |= self.schedule.kept
        found = find_residuals(wanted, known.__contains__, self._may_keep)
        if needless := _find_needless(found, encodings):
            found = find_residuals(
                wanted, known.__contains__, lambda n: n not in needless and self._may_keep(n)
            )
        return self._with_states(joint, found)

    def _may_keep(self, node: fx.Node) -> bool:
        if self.schedule is not None and node in self.schedule.kept:
            return True
        if node in self.rerun:
            return False
        if is_encoding(node):
            value = value_of_encoding(node)
            is_saved = self.schedule is None and value not in self.from_states
            return is_saved and self._may_keep(value) and not self._is_offloaded(value)
        decision = self.by_value.get(node)  # none for a call of which only the items are values
        return decision is not None and decision.outcome in ("saved", "offloaded")

    def _is_offloaded(self, value: fx.Node) -> bool:
        return self.by_value[value].outcome == "offloaded"

    @property
    def offloads(self) -> bool:
        return any(decision.outcome == "offloaded" for decision in self.by_value.values())

    def warn_of_places(self, *, is_compiled: bool) -> bool:
        """Warn, at the user's line, of what the policy says of places and cannot be; if anything.

        `is_compiled`: the graphs are for a compiler, of which none can offload.
        """
        for reason, name in self.not_moved.items():
            warn_user(f"{self.policy}: {name} stays where it is: {reason}", OffloadWarning)
        if is_compiled and self.offloads:
            warn_user(
                f"{self.policy} offloads values, which graphs that are compiled do not: they are "
                "saved on their device. Without the compiler they are offloaded",
                OffloadWarning,
            )
        return bool(self.not_moved) or (is_compiled and self.offloads)

    def warn_of_unmatched(self) -> bool:
        values = list(self.values.values())
        messages = self.policy.find_unmatched(values)
        if not messages:
            return False
        nowhere = self.policy.find_unmatched([*values, *self._in_branches])
        subjects = {message.partition(MATCHES_NOTHING)[0]: message for message in nowhere}
        for message in messages:
            subject = message.partition(MATCHES_NOTHING)[0]
            warn_user(
                subjects.get(
                    subject,
                    f"{subject} matches only values inside a torch.cond, of which nothing is "
                    "saved: its derivative computes the branch again. Use torch.where to have them "
                    "saved",
                ),
                UnmatchedWarning,
            )
        return True


_SPARES_COPY = Decision(
    "saved", "it is computed of an input that is written to, of which a copy would take more"
)


_WRITTEN_LATER = Decision("recomputed", "it is written to later: it is needed as it is then")


def _find_needless(found: Residuals, encodings: set[fx.Node]) -> set[fx.Node]:
    """The encodings that spare nothing: of values that are saved, or that need inputs besides."""
    saved = {*found.values}
    codes = saved & encodings
    if not codes:
        return codes
    parts = {code for code in codes if not is_exact_encoding(code)}
    values = {value_of_encoding(code) for code in parts} - saved
    spared = _nbytes_in(values) - _nbytes_in(parts)
    behind = find_inputs_behind(found)
    needless = {code for code in codes if value_of_encoding(code) in saved}
    if _nbytes_in(behind) >= spared:
        needless |= parts
    return needless


def find_inputs_behind(found: Residuals) -> set[fx.Node]:
    """The further inputs from which a second derivative recomputes what is saved as encodings."""
    exact = {value_of_encoding(node) for node in found.values if is_exact_encoding(node)}
    there = {*found.values, *exact}
    values = [value_of_encoding(node) for node in found.values if is_encoding(node)]
    again = find_residuals(
        [v for v in values if v not in exact], lambda _: True, there.__contains__
    )
    return {*again.inputs} - {*found.inputs}


def _nbytes_in(nodes: Iterable[fx.Node]) -> int:
    tensors = [node.meta["val"] for node in nodes]
    return sum(_torch.hint_of(t.numel()) * t.dtype.itemsize for t in tensors)


def _nbytes_saved(joint: Joint, residuals: Residuals) -> int:
    """The bytes of residuals, and of copies of the inputs that are written to."""
    written = {joint.inputs[i] for i, _ in joint.mutations}
    in_inputs = {r.position for r in find_written_residuals(residuals.values, joint.mutations)}
    values = [node for i, node in enumerate(residuals.values) if i not in in_inputs]
    return _nbytes_in([*values, *written.intersection(residuals.inputs)])


def _has_several_values(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _values_in_branches(cond: fx.Node, module_prefix: str) -> list[Value]:
    values = []
    for body in inner_graphs_of(cond):
        names = _names_among(body.graph.nodes)
        values += [
            _value(node, names.get(node, ()), module_prefix)
            for node in body.graph.nodes
            if node.op == "call_function" and not is_view(node) and not _has_several_values(node)
        ]
    return values


def _names_among(nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[str, ...]]:
    names: dict[fx.Node, tuple[str, ...]] = {}
    for node in nodes:
        if node.target is name_p:
            base = base_of(node)
            names[base] = (*names.get(base, ()), str(node.kwargs["name"]))
    return names


def _value(node: fx.Node, names: tuple[str, ...], module_prefix: str) -> Value:
    call = call_of(node)
    inner = body_value_of(node)
    if inner is not None:
        prefix = below(module_prefix, notes_of(call).module)
        inside = _names_among(inner.graph.nodes).get(inner, ())
        return _value(inner, (*names, *inside), prefix)
    args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n: _aval(n.meta.get("val")))
    avals, params = split_arguments(call.target, args, kwargs)
    results = call.meta.get("val")
    outputs = results if isinstance(results, tuple | list) else (results,)
    return Value(
        op=call.target,
        avals=avals,
        params=params,
        names=names,
        module=below(module_prefix, notes_of(call).module),
        source=notes_of(call).source,
        outputs=tuple(a for a in map(_aval, outputs) if isinstance(a, Aval)),
        index=node.args[1] if is_item(node) else 0,  # type: ignore[arg-type]
    )


def _aval(value: Any) -> Any:
    return Aval.of(value) if isinstance(value, torch.Tensor) else value
