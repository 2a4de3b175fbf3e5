"""The cache of traces: found by what a call is like, under a weak reference to the function."""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from torchremat.graph.surroundings import Surroundings
from torchremat.graph.tracing import InputSpec
from torchremat.remat.calls import Call, Result
from torchremat.remat.guards import CapturedTensors, ModuleGuard, VariableGuard
from torchremat.remat.policies import Policy
from torchremat.remat.program import FunctionProgram
from torchremat.remat.region import Region


@dataclass(eq=False)
class Trace:
    """One cached trace of a function: for which calls it holds, and its programs by policy."""

    key: tuple[Any, ...]
    specs: tuple[InputSpec, ...]
    surroundings: tuple[bool, Surroundings]
    region: Region
    result: Result
    captured: CapturedTensors
    modules: ModuleGuard
    variables: VariableGuard
    tensor_guard: Any = None
    programs: dict["PolicyKey", FunctionProgram] = field(default_factory=dict)

    def still_holds(self) -> bool:
        """Whether what the trace took for granted, besides the arguments, is as it was."""
        return self.modules.holds() and self.variables.holds()

    def fits(self, key: tuple[Any, ...], specs: tuple[InputSpec, ...], state: Any) -> bool:
        """Whether the trace is of such a call."""
        if self.key != key or self.specs != specs or self.surroundings != state:
            return False
        if not self.still_holds():
            return False
        captured = self.captured.current()
        if captured is None:
            return False
        recorded = self.region.specs[len(specs) :]
        return all(
            isinstance(t, Tensor) and InputSpec.of(t, any_level=True) == spec
            for t, spec in zip(captured, recorded, strict=True)
        )


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


def surroundings() -> tuple[bool, Surroundings]:
    """Whether gradients are enabled, and the state of PyTorch that changes what is computed."""
    return torch.is_grad_enabled(), Surroundings.now()


class Traces:
    """The traces of one function, newest first."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self.recent: Trace | None = None
        self.warned = False

    def find(self, call: Call) -> Trace | None:
        """The trace of such a call in the present surroundings."""
        specs = tuple(InputSpec.of(t, any_level=True) for t in call.tensors)
        state = surroundings()
        for trace in self.traces:
            if trace.fits(call.key, specs, state):
                return trace
        return None


class TracesByFunction:
    """Traces under weak references to functions: dropping a function frees them."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], tuple[tuple[weakref.ref[Any], ...], Traces]] = {}

    def of(self, fun: Callable[..., Any], statics: tuple[Any, ...]) -> Traces:
        """The traces of `fun`, which may be a bound method."""
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
