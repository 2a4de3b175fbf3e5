"""Backward hooks of modules: in a graph they are called with the gradients of each backward pass.

A hook is any Python: it may log, scale, or clip. In a trace it would be called once, with traced
tensors. So while a trace goes on each hook is a stand-in, which writes its call into the graph.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchremat import _torch

Gradients = tuple[Tensor | None, ...]


class HookCall:
    """Calls a hook of a module; `num_inputs` of the tensors are gradients that it may replace.

    It gives these back, or what the hook gives in their place. A call in a graph must not be left
    out, and is not: the gradients pass through it.
    """

    def __init__(
        self, hook: Callable[..., Any], module: nn.Module, present: Sequence[bool], num_inputs: int
    ) -> None:
        self._hook = hook
        self._module = weakref.ref(module)
        self._present = tuple(present)
        self._num_inputs = num_inputs
        self.__name__ = f"hook_{getattr(hook, '__name__', type(hook).__name__)}"

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
        inputs, outputs = grads[: self._num_inputs], grads[self._num_inputs :]
        module = self._module()
        assert module is not None, "a module whose backward runs is alive"
        result = self._hook(module, inputs, outputs) if outputs else self._hook(module, inputs)
        if result is None:
            result = inputs
        elif not isinstance(result, tuple):
            result = (result,)
        if len(result) != len(inputs):
            raise RuntimeError(
                f"the backward hook {self.__name__} of {type(module).__name__} returned "
                f"{len(result)} gradients and was given {len(inputs)}"
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
    with _torch.untraced():
        results = tuple(torch.empty_like(t).detach() for t in tensors[:count])
    _torch.track(results, proxy, tracer)
    return results


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
        call = HookCall(hook, module, [g is not None for g in given], len(inputs))
        results = iter(call(*(g for g in given if g is not None)))
        return tuple(None if g is None else next(results) for g in inputs)

    return stand_in
