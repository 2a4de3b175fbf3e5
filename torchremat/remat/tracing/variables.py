"""Variables that a function reads: in its closure, its globals, and the objects these lead to."""

import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Generator, Tensor, nn

from torchremat.core.slots import Slots, identity_of, slots_of
from torchremat.core.source import is_user_file

_SIMPLE = (int, float, bool, str, type(None))


# Each call checks the entries of a container. Chosen by hand: a configuration has fewer, and what
# has more is data.
_MANY = 64


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return (
            type(value) is dict and 0 < len(value) <= _MANY and all(map(_is_plain, value.values()))
        )
    if type(value) in (tuple, list, set, frozenset):
        return len(value) <= _MANY and all(map(_is_plain, value))
    return type(value) in _SIMPLE or type(value) is Generator


@dataclass(frozen=True, slots=True)
class Binding:
    """A variable that a function reads: an entry of a dict or list, or a cell of its closure."""

    label: str
    holder: Any
    key: Any = None

    def get(self) -> Any:
        try:
            return self.holder.cell_contents if self.key is None else self.holder[self.key]
        except (ValueError, LookupError):
            return MISSING


class _Missing:
    """No value."""


MISSING = _Missing()


# Chosen by hand: an object, the configuration in it, and a list in that (self.config.layers[0]).
_DEPTH = 3


def variables_of(fun: Callable[..., Any]) -> list[Binding]:
    """The variables that `fun` reads from its closure, its module and the object it belongs to.

    Looked into are functions that it calls, lists, tuples, dicts and plain objects among them, a
    few levels deep.
    """
    seen: set[int] = {id(fun)}
    owner = getattr(fun, "__self__", None)
    level = list(_read_by(fun))
    if owner is not None and not isinstance(owner, nn.Module):
        level += _entries_of(Binding("", [owner], 0))
    return _follow(level, seen)


def _follow(level: list[Binding], seen: set[int]) -> list[Binding]:
    found: list[Binding] = []
    for _ in range(_DEPTH):
        found += level
        inner = [v for v in level if id(v.get()) not in seen]
        seen.update(id(v.get()) for v in inner)
        level = [entry for v in inner for entry in _entries_of(v)]
    return found + level


def variables_of_modules(modules: Iterable[nn.Module]) -> list[Binding]:
    """The variables that the methods of `modules` read: globals, class attributes, configurations.

    Of classes and configurations those entries count that some method names. A module's own plain
    attributes are left to `ModuleGuard`.
    """
    modules = list(modules)
    classes = {c: None for m in modules for c in type(m).__mro__ if is_user_written(c)}
    methods = [f for c in classes for f in vars(c).values() if isinstance(f, FunctionType)]
    names = {name for f in methods for name in f.__code__.co_names}
    level = [v for f in methods for v in _read_by(f)]
    level += [Binding(f"{c.__name__}.{n}", vars(c), n) for c in classes for n in names & {*vars(c)}]
    found = _follow(level, {id(m) for m in modules})
    held = [Binding(n, vars(m), n) for m in modules for n in {*vars(m)} - _OF_EVERY_MODULE]
    found += [v for v in held if not _is_of_forward(v) and not _is_plain(v.get())]
    for _ in range(_DEPTH):
        distinct = {id(v.get()): v for v in held}.values()
        held = [
            entry
            for v in distinct
            for entry in _entries_of(v)
            if entry.key in names or type(v.get()) in _WITHOUT_NAMES
        ]
        found += held
    return list({(identity_of(v.holder), v.key): v for v in found}.values())


_WITHOUT_NAMES = (list, tuple, dict, FunctionType)
"""Kinds whose entries are read by other code than that which names them, or by no name."""


def _is_of_forward(variable: Binding) -> bool:
    """Whether it is the own `forward` of a module, or a method of that, such as `extra_repr`."""
    forward = variable.holder.get("forward", MISSING)
    return variable.get() is forward or getattr(variable.get(), "__self__", None) is forward


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """`code`, and that of the functions, lambdas and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Set[str]:
    """The names of globals, attributes and imports in `code`, in the order in which they come."""
    return {name: None for c in _codes_in(code) for name in c.co_names}.keys()


@functools.lru_cache(maxsize=4096)
def names_stored_by(code: CodeType) -> Set[str]:
    """The globals that `code` sets."""
    instructions = (i for c in _codes_in(code) for i in dis.get_instructions(c))
    return frozenset(i.argval for i in instructions if i.opname == "STORE_GLOBAL")


def _read_by(fun: Any) -> Iterator[Binding]:
    """The variables that `fun` names, and those of each function that it wraps (`__wrapped__`)."""
    around: list[Any] = []
    inner = inspect.unwrap(getattr(fun, "__func__", fun), stop=around.append)  # `None`: go on
    # a decorator of PyTorch keeps the settings that it was made with
    functions = [f for f in around if isinstance(f, FunctionType) and _is_users(f)]
    for function in (*functions, getattr(inner, "__func__", inner)):
        code = getattr(function, "__code__", None)
        if not isinstance(code, CodeType):
            continue
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield Binding(f"closed-over {name}", cell)
        for name in names_in(code):
            if name in function.__globals__:
                yield Binding(f"closed-over {name}", function.__globals__, name)


def _is_users(function: FunctionType) -> bool:
    return is_user_file(function.__code__.co_filename)


def _entries_of(variable: Binding) -> list[Binding]:
    """The variables inside a function, container, class or plain object in `variable`."""
    value, label = variable.get(), variable.label
    prefix = f"{label}." if label else ""
    if isinstance(value, type):
        return [Binding(f"{prefix}{k}", vars(c), k) for c, k in _class_attributes(value)]
    if isinstance(value, FunctionType):
        return list(_read_by(value)) if _is_users(value) else []
    if type(value) in (list, tuple):
        return [Binding(f"{label}[{i}]", value, i) for i in range(min(len(value), _MANY))]
    if type(value) is dict:
        return [Binding(f"{label}[{k!r}]", value, k) for k in list(value)[:_MANY]]
    if isinstance(value, nn.Module | Tensor | ModuleType) or not is_user_written(type(value)):
        return []
    names = slots_of(type(value))
    in_slots = [Binding(f"{prefix}{k}", Slots(value), k) for k in names]
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
    classes = [c for c in kind.__mro__ if is_user_written(c)]
    found: dict[str, list[tuple[type, str]]] = {}
    for i, c in enumerate(classes):
        for name, value in vars(c).items():
            if not name.startswith("__") and (_is_plain(value) or isinstance(value, Tensor)):
                found.setdefault(name, [(place, name) for place in classes[: i + 1]])
    return [place for places in list(found.values())[:_MANY] for place in places]


def is_user_written(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in {"torch", "builtins", "torchremat"}


def modules_in(variables: Iterable[Binding]) -> Iterator[tuple[str, nn.Module]]:
    for variable in variables:
        value = variable.get()
        if isinstance(value, nn.Module):
            yield variable.label.removeprefix("closed-over "), value


def roots_of(fun: Any, variables: Iterable[Binding]) -> list[tuple[str, nn.Module]]:
    """The modules that `fun` starts from, by name: itself or its object, then its variables."""
    owner = getattr(fun, "__self__", fun)
    own = [("", owner)] if isinstance(owner, nn.Module) else []
    return own + list(modules_in(variables))
