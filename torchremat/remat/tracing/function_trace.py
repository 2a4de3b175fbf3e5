"""One trace of a user's function: its region, and what it returned."""

import operator
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn

from torchremat.autodiff.bodies import FunctionBody
from torchremat.autodiff.joint import TraceOptions
from torchremat.core.source import source_of_error, warn_user
from torchremat.core.trees import Structure
from torchremat.errors import DeviceError, EffectWarning
from torchremat.remat.program.region import Region
from torchremat.remat.tracing.calls import Parts, Result, parts_of_call
from torchremat.tracing.dynamic_inputs import DynamicInputs
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.tracing import current_tracing
from torchremat.tracing.value_guards import ValueGuards


@dataclass(frozen=True, eq=False)
class FunctionTrace:
    region: Region
    result: Result
    body: FunctionBody
    captured: Sequence[Tensor]
    paths: ModulePaths


def trace_function(
    fun: Callable[..., Any],
    structure: Structure,
    specs: Sequence[InputSpec],
    dynamic: DynamicInputs | None,
    roots: Sequence[tuple[str, nn.Module]],
    options: TraceOptions,
    around: Callable[..., Any] | None = None,
    values: Sequence[Tensor] = (),
) -> FunctionTrace:
    """Trace `fun`, called as `structure` says with tensors of `specs`, or of `dynamic` sizes.

    It does not keep `fun` alive. Branches on masks are answered by `values`, the tensors of the
    call. `roots` are the modules that it starts from, by name. If `around` is given, what runs is
    `around(fun, *args, **kwargs)`.
    """
    paths = ModulePaths({})
    for name, module in roots:
        paths.add_root(module, name)
    results: list[Result] = []
    get_function = _weakly(fun)

    def flat(tensors: list[Tensor]) -> list[Any]:
        function = get_function()
        args, kwargs = structure.unflatten(tensors)
        before = None if results else parts_of_call(structure, args, kwargs)
        value = around(function, *args, **kwargs) if around else function(*args, **kwargs)
        if before is not None:
            _warn_of_changed_arguments(function, before, parts_of_call(structure, args, kwargs))
        result = Result(value, lambda: describe_fun(function))
        if not results:  # a trace of a derivative runs this again
            results.append(result)
        return list(result.tensors)

    around_it = current_tracing()
    outer = None if around_it is None else around_it.evaluate
    value_guards = ValueGuards(values, outer) if dynamic is None else None
    body = FunctionBody(lambda: flat, specs, value_guards)
    names = [f"arg{i}" for i in range(len(specs))]
    traced_specs = specs if dynamic is None else dynamic.specs
    with _explain_missing_device(fun), value_guards.first() if value_guards else nullcontext():
        region = Region.trace(body, traced_specs, names, paths, options, dynamic)
    assert body.captured is not None
    return FunctionTrace(region, results[0], body, body.captured(), paths)


_NO_DEVICE = r"PyTorch is not linked with support for \w+ devices"


@contextmanager
def _explain_missing_device(fun: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not re.match(_NO_DEVICE, str(error)):
            raise
        raise DeviceError(
            f"{describe_fun(fun)} at {source_of_error(error)}: {error}. This machine, or "
            "this build of PyTorch, has no such device. Ask torch.accelerator.is_available() "
            "first, or make tensors where the arguments are (device=x.device)"
        ) from error


def _warn_of_changed_arguments(
    fun: Callable[..., Any], before: dict[str, Parts], after: dict[str, Parts]
) -> None:
    """Say which lists and dicts among the arguments `fun` changes: they are not the caller's."""
    for label, (leaves, structure) in before.items():
        leaves_after, structure_after = after[label]
        if structure != structure_after or any(map(operator.is_not, leaves, leaves_after)):
            warn_user(
                f"{describe_fun(fun)} changes {label}, a list or dict that it is given: a "
                "checkpoint replays a graph, which leaves the caller's as it is. Return what is "
                "new (a cache, say), or change it outside the checkpoint",
                EffectWarning,
            )


def describe_fun(fun: Callable[..., Any]) -> str:
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
