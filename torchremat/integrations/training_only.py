"""Modules under `checkpoint` only while they train, and unchanged afterwards.

A library that trains a model also evaluates it and generates with it, from caches that are changed
in place. A layer then runs without `checkpoint`, as under the library's own checkpointing.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from torchremat.compile.lowering import check_backend
from torchremat.errors import ConcretizationError
from torchremat.policies.module_selection import Select
from torchremat.policies.policy import Policy, PolicyLike
from torchremat.remat.checkpoint import check_prevent_cse
from torchremat.remat.module_forward import RematForward
from torchremat.remat.module_policies import PolicyByPattern, assign_policies

Adapt: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, eq=False)
class TrainingPolicy:
    """A policy, with the other options of `nn.wrap`.

    Attributes:
        policy: what may be saved, or a dict from selections to that.
        select: which submodules are meant; `None` for the module itself.
        prevent_cse: as `checkpoint` takes it.
        compile: a backend for the graphs, as `nn.wrap` takes it.
        hint: a note for the error of a module that cannot be traced.
        adapt: makes of the module's forward the function that runs in its place, if any.
    """

    policy: PolicyLike | PolicyByPattern | None = None
    select: Select | None = None
    prevent_cse: Any = True
    compile: str | None = None
    hint: str = ""
    adapt: Adapt | None = None

    def apply_to(self, model: nn.Module) -> list[str]:
        """Replace the policies on `model` by this one; return the names of the modules it is on.

        Errors are those of `nn.wrap`, and change nothing.
        """
        check_prevent_cse(self.prevent_cse)
        if self.compile is not None:
            check_backend(self.compile, "compile")
        assigned = assign_policies(model, self.policy, self.select)
        remove(model)
        for name, module, policy in assigned:
            before = _take_removed(module)
            if before is not None and before.is_for(name, policy, self):
                before.resume()
            else:
                if before is not None:
                    before.forget()
                TrainingOnlyForward(module, name, policy, self).install()
        return [name for name, _, _ in assigned]


class TrainingOnlyForward(RematForward):
    """A forward under `checkpoint` while the module is in train mode.

    Attributes:
        is_on: whether it checkpoints. After its removal another library's wrapper may still call
            it.
        replaced: the forward under `checkpoint` that the module had before, if any.
        hint: a note for the error of a module that cannot be traced.
    """

    __slots__ = ("hint", "is_on", "replaced")

    is_on: bool
    replaced: RematForward | None
    hint: str

    def __init__(
        self, module: nn.Module, name: str, policy: Policy, options: TrainingPolicy
    ) -> None:
        before = vars(module).get("forward")
        super().__init__(module, name, policy, options.prevent_cse, options.compile, options.adapt)
        self.replaced = before if isinstance(before, RematForward) else None
        self.is_on = True
        self.hint = options.hint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.__self__
        if not self.is_on or not module.training:
            if args and args[0] is module:
                args = args[1:]
            return self.__wrapped__(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return RematForward.__call__(self, *args, **kwargs)
        try:
            return RematForward.__call__(self, *args, **kwargs)
        except ConcretizationError as error:
            if self.hint and self.hint not in getattr(error, "__notes__", ()):
                error.add_note(self.hint)
            raise

    def is_for(self, name: str, policy: Policy, options: TrainingPolicy) -> bool:
        """Whether a new one would do the same, so that the traces of this one hold."""
        mine = self.name, self.policy, self.prevent_cse, self.compile, self.hint, self.adapt
        theirs = options.prevent_cse, options.compile, options.hint, options.adapt
        return mine == (name, policy, *theirs)

    def remove(self) -> None:
        """Take it off the module.

        A trainer that generates or evaluates in each step does so and puts it on again: where it
        can, it keeps its traces for that, until the module is dropped.
        """
        module = self.__self__
        self.is_on = False
        if vars(module).get("forward") is not self:  # a wrapper around it stays, and calls it
            return
        removed = _find_removed(*self.hidden)
        if removed is None or self.replaced is not None:
            self.uninstall()
        else:
            self.take_off()
            removed[module] = self
        if self.replaced is not None:
            self.replaced.install()

    def resume(self) -> None:
        """Put it on again after `remove`."""
        self.is_on = True
        if find_training_forward(self.__self__) is not self:
            self.install()

    def __getstate__(self) -> dict[str, Any]:
        more = {name: getattr(self, name) for name in ("is_on", "replaced", "hint")}
        return {**super().__getstate__(), **more}


_Removed: TypeAlias = weakref.WeakKeyDictionary[nn.Module, TrainingOnlyForward]
_removed: _Removed = weakref.WeakKeyDictionary()
"""The forwards that `remove` took off modules that have the forward of their class."""


def _find_removed(hidden: Callable[..., Any] | None = None) -> _Removed | None:
    """Where `remove` puts the forwards that it takes off modules whose own forward is `hidden`.

    Their traces may hold the module by what that closes over. So the place is an attribute of it,
    and they are garbage with it. `None` if it has no attributes.
    """
    if hidden is None:
        return _removed
    attributes = getattr(getattr(hidden, "__func__", hidden), "__dict__", None)
    if not isinstance(attributes, dict):
        return None
    found: _Removed = attributes.setdefault("_torchremat_removed", weakref.WeakKeyDictionary())
    return found


def _take_removed(module: nn.Module) -> TrainingOnlyForward | None:
    """The forward that `remove` left on `module` beneath a wrapper, or took off it last."""
    hidden = (vars(module)["forward"],) if "forward" in vars(module) else ()
    removed = _find_removed(*hidden)
    off = None if removed is None else removed.pop(module, None)
    for forward in _unwrap_forwards(module):
        if isinstance(forward, TrainingOnlyForward):
            return forward
    return off if off is None or off.hidden == hidden else None


def remove(model: nn.Module) -> int:
    """Undo `TrainingPolicy.apply_to` in `model` and its submodules; return how many there were.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> TrainingPolicy("dots", "*").apply_to(model)
    ['0', '1']
    >>> remove(model), "forward" in vars(model[0])
    (2, False)
    """
    found = [forward for m in model.modules() if (forward := find_training_forward(m)) is not None]
    for forward in found:
        forward.remove()
    return len(found)


def find_training_forward(module: nn.Module) -> TrainingOnlyForward | None:
    """The `TrainingOnlyForward` of `module`, also beneath what others put around it."""
    for forward in _unwrap_forwards(module):
        if isinstance(forward, TrainingOnlyForward):
            return forward if forward.is_on else None
    return None


def _unwrap_forwards(module: nn.Module) -> Iterator[Any]:
    forward: Callable[..., Any] | None = vars(module).get("forward")
    seen: set[int] = set()
    while forward is not None and id(forward) not in seen:
        yield forward
        seen.add(id(forward))
        forward = getattr(forward, "__wrapped__", None)
