"""A trace for the cache, of what tracing a function has found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torchremat.api_util import WrapHashably
from torchremat.graph.nodes import base_of
from torchremat.remat.program.region import Region
from torchremat.remat.tracing.alike import Origin, module_of
from torchremat.remat.tracing.calls import Call
from torchremat.remat.tracing.function_trace import FunctionTrace
from torchremat.remat.tracing.given_scalars import GivenScalars
from torchremat.remat.tracing.guards import CapturedTensors, ModuleGuard, VariableGuard
from torchremat.remat.tracing.trace_cache import Trace
from torchremat.remat.tracing.variables import Binding
from torchremat.tracing.ambient_state import AmbientState
from torchremat.tracing.dynamic_inputs import DynamicInputs
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import below


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A call that was traced, the surroundings, and scalars that the trace does not read."""

    fun: Callable[..., Any]
    module_prefix: str
    call: Call
    specs: tuple[InputSpec, ...]
    state: tuple[bool, AmbientState]
    dynamic: DynamicInputs | None
    unread: GivenScalars


def build_trace(
    made: FunctionTrace,
    unchanged: VariableGuard,
    variables: Sequence[Binding],
    modules: Sequence[nn.Module],
    traced: TracedCall,
) -> Trace:
    call = traced.call.without(traced.unread.leaves)
    named = _name_modules([*modules, *made.paths.seen], made, traced.module_prefix)
    root = module_of(traced.fun) if isinstance(traced.fun, MethodType) else None
    unread = frozenset((id(slot.place), slot.name) for slot in traced.unread.slots)
    captured = CapturedTensors(made.captured, variables, named, made.escapes)
    made.body.captured = captured.current_tensors
    return Trace(
        key=tuple(k.freeze() if isinstance(k, WrapHashably) else k for k in call.key),
        specs=traced.specs,
        state=traced.state,
        records=made.region.options.with_gradients,
        region=made.region,
        result=made.result,
        captured=captured,
        modules=ModuleGuard(named, made.escapes, made.captured, unread, root),
        variables=unchanged,
        escapes=made.escapes,
        dynamic=traced.dynamic,
        cotangent_placements=made.body.cotangent_placements,
        offsets=_offsets(made.region, [*call.tensors, *made.captured]),
        origin=Origin.of(made.flat, traced.fun),
        value_guards=tuple(made.body.value_guards.guards) if made.body.value_guards else (),
    )


def _name_modules(
    modules: Sequence[nn.Module], made: FunctionTrace, prefix: str
) -> list[tuple[str, nn.Module]]:
    return [(below(prefix, made.paths.name_of(m)), m) for m in dict.fromkeys(modules)]


def _offsets(region: Region, tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The storage offsets of the inputs, if the function asks for a place in their storage."""
    asked = region.joint.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.as_strided.default
    )
    if not any(base_of(n.args[0]) in region.joint.inputs and len(n.args) > 3 for n in asked):
        return None
    return tuple(InputSpec.of(t).storage_offset for t in tensors)
