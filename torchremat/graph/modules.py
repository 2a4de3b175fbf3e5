"""Which `nn.Module` is running: qualified names while a function is traced."""

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from torchremat import _torch


class ModulePaths:
    """The stack of modules that are running in this thread, by qualified name.

    A module that is met outside any other is a root. It is called by the name that `roots` gives
    it, else by the name of its class; what it contains, by its qualified name below that.
    """

    def __init__(self, roots: Mapping[int, str]) -> None:
        self._roots = roots
        self._names: dict[int, str] = {}
        self._stack: list[nn.Module] = []
        self._thread = threading.get_ident()
        self.seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._tensors: dict[int, tuple[nn.Module, list[dict[str, Any]]]] = {}

    @property
    def current(self) -> str:
        """The qualified name of the innermost running module, `''` outside any."""
        return self._names[id(self._stack[-1])] if self._stack else ""

    def name_of(self, module: nn.Module) -> str | None:
        """The qualified name of `module`, if it has run or is part of one that has."""
        return self._names.get(id(module))

    def _name(self, module: nn.Module) -> None:
        if id(module) not in self._names:
            self.add_root(module, self._roots.get(id(module), type(module).__name__))

    def add_root(self, module: nn.Module, root: str) -> None:
        """Call `module` `root`, and all that it contains accordingly, before any of it runs."""
        for name, child in module.named_modules():
            self._names.setdefault(id(child), ".".join(part for part in (root, name) if part))
        self.seen.add(module)

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if threading.get_ident() == self._thread and not self._is_generated(module):
            self._name(module)
            self.seen.add(module)
            self._note_tensors(module)
            self._stack.append(module)

    def _note_tensors(self, module: nn.Module) -> None:
        if id(module) not in self._tensors:
            self._tensors[id(module)] = (module, [dict(d) for d in _places(module)])

    def _is_generated(self, module: nn.Module) -> bool:
        """Whether `module` is a graph that PyTorch made, for a `torch.cond` say."""
        return isinstance(module, fx.GraphModule) and id(module) not in self._names

    def _exit(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if threading.get_ident() == self._thread and self._stack and self._stack[-1] is module:
            self._stack.pop()

    @contextmanager
    def recording(self) -> Iterator["ModulePaths"]:
        """Follow the calls of modules while in the block."""
        for root in list(self.seen):  # a wrapped module is entered by its forward, unseen by hooks
            for module in root.modules():
                self._note_tensors(module)
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._exit, always_call=True),
        )
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
            self._stack.clear()

    def put_tensors_back(self) -> list[tuple[str, Tensor]]:
        """Give the modules that ran the tensors that they had; what they had instead, by name.

        A module may put a result in place of one, as spectral norm does. That result is a value of
        the trace, of no use to anyone else.
        """
        replaced = []
        for module, before in self._tensors.values():
            for place, values in zip(_places(module), before, strict=True):
                for name, value in list(place.items()):
                    if not _is_of_trace(value) or _is_of_trace(values.get(name)):
                        continue  # `torch.func.functional_call` puts back what it changed itself
                    replaced.append((".".join(filter(None, (self.name_of(module), name))), value))
                    if name in values:
                        place[name] = values[name]
                    else:
                        del place[name]
        self._tensors.clear()
        return replaced


def _is_of_trace(value: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(
        _torch.innermost_tensor(value), _torch.FakeTensor
    )


def _places(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module has its tensors."""
    return (module.__dict__, module._buffers, module._parameters)
