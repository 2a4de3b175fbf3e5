"""Variables that code reads: names in it, and entries of containers, objects and functions."""

import functools
import inspect
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from torch import Generator, Tensor, nn

from torchremat.core.slots import Slots, slots_of
from torchremat.core.source import is_user_file
from torchremat.remat.escapes.names_in_code import codes_in, globals_read_by, names_in

SIMPLE = (int, float, bool, str, type(None))


# Each call checks the entries of a container. Chosen by hand: what has more is data.
_MANY = 1024
# Chosen by hand: each call compares them. No model that was tried has a tenth of these.
MOST_VARIABLES = 2048


OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def is_plain(value: Any) -> bool:
    """Whether it is compared by value: a number, a text, a container of such, a generator."""
    if isinstance(value, dict):
        return (
            type(value) is dict and 0 < len(value) <= _MANY and all(map(is_plain, value.values()))
        )
    if type(value) in (tuple, list, set, frozenset):
        return len(value) <= _MANY and all(map(is_plain, value))
    return type(value) in SIMPLE or type(value) is Generator


@dataclass(frozen=True, slots=True)
class Binding:
    """A variable that a function reads: an entry of a dict or list, or a cell of its closure."""

    label: str
    holder: Any
    key: Any = None

    def get(self) -> Any:
        holder = self.holder
        if isinstance(holder, dict):
            return dict.get(holder, self.key, MISSING)  # past a `__getitem__` of its own
        try:
            return holder.cell_contents if self.key is None else holder[self.key]
        except (ValueError, LookupError):
            return MISSING


@dataclass(frozen=True, slots=True)
class OfContext(Binding):
    """The value of a context variable."""

    def get(self) -> Any:
        return self.holder.get(MISSING)


class _Missing:
    """No value."""


MISSING = _Missing()


def read_by(fun: Any) -> Iterator[Binding]:
    """The variables that `fun` names, and those of each function that it wraps (`__wrapped__`)."""
    around: list[Any] = []
    inner = inspect.unwrap(getattr(fun, "__func__", fun), stop=around.append)  # `None`: go on
    # a decorator of PyTorch keeps the settings that it was made with
    functions = [f for f in around if isinstance(f, FunctionType) and is_users(f)]
    for function in (*functions, getattr(inner, "__func__", inner)):
        code = getattr(function, "__code__", None)
        if not isinstance(code, CodeType):
            continue
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield Binding(f"closed-over {name}", cell)
        yield from _defaults_of(function)
        yield from _environment_of(code)
        for name in globals_read_by(code):
            if name in function.__globals__:
                yield Binding(f"closed-over {name}", function.__globals__, name)


def _defaults_of(function: Any) -> Iterator[Binding]:
    label = f"default of {function.__name__}"
    for holder in (function.__defaults__ or (), function.__kwdefaults__ or {}):
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        yield from (Binding(f"{label} ({i!r})", holder, i) for i in keys)


def _environment_of(code: CodeType) -> Iterator[Binding]:
    """The variables of the environment that `code` may read."""
    if not names_in(code) & {"environ", "getenv"}:
        return
    for constant in dict.fromkeys(c for inner in codes_in(code) for c in inner.co_consts):
        if isinstance(constant, str):
            yield Binding(f"os.environ[{constant!r}]", os.environ, constant)


def is_users(function: FunctionType) -> bool:
    """Whether a function is in a file of the user or of a library on PyTorch."""
    return is_user_file(function.__code__.co_filename)


def entries_of(variable: Binding) -> list[Binding]:
    """The variables inside a function, container, class or plain object in `variable`."""
    value, label = variable.get(), variable.label
    prefix = f"{label}." if label else ""
    if isinstance(value, type):
        return [Binding(f"{prefix}{k}", vars(c), k) for c, k in _class_attributes(value)]
    if isinstance(value, FunctionType):
        return list(read_by(value)) if is_users(value) else []
    if isinstance(value, MethodType | functools.partial):
        return _entries_of_wrapped(value, label)
    if isinstance(value, ContextVar):
        return [OfContext(label, value)]
    if isinstance(value, set | frozenset | weakref.ref):
        parts = [value()] if isinstance(value, weakref.ref) else list(value)
        return [e for i in range(len(parts)) for e in entries_of(Binding(label, parts, i))]
    found = items_of(value, label)
    if isinstance(value, nn.Module | ModuleType) or not is_open(type(value)):
        return found
    return found + _attributes_of(value, prefix)


def items_of(value: Any, label: str) -> list[Binding]:
    """The entries of a list, tuple, deque or dict, and the attributes of a tensor."""
    if isinstance(value, Tensor):  # what somebody has noted on it
        return [Binding(f"{label}.{k}", vars(value), k) for k in vars(value)]
    if isinstance(value, list | tuple | deque):
        return [Binding(f"{label}[{i}]", value, i) for i in range(min(length_of(value), _MANY))]
    if isinstance(value, dict | MappingProxyType):
        return [Binding(f"{label}[{k!r}]", value, k) for k in keys_of(value)[:_MANY]]
    return []


def length_of(value: Any) -> int:
    """The length of a list, tuple or deque, past a `__len__` of its own."""
    kind: Any = next(k for k in (list, tuple, deque) if isinstance(value, k))
    return int(kind.__len__(value))


def keys_of(value: Any) -> list[Any]:
    """The keys of a dict, past an `__iter__` of its own."""
    return list(dict.keys(value) if isinstance(value, dict) else value)


def _entries_of_wrapped(value: Any, label: str) -> list[Binding]:
    """The variables of a method and its object, or of a partial function and its arguments."""
    if isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    else:
        parts = [value.func, *value.args, value.keywords]
    return [entry for i, part in enumerate(parts) for entry in entries_of(Binding(label, parts, i))]


def _attributes_of(value: Any, prefix: str) -> list[Binding]:
    in_slots = [Binding(f"{prefix}{k}", Slots(value), k) for k in slots_of(type(value))]
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict:
        return in_slots
    inherited = [(c, k) for c, k in _class_attributes(type(value)) if k not in attributes]
    names = (*list(attributes)[:_MANY], *dict.fromkeys(k for _, k in inherited))
    return [
        *in_slots,
        *(Binding(f"{prefix}{k}", attributes, k) for k in names),  # of the last, none as yet
        *(Binding(f"{prefix}{k}", vars(c), k) for c, k in inherited),
    ]


def _class_attributes(kind: type) -> list[tuple[type, str]]:
    """The numbers, strings, tensors and the like of a user's class, and where each can be set.

    That is in the class that has it, and in those between, which may come to have one.
    """
    classes = [c for c in [*kind.__mro__, *inspect.getmro(type(kind))] if is_user_written(c)]
    found: dict[str, list[tuple[type, str]]] = {}
    for i, c in enumerate(classes):
        for name, value in vars(c).items():
            if not name.startswith("__") and (is_plain(value) or isinstance(value, Tensor)):
                found.setdefault(name, [(place, name) for place in classes[: i + 1]])
    return [place for places in list(found.values())[:_MANY] for place in places]


_OPEN_IN_STDLIB = frozenset(("collections", "types", "argparse", "_thread", "threading", "enum"))


def is_open(kind: type) -> bool:
    """Whether the attributes of such objects are looked at: not those of loggers, files, locks."""
    package = kind.__module__.partition(".")[0]
    is_stdlib = package in sys.stdlib_module_names and package != "__main__"
    return is_user_written(kind) and (not is_stdlib or package in _OPEN_IN_STDLIB)


def is_user_written(kind: type) -> bool:
    """Whether a class is neither Python's own nor of PyTorch."""
    return kind.__module__.partition(".")[0] not in {"torch", "builtins", "torchremat"}
