"""One trace of a user's function: its region, and what it returned."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn

from torchremat.autodiff.bodies import FunctionBody
from torchremat.autodiff.joint import TraceOptions
from torchremat.graph.dynamic_inputs import DynamicInputs
from torchremat.graph.modules import ModulePaths
from torchremat.graph.tracing import InputSpec
from torchremat.remat.calls import Result, Skeleton
from torchremat.remat.region import Region


@dataclass(frozen=True, eq=False)
class FunctionTrace:
    """What a trace gives: what is differentiated, what was returned, what was closed over."""

    region: Region
    result: Result
    body: FunctionBody
    captured: Sequence[Tensor]
    paths: ModulePaths


def trace_function(
    fun: Callable[..., Any],
    skeleton: Skeleton,
    specs: Sequence[InputSpec],
    dynamic: DynamicInputs | None,
    roots: Sequence[tuple[str, nn.Module]],
    options: TraceOptions,
    around: Callable[..., Any] | None = None,
) -> FunctionTrace:
    """Trace `fun`, called as `skeleton` says with tensors of `specs`, or of `dynamic` sizes.

    It does not keep `fun` alive. `roots` are the modules that it starts from, by name. What runs
    is `around(fun, *args, **kwargs)`, if given.
    """
    paths = ModulePaths({})
    for name, module in roots:
        paths.add_root(module, name)
    results: list[Result] = []
    get_function = _weakly(fun)

    def flat(tensors: list[Tensor]) -> list[Any]:
        function = get_function()
        filled, named = skeleton.filled(tensors)
        value = around(function, *filled, **named) if around else function(*filled, **named)
        result = Result(value, lambda: traced_name(function))
        if not results:  # a trace of a derivative runs this again
            results.append(result)
        return list(result.tensors)

    body = FunctionBody(lambda: flat, len(specs))
    names = [f"arg{i}" for i in range(len(specs))]
    traced_specs = specs if dynamic is None else dynamic.specs
    region = Region.traced(body, traced_specs, names, paths, options, dynamic)
    assert body.captured is not None
    return FunctionTrace(region, results[0], body, body.captured(), paths)


def traced_name(fun: Callable[..., Any]) -> str:
    """What to call a traced function in a message."""
    return getattr(fun, "__qualname__", None) or type(fun).__name__


def _weakly(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """A way to get at `fun` that does not keep it alive."""
    try:
        reference = weakref.WeakMethod(fun) if isinstance(fun, MethodType) else weakref.ref(fun)
    except TypeError:
        return lambda: fun

    def get() -> Callable[..., Any]:
        found = reference()
        assert found is not None, "the function of a checkpoint is gone"
        return found

    return get
