"""The attributes of modules that a function reads while it is traced.

A trace depends on these alone. A layer's number that only a cache would use is read by nobody. So
it needs no guard, and layers that differ in nothing else compute the same.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

import torch
from torch import nn

from torchremat import _torch

_WHOLE = frozenset(("__dict__", "__getstate__", "__reduce__", "__copy__", "__deepcopy__"))
"""Attributes through which all the others can be read."""

_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_OF_MODULES = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "module.py")


class AttributeReads:
    """The names that are read of each of some modules, while in a block of `watching`.

    >>> linear = nn.Linear(2, 3)
    >>> reads = AttributeReads([linear])
    >>> with reads.watching():
    ...     size = linear.in_features
    >>> reads.names_of(linear)
    frozenset({'in_features'})
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)  # whose identities are keys, until `close`
        self._names: dict[int, set[str]] = {id(module): set() for module in self._modules}
        self._whole = {id(m) for m in self._modules if not _has_plain_reads(type(m))}
        self.is_late = False
        """Whether a name was read first after `close`, when a derivative was traced."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        with _torch.note_attribute_reads(self._note):
            yield

    def close(self) -> None:
        """End the trace of the function itself, and let the modules go."""
        self._modules = []
        self._is_closed = True

    def names_of(self, module: nn.Module) -> Set[str] | None:
        """The names that were read of `module`; `None` if it could be any."""
        names = None if id(module) in self._whole else self._names.get(id(module))
        return None if names is None else frozenset(names)

    def copy_to(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> "AttributeReads":
        """Reads alike of other modules, each the second of a pair."""
        pairs = list(pairs)
        copied = AttributeReads(other for _, other in pairs)
        copied._names = {id(b): set(self._names[id(a)]) for a, b in pairs}
        copied._whole = {id(b) for a, b in pairs if id(a) in self._whole}
        copied.close()
        return copied

    _is_closed = False

    def _note(self, module: nn.Module, name: str) -> None:
        names = self._names.get(id(module))
        if names is None:
            return
        self.is_late |= self._is_closed and name not in names
        names.add(name)
        if name in _WHOLE:
            # two frames up: this function was called by what stands in PyTorch
            reader = sys._getframe(2).f_code.co_filename
            if reader != _OF_MODULES and not reader.startswith(_OWN):
                self._whole.add(id(module))
                self.is_late |= self._is_closed


def _has_plain_reads(kind: type[nn.Module]) -> bool:
    """Whether modules of a class are read as any are: by no method of its own, nor in C++."""
    own = [c for c in kind.__mro__ if c is not nn.Module and c is not object]
    is_plain = not any("__getattribute__" in vars(c) for c in own)
    return is_plain and not issubclass(kind, torch.jit.ScriptModule)
