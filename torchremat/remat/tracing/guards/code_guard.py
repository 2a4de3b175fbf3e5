"""The guard that functions are those that ran in a trace: none of them was replaced since.

    torch.nn.functional.gelu = mine      read by the code of a model, as `F.gelu`
    LlamaMLP.forward = fused             a method of a class, which modules of the trace have
    helpers.scale = lambda x: x          a function in another file
    layer.scaled = lambda x: x           a method of one object
    scale.__code__ = edited              as notebooks do that load files again

Which names are guarded follows from the code that ran, see `reached_code`.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from operator import itemgetter
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from torchremat.core.source import is_user_file
from torchremat.remat.escapes.names_in_code import globals_read_by, globals_set_by, names_in
from torchremat.remat.tracing.guards.entries import (
    Binding,
    is_plain,
    is_user_written,
)
from torchremat.tracing.modules.reached_code import GlobalsOf

_CALLED = frozenset(("forward", "__call__"))
"""Methods that PyTorch calls, so that no code of a model names them."""

# So many names in one namespace cost as much one by one as together: 0.3 us, measured.
_FEW = 3


class CodeGuard:
    """Whether the functions, classes and methods that some code names are those that they were.

    It keeps no function alive. The identity of one that is gone may be that of another, so then
    the guard fails for ever.
    """

    def __init__(self, globals_of: GlobalsOf, values: Iterable[Any]) -> None:
        """`values` are functions, modules and other objects that the function reads."""
        self.globals_of = globals_of
        search = _CodeSearch(globals_of, list(values))
        self._places = [place for place in search.places.values() if place.close()]
        few = [place for place in self._places if len(place.names) <= _FEW]
        self._single = [(place.namespace, name) for place in few for name in place.names]
        self._identities = [id(namespace[name]) for namespace, name in self._single]
        many = [place for place in self._places if len(place.names) > _FEW]
        self._many = [(itemgetter(*p.names), p.namespace, p.identities) for p in many]
        self._lacking: list[tuple[Any, Set[str]]] = [
            (p.keys, p.lacking) for p in self._places if p.lacking
        ]
        self._lacking += search.find_methods()
        self._freed: list[Any] = []
        named = [place.namespace[name] for place in self._places for name in place.names]
        distinct = {id(value): value for value in [*named, *search.functions]}.values()
        functions = {id(f): f for f in map(_function_in, distinct) if f is not None}
        forget = self._freed.append
        self._references = [_refer(value, forget) for value in distinct]
        self._functions = [weakref.ref(f, forget) for f in functions.values()]
        self._codes = [f.__code__ for f in functions.values()]

    def holds(self) -> bool:
        if self._freed:
            return False
        try:
            if [id(namespace[name]) for namespace, name in self._single] != self._identities:
                return False
            for get, namespace, identities in self._many:
                if [*map(id, get(namespace))] != identities:
                    return False
        except KeyError:
            return False
        for keys, names in self._lacking:
            if not keys.isdisjoint(names):
                return False
        return [_code_of(function) for function in self._functions] == self._codes

    def what_changed(self) -> str | None:
        for place in self._places:
            if name := place.find_changed():
                return f"the function {place.label}.{name}"
        for keys, names in self._lacking:
            if found := keys & names:
                return f"the method {min(found)}"
        for function, code in zip(self._functions, self._codes, strict=True):
            if _code_of(function) != code:
                return f"the code of {code.co_qualname}"
        return "a function that is gone" if self._freed else None


def plain_variables_of(globals_of: GlobalsOf) -> Iterator[Binding]:
    """The numbers and strings among the globals that the user's code reads, and does not set."""
    stored = {name for code in globals_of for name in globals_set_by(code)}
    for code, namespace in globals_of.items():
        if is_user_file(code.co_filename):
            for name in sorted(globals_read_by(code) - stored):
                if name in namespace and is_plain(namespace[name]):
                    yield Binding(f"closed-over {name}", namespace, name)


def _code_of(function: Callable[[], Any]) -> CodeType | None:
    found = function()
    return None if found is None else found.__code__


def _refer(value: Any, on_freed: Callable[[Any], None]) -> Any:
    try:
        return weakref.ref(value, on_freed)
    except TypeError:
        return value


def _is_code(value: Any) -> bool:
    if isinstance(value, (MemberDescriptorType, nn.Module)):
        return False
    kinds = (staticmethod, classmethod, property, ModuleType)
    return callable(value) or isinstance(value, kinds)


def _function_in(value: Any) -> FunctionType | None:
    """The function of the user's that `value` is, or wraps as a method."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    is_user = isinstance(value, FunctionType) and is_user_file(value.__code__.co_filename)
    return value if is_user else None


class _Namespace:
    """A namespace: names in it that stand for code, and names that it lacks so far."""

    def __init__(self, label: str, namespace: Mapping[str, Any]) -> None:
        self.label = label
        self.namespace = namespace
        self.named: set[str] = set()
        self.lacking: set[str] = set()

    def close(self) -> bool:
        """Record what it has now; returns whether that is anything."""
        self.keys: Any = self.namespace.keys()
        self.names = sorted(self.named)
        self.identities = [id(self.namespace[name]) for name in self.names]
        return bool(self.names or self.lacking)

    def find_changed(self) -> str | None:
        for name, identity in zip(self.names, self.identities, strict=True):
            if name not in self.namespace or id(self.namespace[name]) != identity:
                return name
        return None


# Chosen by hand, as for variables: a helper, what it calls, and what that calls.
_DEPTH = 3


class _CodeSearch:
    """Follows the names in code through namespaces, to the functions that they stand for."""

    def __init__(self, globals_of: GlobalsOf, values: list[Any]) -> None:
        self.places: dict[int, _Namespace] = {}
        self.functions = [f for f in map(_function_in, values) if f is not None]
        self._codes = dict(globals_of)
        self._classes: dict[type, None] = {}
        self._enter_all(globals_of)
        self._names = frozenset(name for code in self._codes for name in names_in(code))
        self._own = [v for v in values if is_user_written(type(v)) or isinstance(v, nn.Module)]
        for kind in dict.fromkeys([*self._classes, *map(type, self._own)]):
            self._enter_methods(kind)
        self._enter_methods(torch.Tensor)

    def find_methods(self) -> Iterator[tuple[Any, frozenset[str]]]:
        """The attributes of objects, and the methods that one of them would hide."""
        for value in {id(v): v for v in self._own}.values():
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                classes = [c for c in type(value).__mro__ if _has_methods_of_user(c)]
                methods = {n for c in classes for n in _methods_in(c, self._names)}
                if lacking := methods - attributes.keys() - _CALLED:
                    yield attributes.keys(), frozenset(lacking)

    def _enter_all(self, level: Mapping[CodeType, dict[str, Any]]) -> None:
        for _ in range(_DEPTH):
            found: list[Any] = []
            for code, namespace in level.items():
                names = names_in(code)
                own = globals_read_by(code) - globals_set_by(code)
                found += self._enter(namespace, own, names, [])
                imported = [sys.modules[name] for name in names & sys.modules.keys()]
                for module in imported:  # in the function
                    if isinstance(module, ModuleType):
                        found += self._enter(vars(module), names, names, [])
                self._enter_class_of(code, namespace)
            functions = [f for f in map(_function_in, found) if f is not None]
            level = {f.__code__: f.__globals__ for f in functions if f.__code__ not in self._codes}
            self._codes.update(level)

    def _enter(
        self, namespace: Mapping[str, Any], own: Set[str], names: Set[str], around: list[Any]
    ) -> Iterator[Any]:
        """Guard `own` here, and `names` in the modules among them; returns their values."""
        for name in own & namespace.keys():
            value = namespace[name]
            if not _is_code(value):
                continue
            label = namespace.get("__name__", "")
            self.places.setdefault(id(namespace), _Namespace(label, namespace)).named.add(name)
            yield value
            if isinstance(value, ModuleType):
                # not what a module imports: `helpers.torch`
                if not around or value.__name__.startswith(f"{label}."):
                    yield from self._enter(vars(value), names, names, [*around, namespace])
            elif isinstance(value, type) and is_user_written(value):
                self._classes[value] = None

    def _enter_class_of(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Find the class that has `code`, by the name of that."""
        *outer, _ = code.co_qualname.split(".")
        place: Mapping[str, Any] = namespace
        for part in outer:
            owner = place.get(part)
            if not isinstance(owner, type):
                return
            place = vars(owner)
            self._classes[owner] = None

    def _enter_methods(self, kind: type) -> None:
        names = self._names | _CALLED
        if issubclass(kind, torch.autograd.Function):
            names |= vars(kind).keys()
        inherited: set[str] = set()
        for c in reversed(kind.__mro__):
            methods = _methods_in(c, names)
            if c is torch.Tensor or _has_methods_of_user(c):
                # `vars` of a class is another object each time
                place = self.places.setdefault(id(c), _Namespace(c.__qualname__, vars(c)))
                place.named |= methods
                place.lacking |= inherited - vars(c).keys()
                inherited |= methods
            elif kind is torch.Tensor:
                inherited |= methods  # in C


def _methods_in(kind: type, names: Set[str]) -> set[str]:
    return {name for name in names & vars(kind).keys() if _is_code(vars(kind)[name])}


def _has_methods_of_user(kind: type) -> bool:
    if issubclass(kind, nn.Module):
        return kind is not nn.Module
    return is_user_written(kind) and kind.__module__ not in sys.stdlib_module_names
