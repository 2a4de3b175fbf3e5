"""Explanations: what becomes of each value of a forward pass under a policy, and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchremat import _torch
from torchremat.autodiff.bodies import FunctionBody
from torchremat.autodiff.rewrites.encoding_ops import is_encoding
from torchremat.autodiff.rewrites.encodings import value_of_encoding
from torchremat.autodiff.tiles.tiled_op import describe_tiles, tiled_p
from torchremat.core.avals import Aval
from torchremat.core.source import name_of
from torchremat.errors import TraceError
from torchremat.graph.nodes import base_of, body_of, is_checkpoint, is_forward
from torchremat.graph.notes import notes_of
from torchremat.policies.module_selection import Select
from torchremat.policies.policy import PolicyLike
from torchremat.remat.module_policies import under_policy
from torchremat.remat.program.decisions import Decision, Outcome
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.random_replay import draws_again, state_aval
from torchremat.remat.tape.tape import TapeSummary
from torchremat.remat.tracing.input_labels import (
    BoundCall,
    InputLabel,
    labels_of_state,
    refuse_misspelt,
)
from torchremat.remat.values.scope import (
    Scope,
    ScopedValue,
    is_computed,
    program_of,
)
from torchremat.remat.values.value_labels import ValueLabels
from torchremat.report.observe import (
    Observation,
    ObservedInput,
    SavedStorage,
    observe_saved,
    residual_of,
)
from torchremat.report.report import Report
from torchremat.report.report_rows import Row
from torchremat.report.tape_rows import rows_of_tape
from torchremat.tracing.modules.module_paths import below


def explain(
    f: Callable[..., Any],
    *args: Any,
    policy: PolicyLike | None = None,
    select: Select | None = None,
    **kwargs: Any,
) -> Report:
    """The decision, with its reason, on each value of `f` that matters to the backward pass.

    `f` is traced on fake tensors and not run. Differentiated are the inputs that require a
    gradient, or all floating-point arguments if none does.

    Args:
        f: a function of trees of tensors and other values, or an `nn.Module`.
        *args: its arguments; real, fake or `meta` tensors.
        policy: explains `checkpoint(f, policy=policy)`. `None`: `f` as it is, where the checkpoints
            inside it decide.
        select: puts the policy on these modules of the model `f`, as `nn.wrap` does, in place of
            the whole; `f` stays as it is. `policy=None` then saves nothing but their inputs.
        **kwargs: its keyword arguments.

    Returns:
        A `Report`, with a row for each value that is saved or recomputed. Its `total` is the
        bytes that autograd really saves. Only the kernel of an LSTM on a CPU knows the size of its
        workspace: it runs once on zeros, and is left out where `args` are fake or meta.

    Raises:
        TypeError: if `f` is not callable, if there is nothing to differentiate, or if there is a
            `select` and `f` is no `nn.Module`.
        ValueError: where `nn.wrap` raises it: `NoMatchError` if `select` matches nothing.

    >>> import torch
    >>> import torchremat as tr
    >>> def f(x, w):
    ...     return torch.sin(x @ w).sum()
    >>> print(explain(f, torch.ones(8, 16), torch.ones(16, 32), policy="full"))
    saved for the backward pass: 0 B in 0 tensors; recomputed: 1.00 KiB in 1 tensor
    <BLANKLINE>
    recomputed: ... does not let it be saved, 1.00 KiB
      1.00 KiB  mm  f32[8,32]  ...2 (f)
    <BLANKLINE>
    inputs: an argument, 2.50 KiB
         512 B  x  f32[8,16]
      2.00 KiB  w  f32[16,32]
    """
    refuse_misspelt(explain, f, kwargs)
    call = BoundCall(f, args, kwargs)  # before it is wrapped, so that an error names `f`
    if policy is not None or select is not None:
        call = BoundCall(under_policy(f, policy, select), args, kwargs)
    observation = observe_saved(call)
    if policy is not None and select is None:
        return replace(report_of(observation), program=_only_program(observation))
    return replace(report_of(observation), program=ExplainedCall.of(call.fun, args, kwargs))


@dataclass(frozen=True, eq=False)
class ExplainedCall:
    """It is traced with its derivative only when it is drawn, which few reports are."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(
        cls, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "ExplainedCall":
        mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[int, Tensor] = {}

        def make_fake(leaf: Any) -> Any:
            if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout is not torch.strided:
                return leaf
            if id(leaf) not in fakes:
                with mode:
                    fake = torch.empty_strided(
                        leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
                    )
                fakes[id(leaf)] = fake.requires_grad_(leaf.requires_grad)
            return fakes[id(leaf)]

        return cls(fun, *_torch.tree_map(make_fake, (args, kwargs)))

    def check_still(self, report: Report) -> None:
        again = explain(self.fun, *self.args, **self.kwargs)
        known = {(row.name, row.decision) for row in report}
        # fake tensors lack the rows of a kernel's workspace
        changed = [row for row in again if (row.name, row.decision) not in known]
        if changed:
            raise TraceError(
                f"{name_of(self.fun)} has changed since it was explained: {changed[0].name} is now "
                f"{changed[0].decision}. Explain it again, and draw that report."
            )


def _only_program(observation: Observation) -> FunctionProgram | None:
    calls = observation.scope.calls
    return program_of(calls[0]) if len(calls) == 1 else None


def report_of(observation: Observation) -> Report:
    labels = ValueLabels.of(observation.scope)
    inputs: list[tuple[ObservedInput, Row]] = []
    found = _Rows(labels)
    for saved in observation.saved:
        if saved.input is not None:
            inputs.append((saved.input, _input_row(saved.input.label, saved.aval, saved.nbytes)))
        else:
            found.add_saved(saved)
    for call in observation.scope.calls:
        program = program_of(call)
        if call.kwargs["call"] in observation.live_calls and program is not None:
            inside = observation.scope.whole_inside(call)
            found.add_replayed(inside, program)
            found.add_tiled(inside, program)
    inputs.sort(key=lambda pair: observation.inputs.index(pair[0]))
    return Report((*(row for _, row in inputs), *found.sort()))


def report_of_programs(
    programs: Sequence[tuple[str, FunctionProgram | TapeSummary]],
    state: Mapping[int, InputLabel],
) -> Report:
    """A value that one program saved and another reads as an input counts once, for the first.

    `state` has the labels of parameters and buffers, by the `id` of their storages.
    """
    rows: list[Row] = []
    for name, program in programs:
        if isinstance(program, TapeSummary):
            rows += rows_of_tape(program, state)
            continue
        scope = Scope.of_program(program, name)
        found = _Rows(ValueLabels.of(scope))
        found.add_residuals(scope, program)
        found.add_replayed(scope, program)
        found.add_tiled(scope, program)
        rows += _program_inputs(name, program)
        rows += found.sort()
    graphs = tuple((name, p) for name, p in programs if isinstance(p, FunctionProgram))
    return Report(tuple(rows), RanPrograms(graphs))


@dataclass(frozen=True, eq=False)
class RanPrograms:
    modules: tuple[tuple[str, FunctionProgram], ...]


class _Rows:
    def __init__(self, labels: ValueLabels) -> None:
        self.labels = labels
        self._rows: dict[Any, tuple[int, Row]] = {}

    def sort(self) -> list[Row]:
        return [row for _, row in sorted(self._rows.values(), key=lambda pair: pair[0])]

    def add_saved(self, saved: SavedStorage) -> None:
        value = saved.value
        if value is None:
            row = Row("literal", "", "", None, saved.aval.shape, saved.aval.dtype, saved.nbytes,
                      "constant", "a number")  # fmt: skip
            self._rows[id(saved)] = (-1, row)
            return
        decision = _decision_on(saved) or Decision("saved", _reason_of_saved(saved))
        if decision.outcome == "offloaded" and not saved.offloaded_to:
            decision = Decision("saved", "under torch.func residuals are outputs, which stay")
        if value.is_constant:
            decision = Decision("constant", decision.reason)
        self._add(value, decision, saved.nbytes, saved.aval)

    def add_residuals(self, scope: Scope, program: FunctionProgram) -> None:
        for i, node in enumerate(program.residuals):
            tensor = node.meta["val"]
            decision = _decision_of(program, node)
            nbytes = tensor.untyped_storage().nbytes()
            aval = Aval.of(tensor)
            if i in program.replayed_random:
                aval = state_aval(node)
                nbytes = aval.nbytes
            self._add(scope.value_of(node), decision, nbytes, aval)

    def add_replayed(self, scope: Scope, program: FunctionProgram) -> None:
        """The recomputed values are the forward operators in the backward graph of `program`."""
        given = (True,) * len(program.differentiable)
        needed = tuple(spec.requires_grad for spec in program.region.specs)
        backward = program.backward(given, needed, with_states=bool(program.replayed_random))
        self._add_replays(scope, backward.module, program)

    def add_tiled(self, scope: Scope, program: FunctionProgram) -> None:
        """The values of the forward pass of which there is a tile at a time, with its bytes."""
        graph = program.root_joint.module.graph
        for call in graph.find_nodes(op="call_function", target=tiled_p):
            decision = Decision("tiled", describe_tiles(call))
            for node in body_of(call).graph.nodes:
                if is_computed(node) and is_forward(node):
                    value = ScopedValue(node, scope)
                    if value.aval is not None:
                        self._add(value, decision, value.aval.nbytes, value.aval)

    def _add_replays(
        self, scope: Scope, backward: fx.GraphModule, program: FunctionProgram | None
    ) -> None:
        decisions = {} if program is None else program.decisions.by_value
        reasons = {node.name: decision.reason for node, decision in decisions.items()}
        calls = {call.kwargs["call"]: call for call in scope.calls}
        for node in backward.graph.nodes:
            if is_checkpoint(node):
                call = calls.get(node.kwargs["call"], node)
                inner = scope.whole_inside(call)
                if is_forward(node):
                    reason = next((reasons[i.name] for i in node.users if i.name in reasons), "")
                    self._add_body(inner, body_of(node), reason)
                else:
                    self._add_replays(inner, body_of(node), self.labels.programs.get(inner.path))
            elif is_computed(node) and is_forward(node) and not draws_again(node):
                reason = reasons.get(node.name, "the backward pass needs it")
                self._add_recomputed(ScopedValue(node, scope), reason)

    def _add_body(self, scope: Scope, body: fx.GraphModule, reason: str) -> None:
        for node in body.graph.nodes:
            if is_checkpoint(node):
                self._add_body(scope.whole_inside(node), body_of(node), reason)
            elif is_computed(node):
                self._add_recomputed(ScopedValue(node, scope), reason)

    def _add_recomputed(self, value: ScopedValue, reason: str) -> None:
        aval = value.aval
        if aval is not None and not value.is_constant:
            self._add(value, Decision("recomputed", reason), aval.nbytes, aval)

    def _add(self, value: ScopedValue, decision: Decision, nbytes: int, aval: Aval) -> None:
        if value.key in self._rows:
            return
        label = self.labels.label_of(value)
        reason = decision.reason
        if notes_of(value.node).is_looped:
            reason += "; vmap has no rule for it, and runs it once for each example"
        row = Row(label.name, value.op, label.module, label.source, aval.shape, aval.dtype, nbytes,
                  decision.outcome, reason)  # fmt: skip
        self._rows[value.key] = (self.labels.position(value), row)


# --- reasons -------------------------------------------------------------------------------------


def _reason_of_saved(saved: SavedStorage) -> str:
    """The reason names the node of autograd that saves the value; a checkpoint's comes last."""
    plain = [reader for reader in saved.readers if reader.owner is None]
    if plain:
        return f"no checkpoint decides: {plain[0].name} reads it"
    if saved.readers:
        return f"an input of a checkpoint: {name_of(saved.readers[0].owner)} reads it"
    return "no checkpoint decides"


def _decision_on(saved: SavedStorage) -> Decision | None:
    decisions = map(decision_inside, map(base_of, saved.nodes))
    return next((decision for decision in decisions if decision is not None), None)


def decision_inside(node: fx.Node) -> Decision | None:
    found = residual_of(node)
    if found is None or found[1] < 0:
        return None
    program, number = found
    return _decision_of(program, program.residuals[number])


def _decision_of(program: FunctionProgram, residual: fx.Node) -> Decision:
    decision = program.decisions.by_value.get(residual)
    schedule = program.decisions.schedule
    if is_encoding(residual):
        value = program.decisions.by_value[value_of_encoding(residual)]
        planned = f"{program.decisions.policy} saves it"
        reason = value.reason if schedule is None else planned
        return Decision("saved", f"{reason}, in fewer bits")
    if decision is None and schedule is not None and residual in schedule.saved:
        return Decision(
            "saved", f"{program.decisions.policy} saves it: only the backward pass has a use for it"
        )
    if decision is None:
        return Decision("saved", "a copy, made before the function writes to it")
    if decision.outcome == "offloaded" and not program.offloaded:
        return Decision("saved", f"{decision.reason} offloads it, but {program.why_none_offloaded}")
    if residual in {program.residuals[i] for i in program.replayed_random}:
        return Decision("saved", "the state of the generator, from which it is drawn again")
    if decision.outcome == "recomputed":
        return Decision("saved", "config.verify_recomputation compares it")
    return decision


# --- inputs --------------------------------------------------------------------------------------

_REASONS = {
    "argument": "an argument",
    "parameter": "a parameter",
    "buffer": "a buffer",
    "closed-over": "a tensor that the function closes over",
}


def _input_row(label: InputLabel, aval: Aval, nbytes: int) -> Row:
    is_state = label.kind in ("parameter", "buffer")
    module = label.text.rpartition(".")[0] if is_state else ""
    decision: Outcome = "parameter" if label.kind == "parameter" else "input"
    return Row(label.text, "", module, None, aval.shape, aval.dtype, nbytes, decision,
               _REASONS[label.kind])  # fmt: skip


def _program_inputs(name: str, program: FunctionProgram) -> list[Row]:
    region = program.region
    state = labels_of_state(region.paths)
    body = region.body
    captured = body.captured() if isinstance(body, FunctionBody) and body.captured else []
    num_args = len(region.specs) - len(captured)
    rows = []
    for i in program.saved_inputs:
        label = InputLabel("argument", below(name, region.names[i]))
        if i >= num_args:
            found = state.get(id(captured[i - num_args]))
            text = label.text if found is None else below(name, found.text)
            label = InputLabel("closed-over" if found is None else found.kind, text)
        tensor = program.root_joint.inputs[i].meta["val"]
        rows.append(_input_row(label, Aval.of(tensor), tensor.untyped_storage().nbytes()))
    return rows
