"""The `nn.Module` that is running, by its qualified name, while a function is traced."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import fx, nn

from torchremat import _torch
from torchremat.core.source import current_source
from torchremat.errors import ParallelModuleError
from torchremat.tracing.modules.attribute_changes import AttributeChange, ModuleState
from torchremat.tracing.modules.attribute_reads import AttributeReads
from torchremat.tracing.modules.backward_hooks import record_hooks
from torchremat.tracing.modules.parallel_kind import parallel_kind

_COMPILED = "_orig_mod"
"""The name that `torch.compile(module)` gives the module that it wraps."""


class ModulePaths:
    """The stack of modules that are running in this thread, by qualified name.

    A module that is met outside any other is a root. Its name is the one in `roots`,
    else that of its class. The modules inside it have their qualified names below that. `reads`
    notes which attributes of modules are read.
    """

    def __init__(self, roots: Mapping[int, str], reads: AttributeReads | None = None) -> None:
        self._roots = roots
        self._reads = reads
        self._names: dict[int, str] = {}
        self._stack: list[nn.Module] = []
        self.seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._state = ModuleState()
        self.changes: list[AttributeChange] = []

    @property
    def current(self) -> str:
        """The qualified name of the innermost running module, `''` outside any."""
        return self._names[id(self._stack[-1])] if self._stack else ""

    @property
    def are_reads_late(self) -> bool:
        """Whether a derivative has read attributes that the function itself did not."""
        return self._reads is not None and self._reads.is_late

    def name_of(self, module: nn.Module) -> str | None:
        return self._names.get(id(module))

    def _name(self, module: nn.Module) -> None:
        if id(module) not in self._names:
            self.add_root(module, self._roots.get(id(module), type(module).__name__))

    def add_root(self, module: nn.Module, root: str) -> None:
        for name, child in module.named_modules():
            parts = [part for part in (root, *name.split(".")) if part not in ("", _COMPILED)]
            self._names.setdefault(id(child), ".".join(parts))
        self.seen.add(module)

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if not self._is_generated(module):
            self._name(module)
            self._refuse_parallel(module)
            self.seen.add(module)
            self._state.note(module)
            self._stack.append(module)

    def _refuse_parallel(self, module: nn.Module) -> None:
        kind = parallel_kind(module)
        if kind is not None:
            called = " ".join(filter(None, (self._names[id(module)], f"({type(module).__name__})")))
            raise ParallelModuleError(
                f"the module {called} {kind}, and runs inside a traced function at "
                f"{current_source()}: what it gathers from other processes, and when, has no place "
                "in a graph. Wrap that module itself, torchremat.nn.wrap(model, policy, "
                "select='layers.*') say, whose hooks stay outside the graph; of a "
                "DistributedDataParallel wrap its .module. plan, estimate and explain take the "
                "model before it is made parallel; nn.split_budget plans for such layers."
            )

    def _is_generated(self, module: nn.Module) -> bool:
        """Whether `module` is a graph that PyTorch made, for a `torch.cond` say."""
        return isinstance(module, fx.GraphModule) and id(module) not in self._names

    def _exit(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self._stack.pop()

    @contextmanager
    def recording(self) -> Iterator["ModulePaths"]:
        """Follow the calls of modules in the block, and undo what it does to their attributes.

        What that was is in `changes` afterwards.
        """
        # a wrapped module is entered by its forward, unseen by hooks
        known = list(dict.fromkeys(module for root in self.seen for module in root.modules()))
        for module in known:
            self._state.note(module)
        try:
            with (
                _torch.call_around_modules(self._enter, self._exit),
                record_hooks(known),
                self._reads.watching() if self._reads is not None else nullcontext(),
            ):
                yield self
        except BaseException:
            # what noted that it has put them is undone too, and would put them a second time
            self._state.remove_new_hooks()
            raise
        finally:
            self._stack.clear()
            self.changes = list(self._state.changes())
            self._state.clear()
            for change in self.changes:
                change.undo()


def below(outer: str | None, inner: str | None) -> str:
    """The qualified name of what is called `inner` from the module `outer`.

    >>> below("layers.1", "1.weight"), below("", "weight")
    ('layers.1.1.weight', 'weight')
    """
    return ".".join(name for name in (outer, inner) if name)
