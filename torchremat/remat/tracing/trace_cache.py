"""The cache of traces: found by what a call is like, under a weak reference to the function."""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Generator, Tensor

from torchremat import _torch
from torchremat.api_util import WrapHashably
from torchremat.core.accelerators import DefaultGenerator
from torchremat.graph.nodes import base_of
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.policies.policy import Policy
from torchremat.remat.escapes.escapes import Escapes
from torchremat.remat.escapes.live_tensors import LastingChangeError
from torchremat.remat.escapes.reach import Roots
from torchremat.remat.escapes.read_watch import Spot
from torchremat.remat.escapes.templates import CallValues
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.region import Region
from torchremat.remat.program.shared_graphs import SharedGraphs
from torchremat.remat.tape.refused_kinds import RefusedKinds
from torchremat.remat.tape.taped_call import TapedCalls
from torchremat.remat.tracing.calls import AnyNumber, Call, Result, differing_numbers
from torchremat.remat.tracing.failed_checks import find_generators, pass_on
from torchremat.remat.tracing.function_trace import FunctionTrace
from torchremat.remat.tracing.guards.captured_tensors import CapturedTensors
from torchremat.remat.tracing.guards.code_guard import CodeGuard, plain_variables_of
from torchremat.remat.tracing.guards.module_guard import ModuleGuard
from torchremat.remat.tracing.guards.starting_point import StartingPoint
from torchremat.remat.tracing.guards.variable_guard import VariableGuard
from torchremat.tracing.ambient_state import AmbientState
from torchremat.tracing.checks.checks import CheckError
from torchremat.tracing.dtensors import CotangentPlacements
from torchremat.tracing.dynamic_inputs import DynamicInputs, is_alike
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.attribute_reads import AttributeReads
from torchremat.tracing.value_guards import ValueGuard, all_hold


@dataclass(eq=False)
class Trace:
    """One cached trace of a function: for which calls it holds, and its programs by policy."""

    key: tuple[Any, ...]
    specs: tuple[InputSpec, ...]
    state: tuple[bool, AmbientState]
    records: bool
    """Whether autograd records the call: in grad mode, or where the function enables it."""
    region: Region
    result: Result
    captured: CapturedTensors
    modules: ModuleGuard
    variables: VariableGuard
    code: CodeGuard
    escapes: Escapes
    dynamic: DynamicInputs | None = None
    offsets: tuple[int, ...] | None = None
    """Where in their storages the inputs began, if the graph depends on it."""
    value_guards: tuple[ValueGuard, ...] = ()
    """Guards on the truth values of masks among its inputs."""
    cotangent_placements: CotangentPlacements = field(default_factory=CotangentPlacements)
    tensor_guard: Any = None
    shared_reads: AttributeReads | None = None
    """Names that were read of the modules, if the trace may serve alike layers."""
    programs: dict["PolicyKey", FunctionProgram] = field(default_factory=dict)

    def program_of(self, key: "PolicyKey") -> FunctionProgram | None:
        """The program under that policy, unless the policy has to decide anew."""
        program = self.programs.get(key)
        return None if program is None or program.is_outdated else program

    @property
    def is_sharded(self) -> bool:
        return any(spec.sharding for spec in self.region.specs)

    @property
    def dynamic_dims(self) -> Sequence[Sequence[int]]:
        dims: list[list[int]] = [[] for _ in self.region.specs]
        for i, dim in () if self.dynamic is None else self.dynamic.places:
            dims[i].append(dim)
        return dims

    def has_offsets_of(self, tensors: Sequence[Tensor]) -> bool:
        if self.offsets is None:
            return True
        return self.offsets == tuple(InputSpec.of(t).storage_offset for t in tensors)

    def value_guards_hold(self, tensors: Sequence[Tensor]) -> bool:
        return all_hold(self.value_guards, tensors)

    def still_holds(self) -> bool:
        """Whether the guards hold that do not depend on the arguments."""
        return self.modules.holds() and self.variables.holds() and self.code.holds()

    def has_escapes_of(self, call: Call, function: Callable[..., Any]) -> bool:
        """Whether all that the function changes elsewhere is as it was when it was traced."""
        return self.escapes.hold(Roots(function, call.arguments))

    def deliver(
        self,
        outputs: tuple[Any, ...],
        inputs: Sequence[Tensor],
        call: Call,
        function: Callable[..., Any],
        sizes: Sizes | None,
    ) -> Any:
        """The result of `call`; what the function leaves elsewhere is written there."""
        roots = Roots(function, call.arguments)
        known = self.result.find_known(roots)
        escaped = outputs[len(outputs) - self.region.body.num_escaped :]
        values = CallValues(escaped, inputs, sizes, roots)
        if self.escapes:
            self.escapes.write(values)
        return self.result.rebuild(outputs, values, known)

    @property
    def num_checks(self) -> int:
        return self.region.body.num_checks

    @cached_property
    def _generators(self) -> Sequence[Generator | DefaultGenerator]:
        return find_generators(self.region.joint.module)

    def run_checked(self, run: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...] | None:
        """Run a graph that has checks; `None` if one does not hold, and as if it had not run."""
        if _torch.innermost_proxy_mode() is not None or _torch.is_faking():
            outputs = run()
            pass_on(outputs[len(outputs) - self.num_checks :])
            return outputs
        states = [(generator, generator.get_state()) for generator in self._generators]
        try:
            return run()
        except CheckError:
            for generator, state in states:
                generator.set_state(state)
        return None

    def what_changed(self, call: Call, function: Callable[..., Any]) -> str | None:
        found = self.modules.what_changed() or self.variables.what_changed()
        found = found or self.code.what_changed()
        return found or self.escapes.what_changed(Roots(function, call.arguments))

    def is_for(self, call: Call, specs: tuple[InputSpec, ...], state: Any) -> bool:
        """Whether it is of calls with such arguments, and what it read is as it was."""
        if self.key != call.key or self.state != state:
            return False
        if self.dynamic is None:
            alike = self.specs == specs
        else:
            alike = self.dynamic.allows(specs) and self.dynamic.sizes(call.tensors) is not None
        return alike and self.still_holds()

    def fits(
        self, call: Call, specs: tuple[InputSpec, ...], state: Any, function: Callable[..., Any]
    ) -> bool:
        if not self.is_for(call, specs, state):
            return False
        if self.escapes and not self.has_escapes_of(call, function):
            return False
        captured = self.captured.current()
        if captured is None:
            return False
        if not self.has_offsets_of([*call.tensors, *captured]):
            return False
        recorded = self.region.specs[len(specs) :]
        return all(
            isinstance(t, Tensor) and InputSpec.of(t, any_level=True) == spec
            for t, spec in zip(captured, recorded, strict=True)
        ) and self.value_guards_hold([*call.tensors, *captured])


def build_trace(
    made: FunctionTrace,
    around: StartingPoint,
    call: Call,
    specs: tuple[InputSpec, ...],
    state: Any,
    dynamic: DynamicInputs | None,
    reads: AttributeReads | None,
    *,
    may_be_shared: bool,
) -> Trace:
    """Put guards around what was traced. `reads`: what it read of modules, if that is known."""
    unchanged, modules = around.unchanged, around.name_modules(made.paths)
    unchanged.add(plain_variables_of(made.code))
    has_changed = unchanged.forget_changed(made.escapes)
    read = [made.function, *unchanged.find_objects(), *(module for _, module in modules)]
    own = made.captured, around.variables, modules, made.escapes
    captured = CapturedTensors(*own, writes=bool(made.region.joint.mutations))
    made.body.captured = captured.current_tensors
    is_shared = may_be_shared and captured.are_all_found and not has_changed
    if is_shared and made.region.graphs is None:
        made.region.graphs = SharedGraphs()
    return Trace(
        key=tuple(k.freeze() if isinstance(k, WrapHashably) else k for k in call.key),
        specs=specs,
        state=state,
        records=made.region.options.with_gradients,
        region=made.region,
        result=made.result,
        captured=captured,
        modules=ModuleGuard(modules, made.escapes, made.captured, reads),
        variables=unchanged,
        code=CodeGuard(made.code, read),
        escapes=made.escapes,
        dynamic=dynamic,
        cotangent_placements=made.body.cotangent_placements,
        offsets=_offsets(made.region, [*call.tensors, *made.captured]),
        value_guards=tuple(made.body.value_guards.guards) if made.body.value_guards else (),
        shared_reads=reads if is_shared else None,
    )


def _offsets(region: Region, tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The storage offsets of the inputs, if the function asks for a place in their storage."""
    asked = region.joint.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.as_strided.default
    )
    if not any(base_of(n.args[0]) in region.joint.inputs and len(n.args) > 3 for n in asked):
        return None
    return tuple(InputSpec.of(t).storage_offset for t in tensors)


class PolicyKey:
    """A policy as a key: by value if it can be hashed, else by identity. Hashed once."""

    __slots__ = ("_hash", "policy", "verified")

    def __init__(self, policy: Policy, *, verified: bool = False) -> None:
        self.policy = policy
        self.verified = verified
        try:
            self._hash = hash(policy)
        except TypeError:  # it is made of a callable that cannot be hashed
            self._hash = id(policy)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PolicyKey)
            and self.verified is other.verified
            and (self.policy is other.policy or self.policy == other.policy)
        )


def current_state() -> tuple[bool, AmbientState]:
    return torch.is_grad_enabled(), AmbientState.now()


# as many as the recompilations after which torch.compile gives a function up
MANY_TRACES = 8
"""Traces, alike but for one thing, after which a function has no more where a tape will do."""
# chosen by hand: four sizes may be those of buckets
FEW_TRACES = 4
"""Traces for sizes that Python reads, of which each has its own, after which there are no more."""

# A call that is new is compared with all of them, and each has its graphs. Chosen by hand, far
# above the eight at which a user is warned.
_MOST_TRACES = 128


class Traces:
    """The traces of one function, newest first."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self.num_made = 0
        self.recent: Trace | None = None
        self.warned = False
        self.has_stopped = False
        """Whether calls without a trace run on tapes, since there are too many traces."""
        self.fixed: dict[tuple[int, int], str] = {}
        """Inputs and dimensions whose size cannot be a symbol, with what was said of it."""
        self.seen_keys: set[Any] = set()
        """Kinds of calls that were met once, where only what repeats is traced."""
        self.jobs: dict[PolicyKey, Policy] = {}
        """Policies that remember, over all calls, what they decided."""
        self.untraceable_keys = RefusedKinds()
        """Kinds of calls that are not traced again, since they could not be."""
        self.changing_keys = RefusedKinds()
        """Kinds of calls of which one changed attributes; they are traced once more."""
        self.read_spots: set[Spot] = set()
        """Places that the function changes and reads: each value there has a trace."""
        self.read_numbers: set[tuple[int, int]] = set()
        """Lengths of keys, and positions in them, of numbers that the function reads."""
        self.tapes: dict[PolicyKey, TapedCalls] = {}
        """Those calls under each policy, if they are checkpointed all the same."""

    def gives_up(self, kind: Any, error: Exception) -> bool:
        """Whether calls of this kind, refused with `error`, are not traced again."""
        if isinstance(error, LastingChangeError) and kind not in self.changing_keys:
            self.changing_keys.add(kind)
            return False
        self.untraceable_keys.add(kind)
        return True

    @property
    def may_stop(self) -> bool:
        """Whether the function may have too many traces for another."""
        return self.has_stopped or (not self.warned and len(self.traces) >= FEW_TRACES)

    def fix(self, places: Iterable[tuple[int, int]], error: Exception) -> None:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        self.fixed |= dict.fromkeys(places, reason)

    def job_of(self, key: PolicyKey) -> Policy:
        """The policy `key` as it goes on from the calls before."""
        if key not in self.jobs:
            self.jobs[key] = key.policy.begin_job()
        return self.jobs[key]

    def add(self, trace: Trace, *, is_new: bool = True) -> None:
        """Add a trace that was made for this function, or for an alike layer (`is_new=False`)."""
        self.num_made += is_new
        self.traces.insert(0, trace)
        del self.traces[_MOST_TRACES:]

    def find(
        self,
        call: Call,
        specs: tuple[InputSpec, ...],
        function: Callable[..., Any],
        *,
        dynamic: bool,
    ) -> Trace | None:
        """The trace of such a call in the present surroundings; of any size if `dynamic`."""
        state = current_state()
        for trace in self.traces:
            if (dynamic or trace.dynamic is None) and trace.fits(call, specs, state, function):
                return trace
        return None

    def varying_numbers(self, call: Call) -> frozenset[int]:
        """The positions in the key of numbers that differed in calls like this one, if unread."""
        state = current_state()
        found = (self._differing(t, call) for t in self.traces if t.state == state)
        return frozenset[int]().union(*filter(None, found))

    def _differing(self, trace: Trace, call: Call) -> frozenset[int] | None:
        """The numbers that may differ from those of `trace`; `None` if more differs."""
        numbers = differing_numbers(trace.key, call.key)
        length = len(call.key)
        if numbers is None or any((length, i) in self.read_numbers for i in numbers):
            return None
        return numbers

    def may_share_numbers(self, trace: Trace, call: Call) -> bool:
        """Whether the key of `call` is that of `trace`, but for numbers that nothing may read."""
        return self._differing(trace, call) is not None

    def note_numbers(self, numbers: Iterable[int], trace: Trace) -> None:
        """Note which of the `numbers` are read, since the trace is for a single one there."""
        length = len(trace.key)
        self.read_numbers |= {(length, i) for i in numbers if type(trace.key[i]) is not AnyNumber}

    def varying(self, call: Call, specs: tuple[InputSpec, ...]) -> tuple[frozenset[int], ...]:
        """The dimensions of each input in which calls like this one differed from it."""
        state = current_state()
        dims: list[set[int]] = [set() for _ in specs]
        fixed = set(self.fixed)
        for trace in self.traces:
            if trace.state != state or self._differing(trace, call) is None:
                continue
            if not trace.still_holds():
                continue
            known = trace.specs
            if len(known) != len(specs) or not all(map(is_alike, known, specs)):
                continue
            for i, (ours, theirs) in enumerate(zip(specs, known, strict=True)):
                pairs = enumerate(zip(ours.shape, theirs.shape, strict=True))
                dims[i].update(dim for dim, (a, b) in pairs if a != b)
            if trace.dynamic is not None:
                fixed |= trace.dynamic.fixed
                for i, dim in trace.dynamic.places:
                    dims[i].add(dim)
        return tuple(
            frozenset(dim for dim in found if (i, dim) not in fixed) for i, found in enumerate(dims)
        )


class TracesByFunction:
    """Traces under weak references to functions: dropping a function frees them."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], tuple[tuple[weakref.ref[Any], ...], Traces]] = {}

    def of(self, fun: Callable[..., Any], statics: tuple[Any, ...]) -> Traces:
        parts = (fun.__self__, fun.__func__) if isinstance(fun, MethodType) else (fun,)
        key = (*map(id, parts), statics)
        entry = self._entries.get(key)
        if entry is None:
            try:
                forget = functools.partial(self._forget, key)
                references = tuple(weakref.ref(part, forget) for part in parts)
            except TypeError:  # some callables cannot be referred to weakly
                return Traces()
            entry = self._entries.setdefault(key, (references, Traces()))
        return entry[1]

    def _forget(self, key: tuple[Any, ...], _: object) -> None:
        self._entries.pop(key, None)
