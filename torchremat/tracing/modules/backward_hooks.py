"""Backward hooks: in a graph they are called with the gradients of each backward pass.

A hook is any Python: it may log, scale, clip, or keep what it is given. In a trace it would be
called once, with traced tensors. So while a trace goes on each hook, of a module or of a tensor, is
a stand-in, which writes its call into the graph.
"""

import dis
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchremat import _torch
from torchremat.errors import EffectError

Gradients = tuple[Tensor | None, ...]


class HookCall:
    """Calls a hook; `num_inputs` of the tensors are gradients that it may replace.

    `run` calls it with all of them. The call gives these back, or what the hook gives in their
    place. A call in a graph must not be left out, and is not: the gradients pass through it.
    A hook that `only_looks` replaces none, and nobody reads what its call gives. In a trace those
    who read the tensors later read them from the call.
    """

    def __init__(
        self,
        run: Callable[[Gradients], Any],
        name: str,
        present: Sequence[bool],
        num_inputs: int,
        *,
        only_looks: bool = False,
    ) -> None:
        self.only_looks = only_looks
        self._run = run
        self._present = tuple(present)
        self._num_inputs = num_inputs
        self.__name__ = f"hook_{name}"

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if _torch.innermost_transform() == _torch.TransformType.Functionalize:
            return _torch.apply_to_functional(lambda inner: self(*inner), tensors)  # type: ignore[no-any-return]
        mode = _torch.innermost_proxy_mode()
        if mode is not None:
            return _record_call(self, tensors, mode.tracer)
        if _torch.is_faking():  # a graph that contains the call is traced as a whole
            return tuple(map(torch.empty_like, tensors[: sum(self._present[: self._num_inputs])]))
        left = iter(tensors)
        grads: Gradients = tuple(next(left) if there else None for there in self._present)
        inputs = grads[: self._num_inputs]
        result = self._run(grads)
        if result is None:
            result = inputs
        elif not isinstance(result, tuple):
            result = (result,)
        if len(result) != len(inputs):
            raise RuntimeError(
                f"the backward hook {self.__name__} returned {len(result)} gradients and was given "
                f"{len(inputs)}"
            )
        return tuple(
            given if changed is None else changed
            for given, changed in zip(inputs, result, strict=True)
            if given is not None
        )


def _record_call(call: HookCall, tensors: Sequence[Tensor], tracer: Any) -> tuple[Tensor, ...]:
    count = sum(call._present[: call._num_inputs])
    proxies = tuple(_torch.proxy_of(tensor, tracer) for tensor in tensors)
    proxy = tracer.create_proxy("call_function", call, proxies, {})
    results = tuple(tensors[:count])
    if not call.only_looks:
        with _torch.untraced():
            results = tuple(torch.empty_like(t).detach() for t in results)
    _torch.track(results, proxy, tracer)
    return results


# --- of modules -----------------------------------------------------------------------------------


@contextmanager
def record_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    changed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in modules:
        for hooks in _torch.backward_hooks_of(module):
            if hooks:
                changed.append((hooks, dict(hooks)))
                for key, hook in hooks.items():
                    hooks[key] = _make_stand_in(hook)
    try:
        yield
    finally:
        for hooks, before in changed:
            for key, hook in before.items():
                if key in hooks:
                    hooks[key] = hook


def _make_stand_in(hook: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(module: nn.Module, inputs: Gradients, outputs: Gradients = ()) -> Any:
        if torch.is_grad_enabled():  # of a derivative that is differentiated again: as it computes
            return hook(module, inputs, outputs) if outputs else hook(module, inputs)
        given = [*inputs, *outputs]
        reference, count = weakref.ref(module), len(inputs)

        def run(grads: Gradients) -> Any:
            module = reference()
            assert module is not None, "a module whose backward runs is alive"
            rest = (grads[count:],) if len(grads) > count else ()
            return hook(module, grads[:count], *rest)

        if outputs and all(g is None for g in inputs):
            _record_look(run, _name_of(hook), inputs, outputs)
            return None
        call = HookCall(run, _name_of(hook), [g is not None for g in given], count)
        results = iter(call(*(g for g in given if g is not None)))
        return tuple(None if g is None else next(results) for g in inputs)

    return stand_in


def _record_look(
    run: Callable[[Gradients], Any], name: str, inputs: Gradients, outputs: Gradients
) -> None:
    """Call the hook of a module whose inputs need no gradient: it is given those of the outputs."""

    def look(grads: Gradients) -> None:
        found = run((*inputs, *grads))
        if found is not None and any(g is not None for g in found):
            raise RuntimeError(
                f"the backward hook {name} returned a gradient of an input, and none needs one"
            )

    present = [g is not None for g in outputs]
    HookCall(look, name, present, len(outputs), only_looks=True)(
        *(g for g in outputs if g is not None)
    )


def _name_of(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


# --- of tensors -----------------------------------------------------------------------------------


def make_tensor_stand_in(
    hook: Callable[[Tensor], Any], is_traced: Callable[[Tensor], bool]
) -> Callable[[Tensor], Any]:
    """Make what a trace registers in place of `hook`.

    It is the hook itself if that can only compute, which becomes operators of the graph, or if it
    computes with traced tensors.
    """
    if _only_computes(hook) or any(map(is_traced, _tensors_of(hook))):
        return hook
    run, name = _let_modules_go(hook), _name_of(hook)

    def stand_in(grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # of a derivative that is differentiated again: as it computes
            before = sys.getrefcount(grad)
            found = run(grad)
            if sys.getrefcount(grad) > before + (found is grad):
                raise EffectError(
                    f"the hook {name} of a tensor keeps the gradient that it is given, in a "
                    "derivative that is differentiated again: a checkpoint cannot put that of each "
                    "call there. Register it on a tensor outside the checkpoint."
                )
            return found
        (result,) = HookCall(lambda grads: run(grads[0]), name, [True], 1)(grad)
        return result

    return stand_in


_WRITES = {"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR", "MAKE_FUNCTION"}
_FUNCTIONS = {"abs", "float", "int", "isinstance", "len", "max", "min", "range", "sum", "tuple"}


def _only_computes(value: Any) -> bool:
    """Whether a function refers to numbers, tensors, PyTorch and such functions alone."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in ("torch", "math")
    if not isinstance(value, types.FunctionType):
        return isinstance(value, Tensor | int | float | complex | str | torch.dtype | None)
    if any(step.opname in _WRITES for step in dis.get_instructions(value)):
        return False
    names = inspect.getclosurevars(value)
    inside = [*names.nonlocals.values(), *names.globals.values(), *(value.__defaults__ or ())]
    return _FUNCTIONS.issuperset(names.builtins) and all(map(_only_computes, inside))


def _tensors_of(hook: Any) -> Iterator[Tensor]:
    """Yield the tensors that a function refers to: in its closure, defaults, object and inside."""
    match hook:
        case Tensor():
            yield hook
        case types.MethodType():
            yield from _tensors_of(hook.__func__)
        case functools.partial():
            yield from _tensors_of([hook.func, hook.args, hook.keywords])
        case types.FunctionType():
            yield from _tensors_of([*_closure_of(hook).values(), hook.__defaults__])
            yield from _tensors_of(hook.__kwdefaults__)
        case list() | tuple():
            for item in hook:
                yield from _tensors_of(item)
        case dict():
            yield from _tensors_of(list(hook.values()))


def _closure_of(function: types.FunctionType) -> dict[str, Any]:
    names = function.__code__.co_freevars
    cells = zip(names, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def _let_modules_go(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`hook`, without keeping the modules alive that it refers to, which hold the trace."""
    if isinstance(hook, types.MethodType) and isinstance(hook.__self__, nn.Module):
        method = weakref.WeakMethod(hook)

        def call(grad: Tensor) -> Any:
            bound = method()
            assert bound is not None, "a module whose backward runs is alive"
            return bound(grad)

        return call
    if not isinstance(hook, types.FunctionType):
        return hook
    code, variables, cells = hook.__code__, hook.__globals__, hook.__closure__ or ()
    modules = {
        i: weakref.ref(value)
        for i, name in enumerate(code.co_freevars)
        if isinstance(value := _closure_of(hook).get(name), nn.Module)
    }
    if not modules:
        return hook
    defaults, keywords = hook.__defaults__, hook.__kwdefaults__
    others = [None if i in modules else cell for i, cell in enumerate(cells)]
    del hook, cells

    def run(grad: Tensor) -> Any:
        closure = tuple(
            types.CellType(modules[i]()) if cell is None else cell for i, cell in enumerate(others)
        )
        function = types.FunctionType(code, variables, code.co_name, defaults, closure)
        function.__kwdefaults__ = keywords
        return function(grad)

    return run
