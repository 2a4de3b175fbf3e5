"""Whether code that two layers share could tell them apart, by an object that both can reach.

    SCALES = {first: 2.0, second: 3.0}      return x * SCALES[self]
    state.current = layer                   return x * state.current.scale

Each gives other results in another layer, though the layers themselves are alike. So what the code
names, and what both layers refer to, must not lead to what only one of them owns.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator, Set
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from torchremat import _torch
from torchremat.core.source import is_user_file
from torchremat.remat.escapes.names_in_code import globals_read_by, names_in
from torchremat.remat.escapes.reach import _NOT_WALKED, ATOMS
from torchremat.tracing.modules.reached_code import GlobalsOf

# Each layer that shares a trace walks them. Chosen by hand: some 20 ms, a fraction of a trace.
_MOST_OBJECTS = 20_000

_LEAVES = (*ATOMS, bool, range, slice, BuiltinFunctionType)

_OPEN = frozenset(
    (
        "builtins",
        "collections",
        "functools",
        "types",
        "weakref",
        "_weakref",
        "_thread",
        "_contextvars",
    )
)
"""Packages of Python's own whose objects hold what a user puts there."""


def lead_to(own: Iterable[Any], globals_of: GlobalsOf, objects: Iterable[Any]) -> bool:
    """Whether the code of `globals_of`, or `objects`, leads to one of `own`.

    If the walk is too long, it is taken to.
    """
    walk = _Walk(own, globals_of)
    return walk.finds_one(objects)


class _Walk:
    def __init__(self, own: Iterable[Any], globals_of: GlobalsOf) -> None:
        own = list(own)
        self._own = set(map(id, own))
        self._storages = {_torch.storage_id(v) for v in own if isinstance(v, Tensor)}
        self._seen: dict[int, Any] = {}  # which keeps the identities
        self._queue: list[Any] = []
        self._names = frozenset(name for code in globals_of for name in names_in(code))
        for code, namespace in globals_of.items():
            self._add_named(namespace, globals_read_by(code))

    def finds_one(self, objects: Iterable[Any]) -> bool:
        for value in objects:
            self._add(value)
        while self._queue:
            value = self._queue.pop()
            if id(value) in self._own or _tells_little(value):
                return True
            if isinstance(value, Tensor) and _torch.storage_id(value) in self._storages:
                return True
            if len(self._seen) > _MOST_OBJECTS:
                return True
            for inner in _contents_of(value, self._names):
                self._add(inner)
        return False

    def _add_named(self, namespace: Any, names: Iterable[str]) -> None:
        for name in names:
            if name in namespace:
                self._add(namespace[name])

    def _add(self, value: Any) -> None:
        if not isinstance(value, _LEAVES) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._queue.append(value)


def _tells_little(value: Any) -> bool:
    """Whether what `value` refers to cannot be seen, or it gives another value at each call."""
    return type(value) in weakref.ProxyTypes or hasattr(type(value), "__next__")


def _contents_of(value: Any, names: Set[str]) -> Iterator[Any]:
    """Objects that `value` refers to. Of a namespace, those called by one of `names`."""
    if isinstance(value, FunctionType):
        yield from _contents_of_function(value)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, ModuleType):
        if _is_of_user(value.__name__) and is_user_file(getattr(value, "__file__", None) or ""):
            yield from (vars(value)[name] for name in names & vars(value).keys())
    elif isinstance(value, type):
        if _is_of_user(value.__module__):
            yield from value.__mro__[1:]
            yield from (v for n, v in vars(value).items() if n in names or not callable(v))
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, ContextVar):
        yield value.get(None)
    elif isinstance(value, nn.Module | Tensor):
        yield from vars(value).values()
    elif _is_of_user(type(value).__module__) or type(value).__module__ in _OPEN:
        yield from _attributes_of(value)
        yield from (v for v in gc.get_referents(value) if v is not type(value))


def _attributes_of(value: Any) -> Iterator[Any]:
    attributes = getattr(value, "__dict__", None)  # of this thread, of what is local to threads
    if type(attributes) is dict:
        yield attributes


def _contents_of_function(function: FunctionType) -> Iterator[Any]:
    yield from (function.__closure__ or (), function.__defaults__, function.__kwdefaults__)
    yield vars(function)
    if is_user_file(function.__code__.co_filename):
        namespace = function.__globals__
        for name in globals_read_by(function.__code__) & namespace.keys():
            yield namespace[name]


def _is_of_user(module: str) -> bool:
    """Whether a package may refer to layers: neither PyTorch nor Python does by itself."""
    package = module.partition(".")[0]
    return package not in _NOT_WALKED
