"""What a trace took for granted: modules, closed-over tensors and the values of variables.

Each is checked at every call, so that a module switched to `eval`, a layer that was replaced or a
global that was set anew is traced anew. Nothing here holds the traced function itself.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Generator, Tensor, nn

from torchremat.api_util import same_value
from torchremat.errors import RetraceError
from torchremat.graph.sources import is_user_file

_SIMPLE = (int, float, bool, str, type(None))
_MANY = 64
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_GUARDED = (
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class ModuleGuard:
    """Whether modules are as they were: mode, plain attributes, children, hooks and `forward`.

    One `itemgetter` and one comparison a module, both in C: 0.5 us.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._checks: list[
            tuple[Callable[[Any], Any], dict[str, Any], tuple[Any, ...], Reference]
        ] = []
        self._names: list[tuple[str, list[str]]] = []
        for prefix, module in modules:
            attributes = vars(module)
            names = [*_GUARDED, *(n for n, v in attributes.items() if _is_plain(v))]
            get = itemgetter(*names)
            recorded = [
                dict(v) if name in _GUARDED else v if type(v) is Generator else copy.deepcopy(v)
                for name, v in zip(names, get(attributes), strict=True)
            ]
            patched = _reference_to(attributes.get("forward"))
            self._checks.append((get, attributes, tuple(recorded), patched))
            self._names.append((prefix, names))

    def holds(self) -> bool:
        """Whether nothing changed."""
        try:
            for get, attributes, recorded, patched in self._checks:
                forward = attributes.get("forward")
                if get(attributes) != recorded or (
                    forward is not patched and not _is_same(patched, forward)  # most have none
                ):
                    return False
        except KeyError:  # an attribute was deleted
            return False
        return True

    def what_changed(self) -> str | None:
        """The first thing that changed, in words."""
        for (prefix, names), (_, attributes, recorded, patched) in zip(
            self._names, self._checks, strict=True
        ):
            of = f" of the module {prefix}" if prefix else ""
            if not _is_same(patched, attributes.get("forward")):
                return f"the forward{of}"
            for name, value in zip(names, recorded, strict=True):
                if attributes.get(name, MISSING) != value:
                    return f"{_IN_WORDS.get(name, f'the attribute {name}')}{of}"
        return None


_IN_WORDS = {
    "_modules": "a module",
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
}


Reference = Callable[[], Any] | None
"""An object held weakly, or none: its `id` would not do, which another has once it is gone."""


def _reference_to(value: Any) -> Reference:
    if value is None:
        return None
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _is_same(reference: Reference, value: Any) -> bool:
    """Whether `value` is the object that is referred to."""
    if reference is None or value is None:
        return reference is value
    return reference() is value


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or the like, or a short container of such."""
    if isinstance(value, dict):
        return (
            type(value) is dict and 0 < len(value) <= _MANY and all(map(_is_plain, value.values()))
        )
    if type(value) in (tuple, list, set, frozenset):
        return len(value) <= _MANY and all(map(_is_plain, value))
    return type(value) in _SIMPLE or type(value) is Generator


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that a function reads: an entry of a dict or list, or a cell of its closure."""

    label: str
    holder: Any
    key: Any = None

    def get(self) -> Any:
        """The value now; `MISSING` if there is none any more."""
        try:
            return self.holder.cell_contents if self.key is None else self.holder[self.key]
        except (ValueError, LookupError):
            return MISSING


class _Missing:
    """No value."""


MISSING = _Missing()


class VariableGuard:
    """Whether variables have the values that they had: numbers and strings, modules, functions."""

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._values: list[tuple[Variable, Any]] = []
        self._objects: list[tuple[Variable, Reference]] = []
        self._entries: list[tuple[Variable, Any]] = []
        for variable in variables:
            value = variable.get()
            if _is_plain(value) and type(value) is not Generator:
                self._values.append((variable, copy.deepcopy(value)))
            elif not isinstance(value, (Tensor, ModuleType)):
                self._objects.append((variable, _reference_to(value)))
                if type(value) in (list, dict):
                    self._entries.append(
                        (variable, list(value) if type(value) is dict else len(value))
                    )

    def forget_changed(self) -> None:
        """Forget what the function itself changed, a counter say, while it was traced."""
        self._values = [pair for pair in self._values if _is_unchanged(*pair)]
        self._objects = [pair for pair in self._objects if _is_same(pair[1], pair[0].get())]
        self._entries = [pair for pair in self._entries if _has_entries(*pair)]

    def holds(self) -> bool:
        """Whether nothing changed."""
        return self.what_changed() is None

    def what_changed(self) -> str | None:
        """The first variable that changed, in words."""
        for variable, value in self._values:
            if not _is_unchanged(variable, value):
                return f"the {variable.label}"
        for variable, same in self._objects:
            if not _is_same(same, variable.get()):
                return f"the {variable.label}"
        for variable, entries in self._entries:
            if not _has_entries(variable, entries):
                return f"the {variable.label}"
        return None


def _has_entries(variable: Variable, entries: Any) -> bool:
    """Whether a list is as long as it was, a dict has the keys that it had."""
    value = variable.get()
    if type(value) is dict:
        return bool(list(value) == entries)
    return type(value) is list and len(value) == entries


def _is_unchanged(variable: Variable, value: Any) -> bool:
    return same_value(variable.get(), value)


class CapturedTensors:
    """The tensors that a function closes over, found anew where they can have been replaced."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        variables: Sequence[Variable],
        modules: Sequence[tuple[str, nn.Module]],
    ) -> None:
        places: dict[int, list[Variable]] = {}
        for variable in variables:
            places.setdefault(id(variable.get()), []).append(variable)
        for prefix, module in modules:
            for kind in ("_parameters", "_buffers"):
                held = vars(module)[kind]
                for name, tensor in held.items():
                    if tensor is not None:
                        label = ".".join(p for p in (prefix, name) if p)
                        variable = Variable(f"{kind[1:-1]} {label}", held, name)
                        places.setdefault(id(tensor), []).append(variable)
            attributes = vars(module)
            for name in [n for n in attributes if n not in _OF_EVERY_MODULE]:
                label = ".".join(p for p in (prefix, name) if p)
                own = Variable(f"attribute {label}", attributes, name)
                for variable in (own, *_entries_of(own)):
                    if isinstance(variable.get(), Tensor):
                        places.setdefault(id(variable.get()), []).append(variable)
        found = [places.get(id(t), []) for t in tensors]
        self._places = [variables[-1] if variables else None for variables in found]
        # a tensor that can be found anew is not kept: it is garbage once another has its place
        self._tensors: list[Any] = [None if v else t for t, v in zip(tensors, found, strict=True)]
        self._shared = [variables for variables in found if len(variables) > 1]
        self.labels = [
            f"the closed-over tensor {i}" if place is None else f"the {place.label}"
            for i, place in enumerate(self._places)
        ]

        held_in_dicts = [p for p in self._places if p is not None and type(p.holder) is dict]
        self._entries = [(p.holder, p.key) for p in held_in_dicts]
        self._all_in_dicts = len(self._entries) == len(self._tensors)

    def current(self) -> list[Tensor] | None:
        """What the variables hold now.

        `None` if one is gone (a weight was pruned, say), or two that held one tensor do not.
        """
        for first, *others in self._shared:
            tensor = first.get()
            if any(variable.get() is not tensor for variable in others):
                return None
        if self._all_in_dicts:  # a module's parameters, say
            try:
                return [holder[key] for holder, key in self._entries]
            except KeyError:
                return None
        return [
            tensor if place is None else place.get()
            for tensor, place in zip(self._tensors, self._places, strict=True)
        ]

    def at_hand(self) -> list[Any]:
        """What the function reads if it is traced again now."""
        found = self.current()
        if found is None:
            raise RetraceError(
                "a tensor that the function closes over is gone, or no longer the one that it has "
                "under another name, since it ran. A derivative of higher order traces the "
                "function again: keep what it reads until the derivatives are taken."
            )
        return found


_DEPTH = 3


def variables_of(fun: Callable[..., Any]) -> list[Variable]:
    """The variables that `fun` reads from its closure, its module and the object it belongs to.

    Looked into are functions that it calls, lists, tuples, dicts and plain objects among them, a
    few levels deep.
    """
    seen: set[int] = {id(fun)}
    owner = getattr(fun, "__self__", None)
    level = list(_read_by(fun))
    if owner is not None and not isinstance(owner, nn.Module):
        level += _entries_of(Variable("", [owner], 0))
    return _followed(level, seen)


def _followed(level: list[Variable], seen: set[int]) -> list[Variable]:
    found: list[Variable] = []
    for _ in range(_DEPTH):
        found += level
        inner = [v for v in level if id(v.get()) not in seen]
        seen.update(id(v.get()) for v in inner)
        level = [entry for v in inner for entry in _entries_of(v)]
    return found + level


def variables_of_modules(modules: Iterable[nn.Module]) -> list[Variable]:
    """The variables that the methods of `modules` read: globals, class attributes, configurations.

    Of classes and configurations those entries count that some method names. A module's own plain
    attributes are left to `ModuleGuard`.
    """
    modules = list(modules)
    classes = {c: None for m in modules for c in type(m).__mro__ if _is_users(c)}
    methods = [f for c in classes for f in vars(c).values() if isinstance(f, FunctionType)]
    names = {name for f in methods for name in f.__code__.co_names}
    level = [v for f in methods for v in _read_by(f)]
    level += [
        Variable(f"{c.__name__}.{n}", vars(c), n) for c in classes for n in names & {*vars(c)}
    ]
    found = _followed(level, {id(m) for m in modules})
    held = [Variable(n, vars(m), n) for m in modules for n in {*vars(m)} - _OF_EVERY_MODULE]
    found += [v for v in held if not _is_plain(v.get())]
    for _ in range(_DEPTH):
        distinct = {id(v.get()): v for v in held}.values()
        held = [e for v in distinct for e in _entries_of(v) if e.key in names]
        found += held
    return list({(id(v.holder), v.key): v for v in found}.values())


def _read_by(fun: Any) -> Iterator[Variable]:
    fun = inspect.unwrap(getattr(fun, "__func__", fun))
    code = getattr(fun, "__code__", None)
    if not isinstance(code, CodeType):
        return
    for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=True):
        yield Variable(f"closed-over {name}", cell)
    for name in code.co_names:
        if name in fun.__globals__:
            yield Variable(f"closed-over {name}", fun.__globals__, name)


def _entries_of(variable: Variable) -> list[Variable]:
    """What a function, a container, a class or a plain object in `variable` leads to."""
    value, label = variable.get(), variable.label
    prefix = f"{label}." if label else ""
    if isinstance(value, type):
        return [Variable(f"{prefix}{k}", vars(c), k) for c, k in _class_attributes(value)]
    if isinstance(value, FunctionType):
        own = not is_user_file(value.__code__.co_filename)
        return [] if own else list(_read_by(value))
    if type(value) in (list, tuple):
        return [Variable(f"{label}[{i}]", value, i) for i in range(min(len(value), _MANY))]
    if type(value) is dict:
        return [Variable(f"{label}[{k!r}]", value, k) for k in list(value)[:_MANY]]
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict or isinstance(value, (nn.Module, Tensor, type, ModuleType)):
        return []
    if not _is_users(type(value)):
        return []
    inherited = [(c, k) for c, k in _class_attributes(type(value)) if k not in attributes]
    names = [*list(attributes)[:_MANY], *dict.fromkeys(k for _, k in inherited)]
    return [
        *(Variable(f"{prefix}{k}", attributes, k) for k in names),  # of the last, none as yet
        *(Variable(f"{prefix}{k}", vars(c), k) for c, k in inherited),
    ]


def _class_attributes(kind: type) -> list[tuple[type, str]]:
    """The numbers, strings, tensors and the like of a user's class, and where each can be set.

    That is in the class that has it, and in those between, which may come to have one.
    """
    classes = [c for c in kind.__mro__ if _is_users(c)]
    found: dict[str, list[tuple[type, str]]] = {}
    for i, c in enumerate(classes):
        for name, value in vars(c).items():
            if not name.startswith("__") and (_is_plain(value) or isinstance(value, Tensor)):
                found.setdefault(name, [(place, name) for place in classes[: i + 1]])
    return [place for places in list(found.values())[:_MANY] for place in places]


def _is_users(kind: type) -> bool:
    """Whether a class is neither PyTorch's nor Python's own."""
    return kind.__module__.partition(".")[0] not in {"torch", "builtins", "torchremat"}


def modules_in(variables: Iterable[Variable]) -> Iterator[tuple[str, nn.Module]]:
    """The modules among the variables, by the names that the function knows them by."""
    for variable in variables:
        value = variable.get()
        if isinstance(value, nn.Module):
            yield variable.label.removeprefix("closed-over "), value
