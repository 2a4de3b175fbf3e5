"""Code that may run in a trace, found by the names in other code, and what it reads."""

import functools
import inspect
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from torchremat.remat.escapes.names_in_code import names_in, texts_in
from torchremat.remat.tracing.guards.entries import (
    MOST_VARIABLES,
    Binding,
    OfContext,
    entries_of,
    is_open,
    is_plain,
    is_user_written,
    is_users,
    items_of,
    read_by,
)

# Chosen by hand: the code of a model of transformers that `forward` reaches has some 200.
_MOST_FUNCTIONS = 512


class NamedCode:
    """Functions, and what code they name in the classes of objects: methods, properties, lambdas.

    Such code may run in a trace without leading to an operator, as where it computes a number.
    """

    def __init__(
        self, functions: Iterable[FunctionType], modules: Sequence[nn.Module] = ()
    ) -> None:
        """Of `modules`, each `forward` and the forward hooks may run."""
        self.functions: list[FunctionType] = []
        self.names: set[str] = set()
        self._parts: set[str] = set()
        self._known: set[int] = set()
        self._modules = modules
        self._of_hooks: list[Binding] = []
        for function in functions:
            self._add(function)
        for module in modules:
            self._add_method(type(module), "forward")
            for kind in ("_forward_pre_hooks", "_forward_hooks"):
                for hook in vars(module)[kind].values():
                    self.note(hook)
                    self._of_hooks += entries_of(Binding("a hook", [hook], 0))

    def find_held(self, own: Sequence[Binding]) -> list[Binding]:
        """The variables in what `own` hold, as far as code names them; it adds what code they have.

        Code adds names, and these may lead to other code.
        """
        while True:
            count = len(self.functions)
            held = self._find_entries([*own, *self._of_hooks])
            for value in (*self._modules, *(v.get() for v in (*own, *held))):
                self.note(value)
            if len(self.functions) == count:
                return held

    def find_plain(self) -> list[Binding]:
        """The plain values that the code reads itself."""
        read = [v for f in self.functions for v in read_by(f)]
        read += [entry for v in read for entry in items_of(v.get(), v.label)]
        read += [OfContext(v.label, v.get()) for v in read if isinstance(v.get(), ContextVar)]
        return [v for v in read if is_plain(v.get())]

    def _find_entries(self, own: Sequence[Binding]) -> list[Binding]:
        found: list[Binding] = []
        seen: set[int] = set()
        level = list(own)
        while level and len(found) < MOST_VARIABLES:
            distinct = {id(v.get()): v for v in level if id(v.get()) not in seen}
            seen |= distinct.keys()
            level = []
            for variable in distinct.values():
                if len(found) + len(level) < MOST_VARIABLES:
                    every = isinstance(variable.get(), WITHOUT_NAMES)
                    entries = entries_of(variable)
                    level += [entry for entry in entries if every or entry.key in self.names]
            found += level
        return found

    def _add(self, function: FunctionType) -> None:
        if id(function) not in self._known and len(self.functions) < _MOST_FUNCTIONS:
            self._known.add(id(function))
            self.functions.append(function)
            texts = texts_in(function.__code__)
            self.names |= names_in(function.__code__) | texts
            if "getattr" in names_in(function.__code__):  # f"forward_{mode}" has but a part
                self._parts |= {text for text in texts if text[0] == "_" or text[-1] == "_"}
            for variable in read_by(function):
                for called in functions_in(variable.get()):
                    if is_users(called):
                        self._add(called)

    def _add_method(self, kind: type, name: str) -> None:
        for c in filter(is_open, kind.__mro__):
            for function in functions_in(vars(c).get(name)):
                self._add(function)

    def note(self, value: Any) -> None:
        """Add the code of a value: a function, or what is named in the class of an object."""
        for function in functions_in(value):
            if is_users(function):
                self._add(function)
        owner = value.__self__ if isinstance(value, MethodType) else value
        if isinstance(owner, Tensor | ModuleType | FunctionType):
            return
        kind = owner if isinstance(owner, type) else type(owner)
        for c in filter(is_open, [*inspect.getmro(kind), *inspect.getmro(type(kind))]):
            for name, item in vars(c).items():
                if self._is_named(name) or _is_implicit(name):
                    for function in functions_in(item):
                        self._add(function)

    def _is_named(self, name: str) -> bool:
        if name in self.names:
            return True
        return any(
            name.startswith(part) if part[-1] == "_" else name.endswith(part)
            for part in self._parts
        )


_EXPLICIT = frozenset(
    [
        "__init__",
        "__new__",
        "__repr__",
        "__str__",
        "__format__",
        "__setattr__",
        "__delattr__",
        "__del__",
        "__hash__",
        "__dir__",
        "__init_subclass__",
        "__class_getitem__",
        "__subclasshook__",
        "__set_name__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
        "__copy__",
        "__deepcopy__",
        "__sizeof__",
    ]
)
"""Methods of which reading an attribute, an item or a value runs none."""


def _is_implicit(name: str) -> bool:
    """Whether it is a method that runs though no code names it: `__getitem__`, say."""
    return name.startswith("__") and name.endswith("__") and name not in _EXPLICIT


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions that `value` is, or runs when it is called or read as an attribute."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, MethodType | staticmethod | classmethod):
        yield from functions_in(value.__func__)
    elif isinstance(value, functools.partial | functools.cached_property):
        yield from functions_in(value.func)
    elif isinstance(value, property):
        yield from functions_in(value.fget)  # of an attribute
    elif is_user_written(type(value)):
        yield from functions_in(getattr(type(value), "__get__", None))  # a descriptor


WITHOUT_NAMES = (list, tuple, deque, dict, MappingProxyType, FunctionType, MethodType,
                  functools.partial, ContextVar, Tensor, set, frozenset, weakref.ref)  # fmt: skip
"""Kinds whose entries are read by other code than that which names them, or by no name."""
