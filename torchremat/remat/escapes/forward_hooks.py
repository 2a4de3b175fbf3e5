"""Forward hooks of modules inside: part of the graph, or called after it with what they would see.

A hook that returns a value or writes to a tensor is part of the graph. So is one that only keeps
tensors, which are carried out as others that the function leaves somewhere. One that prints, counts
or asks for values is called once the graph has run, with the tensors of the module in that call.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchremat import _torch
from torchremat.core.slots import identity_of
from torchremat.core.source import Source, current_source
from torchremat.errors import EffectError
from torchremat.remat.escapes.holders import ABSENT, write_items, write_slot
from torchremat.remat.escapes.reach import Holder, Reach, Roots, StandIn
from torchremat.remat.escapes.read_watch import reads_unnoted
from torchremat.remat.escapes.templates import (
    CallValues,
    Template,
    TemplateMaker,
    holds_traced,
)
from torchremat.tracing.error_messages import needs_value


@dataclass(frozen=True, eq=False)
class DeferredHook:
    """A call of a hook of a module, found by its handle, after the graph has run."""

    module: weakref.ref[nn.Module]
    place: str
    handle: int
    arguments: Template
    with_gradients: bool

    def call(self, values: CallValues) -> None:
        module = self.module()
        assert module is not None, "the hooks of a trace are those of modules that it guards"
        hook = vars(module)[self.place][self.handle]
        with torch.set_grad_enabled(self.with_gradients):
            result = hook(module, *values.make(self.arguments))
        if result is not None:
            raise EffectError(
                f"{_describe(hook, module)} returned None when it was traced, and now returns a "
                "value: a checkpoint calls it after its graph. Let it return a value always, or "
                "never, or put it on the checkpointed module itself."
            )


class HookStandIn(StandIn):
    """Notes what a hook does. Equal to it, and to others that stand for it."""

    def __init__(self, calls: "HookCalls", place: str, handle: int, hook: Any) -> None:
        self._calls = calls
        self._at = (place, handle)
        self.hook = hook.hook if isinstance(hook, HookStandIn) else hook

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        return self._calls.run(*self._at, self.hook, module, arguments)

    def __eq__(self, other: object) -> bool:
        return bool(self.hook == (other.hook if isinstance(other, HookStandIn) else other))

    def __hash__(self) -> int:
        return hash(self.hook)


@dataclass(eq=False)
class HookCalls:
    """The hooks that run while a function is traced, and what became of each."""

    maker: TemplateMaker
    deferred: list[DeferredHook] = field(default_factory=list)
    _chains: dict[int, tuple[Holder, Any, str]] = field(default_factory=dict)
    """For each object that deferred hooks changed: before the first, after the last, by whom."""
    _seen: list[tuple[Tensor, int, str]] = field(default_factory=list)

    @contextmanager
    def stand_in(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """In the block forward hooks of `modules` are stand-ins that note what the hooks do."""
        changed: list[tuple[dict[int, Any], dict[int, Any], dict[int, Any]]] = []
        for module in modules:
            for place in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = vars(module)[place]
                if hooks:
                    made = {key: HookStandIn(self, place, key, h) for key, h in hooks.items()}
                    changed.append((hooks, dict(hooks), made))
                    hooks.update(made)
        try:
            yield
            self._check()
        finally:
            for hooks, before, made in changed:
                for key, hook in before.items():
                    if hooks.get(key) is made[key]:
                        hooks[key] = hook
            for holder, _, _ in self._chains.values():
                _restore(holder)

    def forget(self) -> None:
        """Free what belongs to the trace: guards of traces inside may keep stand-ins."""
        del self.maker
        self._chains.clear()
        self._seen.clear()

    def run(
        self,
        place: str,
        handle: int,
        hook: Callable[..., Any],
        module: nn.Module,
        arguments: tuple[Any, ...],
    ) -> Any:
        with _torch.without_function_modes(), reads_unnoted():
            tensors = [t for t in _torch.tree_flatten(arguments)[0] if isinstance(t, Tensor)]
            versions = [_torch.version_of(t) for t in tensors]
            hooks = list(map(_torch.count_hooks, tensors))
            holders = Reach(Roots(hook, ()), [module], through_modules=False).holders
        asks = False
        try:
            result = hook(module, *arguments)
        except Exception as error:
            if not needs_value(error):
                raise
            asks, result = True, None
        with _torch.without_function_modes(), reads_unnoted():
            writes = versions != [_torch.version_of(t) for t in tensors]
            writes = writes or hooks != list(map(_torch.count_hooks, tensors))
            changed = [h for h in holders if _is_changed(h)]
            keeps_only = bool(changed) and all(map(_keeps_tensors_only, changed))
            if result is None and not writes and (asks or not keeps_only):
                said = _describe(hook, module)
                self._defer(place, handle, module, arguments)
                self._note(changed, said)
                self._seen += [(t, v, said) for t, v in zip(tensors, versions, strict=True)]
        return result

    def _defer(self, place: str, handle: int, module: nn.Module, arguments: Any) -> None:
        template = self.maker.make(arguments)
        enabled = torch.is_grad_enabled()
        self.deferred.append(DeferredHook(weakref.ref(module), place, handle, template, enabled))

    def _note(self, changed: Sequence[Holder], said: str) -> None:
        for holder in changed:
            first, last, _ = self._chains.get(
                identity_of(holder.target), (holder, holder.before, said)
            )
            if not _is_equal(last, holder.before):
                raise _conflict(said)
            self._chains[identity_of(holder.target)] = (first, holder.read(), said)

    def _check(self) -> None:
        with _torch.without_function_modes():
            for holder, last, said in self._chains.values():
                if not _is_equal(last, holder.read()):
                    raise _conflict(said)
            for tensor, version, said in self._seen:
                if _torch.version_of(tensor) != version:
                    raise EffectError(
                        f"{said} sees a tensor that is written to in place later on (by "
                        "ReLU(inplace=True), say): a checkpoint calls it after its graph, when the "
                        "value is another. Let the hook keep a copy (out.clone()) and do the rest "
                        "outside, or make the write a new tensor."
                    )


def _conflict(said: str) -> EffectError:
    return EffectError(
        f"{said} changes something that the function, or another hook, reads or changes too: a "
        "checkpoint calls it after its graph, and the order would be another. Let the hook keep "
        "tensors alone, or put it on the checkpointed module itself."
    )


def _describe(hook: Callable[..., Any], module: nn.Module) -> str:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    line: Any = current_source()
    if code is not None:
        line = Source(code.co_filename, code.co_firstlineno, code.co_name)
    return f"the forward hook at {line} on a {type(module).__name__} inside"


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _is_changed(holder: Holder) -> bool:
    return not _is_equal(holder.before, holder.read())


def _keeps_tensors_only(holder: Holder) -> bool:
    """Whether what is new in `holder` are tensors, or in a list `None` in the place of some."""
    after = holder.read()
    if holder.is_sequence:
        new = after[len(holder.before) :]
        return bool(new) and all(item is None or holds_traced(item) for item in new)
    new = [item for key, item in after.items() if holder.before.get(key, ABSENT) is not item]
    return all(map(holds_traced, new))


def _restore(holder: Holder) -> None:
    if holder.is_sequence:
        write_items(holder.target, holder.before)
        return
    after = holder.read()
    for key in {**holder.before, **after}:
        if holder.before.get(key, ABSENT) is not after.get(key, ABSENT):
            write_slot(holder.target, key, holder.before.get(key, ABSENT))
