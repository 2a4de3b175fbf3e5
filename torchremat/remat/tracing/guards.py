"""Guards of a trace: on modules, closed-over tensors and the values of variables.

Each is checked at every call. A module that is switched to `eval`, a layer that is replaced or a
global that is set is traced anew. Nothing here keeps the traced function alive.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Generator, Tensor, nn

from torchremat.api_util import same_value
from torchremat.core.slots import identity_of
from torchremat.errors import RetraceError
from torchremat.remat.escapes.escapes import Escapes
from torchremat.remat.escapes.read_watch import original_of
from torchremat.remat.tracing.variables import (
    _OF_EVERY_MODULE,
    _SIMPLE,
    MISSING,
    Binding,
    _entries_of,
    _is_plain,
    roots_of,
    variables_of_modules,
)
from torchremat.tracing.modules.attribute_reads import AttributeReads
from torchremat.tracing.modules.module_paths import ModulePaths, below

_GUARDED = (
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


_Check = tuple[Callable[[Any], Any], dict[str, Any], tuple[Any, ...], int, "LikeForward"]


class ModuleGuard:
    """Whether modules are as they were: mode, plain attributes, children, hooks and `forward`.

    Of the attributes those count that the function read, as `reads` knows: all of them if it does
    not. One `itemgetter` and one comparison a module, both in C: 0.5 us.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        escapes: Escapes,
        captured: Sequence[Tensor],
        reads: AttributeReads | None = None,
    ) -> None:
        self._reads = reads
        self._every_check: list[_Check] = []
        self._checks: list[_Check] = []
        self._prefixes: list[str] = []
        self._names: dict[int, list[str]] = {}
        for prefix, module in modules:
            attributes = vars(module)
            plain = [n for n, v in attributes.items() if _is_plain(v)]
            edited = [
                n
                for n in plain
                if (id(attributes), n) in escapes.slots or id(attributes[n]) in escapes.targets
            ]
            guarded = [n for n in plain if n not in edited]
            patched = LikeForward(attributes.get("forward"), captured)
            read = None if reads is None else reads.names_of(module)
            check = every = self._check(attributes, guarded, patched)
            if read is not None:
                needed = [n for n in guarded if n in read or n in _OF_EVERY_MODULE]
                # of a wrapped module it is the checkpoint itself, which another may take over
                forward = patched if "forward" in read else _AnyForward()
                check = self._check(attributes, needed, forward)
            self._prefixes.append(prefix)
            self._checks.append(check)
            self._every_check.append(every)

    def _check(self, attributes: dict[str, Any], guarded: list[str], patched: Any) -> _Check:
        of_every_module = [*_GUARDED, *(n for n in guarded if n in _OF_EVERY_MODULE)]
        names = [*of_every_module, *(n for n in guarded if n not in _OF_EVERY_MODULE)]
        get = itemgetter(*names)
        recorded = [
            dict(v) if name in _GUARDED else v if type(v) is Generator else copy.deepcopy(v)
            for name, v in zip(names, get(attributes), strict=True)
        ]
        self._names[id(get)] = names
        return get, attributes, tuple(recorded), len(of_every_module), patched

    def _current_checks(self) -> list[_Check]:
        is_late = self._reads is not None and self._reads.is_late
        return self._every_check if is_late else self._checks

    def holds(self) -> bool:
        try:
            for get, attributes, recorded, start, patched in self._current_checks():
                forward = attributes.get("forward")
                found = get(attributes)
                if found != recorded or not _are_of_one_kind(found[start:], recorded[start:]):
                    return False
                is_plain = forward is None and not patched.is_patched  # most are
                if not is_plain and not patched.is_like(forward):
                    return False
        except KeyError:  # an attribute was deleted
            return False
        return True

    def what_changed(self) -> str | None:
        checks = self._current_checks()
        for prefix, (get, attributes, recorded, _, patched) in zip(
            self._prefixes, checks, strict=True
        ):
            of = f" of the module {prefix}" if prefix else ""
            if not patched.is_like(attributes.get("forward")):
                return f"the forward{of}"
            for name, value in zip(self._names[id(get)], recorded, strict=True):
                now = attributes.get(name, MISSING)
                if now != value if name in _GUARDED else not same_value(now, value):
                    return f"{_IN_WORDS.get(name, f'the attribute {name}')}{of}"
        return None


def _are_of_one_kind(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether values that are equal are not `1` and `True`, nor `0.0` and `-0.0`."""
    return all(map(is_, now, before)) or same_value(now, before)


_IN_WORDS = {
    "_modules": "a module",
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
}


Reference = Callable[[], Any] | None
"""A weak reference, or none: its `id` would not do, which another has once it is gone."""


def _reference_to(value: Any) -> Reference:
    if value is None:
        return None
    try:
        return weakref.ref(value)
    except TypeError:
        return _Strong(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Strong:
    """A reference of a class of its own, which a search for referrers knows."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def _is_same(reference: Reference, value: Any) -> bool:
    if reference is None or value is None:
        return reference is value
    return reference() is value


class LikeForward:
    """The `forward` that a module itself has, not its class: that very one, or another made alike.

    What records outputs (of attention, say) gives modules a new `forward` before each step: of the
    same code, with another closure. Such a one is alike unless the trace reads tensors in there.
    """

    def __init__(self, value: Any, captured: Sequence[Tensor]) -> None:
        self._reference = _reference_to(value)
        self.is_patched = value is not None
        self._likeness = None
        if isinstance(value, FunctionType):
            self._likeness = _likeness_of(value, frozenset(map(id, captured)))

    def is_like(self, value: Any) -> bool:
        if _is_same(self._reference, value):
            return True
        if self._likeness is None or not isinstance(value, FunctionType):
            return False
        return bool(_likeness_of(value, frozenset()) == self._likeness)


class _AnyForward(LikeForward):
    """Of a module whose `forward` nothing reads: any will do."""

    def __init__(self) -> None:
        self.is_patched = True

    def is_like(self, value: Any) -> bool:
        return True


class _Unlike:
    """Equal to nothing else."""


def _likeness_of(value: Any, captured: frozenset[int]) -> Any:
    """Equal for functions of the same code whose closures have the same values and objects."""
    if isinstance(value, FunctionType):
        try:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:
            return _Unlike()
        held = (*cells, value.__defaults__, value.__kwdefaults__)
        return (value.__code__, *(_likeness_of(item, captured) for item in held))
    if isinstance(value, MethodType):
        return (value.__func__, _Same(value.__self__))
    if isinstance(value, Tensor):
        return _Unlike() if id(value) in captured else _TensorOf(value.shape, value.dtype)
    if isinstance(value, dict):
        items = (_likeness_of(item, captured) for item in value.values())
        return (type(value), *zip(value, items, strict=True))
    if isinstance(value, list | tuple):
        return (type(value), *(_likeness_of(item, captured) for item in value))
    return (type(value), value) if type(value) in _SIMPLE else _Same(value)


@dataclass(frozen=True)
class _TensorOf:
    shape: Any
    dtype: Any


class _Same:
    """Equal for the same object, which is referred to weakly where it can be."""

    def __init__(self, value: Any) -> None:
        self._reference = _reference_to(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        mine = self._reference and self._reference()
        return _is_same(other._reference, mine)

    def __hash__(self) -> int:
        return 0


class VariableGuard:
    """Whether variables have the values that they had: numbers and strings, modules, functions."""

    def __init__(self, variables: Iterable[Binding]) -> None:
        self._values: list[tuple[Binding, Any]] = []
        self._objects: list[tuple[Binding, Reference]] = []
        self._entries: list[tuple[Binding, Any]] = []
        self.add(variables)

    def add(self, variables: Iterable[Binding]) -> None:
        """Guard these too, if they are not guarded yet."""
        known = [pair[0] for pair in (*self._values, *self._objects)]
        places = {(identity_of(v.holder), v.key) for v in known}
        for variable in variables:
            if (identity_of(variable.holder), variable.key) in places:
                continue
            value = variable.get()
            if _is_plain(value) and type(value) is not Generator:
                self._values.append((variable, copy.deepcopy(value)))
            elif not isinstance(value, (Tensor, ModuleType)):
                self._objects.append((variable, _reference_to(value)))
                if type(value) in (list, dict):
                    self._entries.append(
                        (variable, list(value) if type(value) is dict else len(value))
                    )

    def _forget_edited(self, escapes: Escapes) -> None:
        """Forget where the function leaves tensors: the edits have guards of their own."""

        def stays(pair: tuple[Binding, Any]) -> bool:
            variable, value = pair[0], pair[0].get()
            slot = (identity_of(variable.holder), "" if variable.key is None else variable.key)
            is_forward = variable.key == "forward"  # which `ModuleGuard` checks
            return not (
                is_forward
                or slot in escapes.slots
                or id(value) in escapes.targets
                or identity_of(variable.holder) in escapes.targets | escapes.old
            )

        self._values = [pair for pair in self._values if stays(pair)]
        self._objects = [pair for pair in self._objects if stays(pair)]
        self._entries = [pair for pair in self._entries if stays(pair)]

    def forget_changed(self, escapes: Escapes) -> bool:
        """Forget what the function itself changed, a counter say, while it was traced; if any."""
        before = self._count()
        self._values = [pair for pair in self._values if _is_unchanged(*pair)]
        self._objects = [pair for pair in self._objects if _is_same(pair[1], pair[0].get())]
        self._entries = [pair for pair in self._entries if _has_entries(*pair)]
        has_changed = self._count() < before
        if escapes:
            self._forget_edited(escapes)
        return has_changed

    def _count(self) -> int:
        return len(self._values) + len(self._objects) + len(self._entries)

    def find_objects(self) -> list[Any]:
        """The values that are guarded by what they are."""
        return [variable.get() for variable, _ in self._objects]

    def holds(self) -> bool:
        return self.what_changed() is None

    def what_changed(self) -> str | None:
        for variable, value in self._values:
            if not _is_unchanged(variable, value):
                return f"the {variable.label}"
        for variable, same in self._objects:
            if not _is_same(same, original_of(variable.get())):
                return f"the {variable.label}"
        for variable, entries in self._entries:
            if not _has_entries(variable, entries):
                return f"the {variable.label}"
        return None


def _has_entries(variable: Binding, entries: Any) -> bool:
    """Whether a list is as long as it was, a dict has the keys that it had."""
    value = variable.get()
    if type(value) is dict:
        return bool(list(value) == entries)
    return type(value) is list and len(value) == entries


def _is_unchanged(variable: Binding, value: Any) -> bool:
    return same_value(variable.get(), value)


@dataclass(frozen=True)
class _Followed(Binding):
    """A variable inside a value that the function replaces at each call."""

    def get(self) -> Any:
        return self.holder()


def _find_in_old(escapes: Escapes, tensor: Tensor) -> list[Binding]:
    follow = escapes.places.get(id(tensor))
    return [] if follow is None or follow() is not tensor else [_Followed("tensor", follow)]


class CapturedTensors:
    """The tensors that a function closes over, found anew where they can have been replaced."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        variables: Sequence[Binding],
        modules: Sequence[tuple[str, nn.Module]],
        escapes: Escapes,
    ) -> None:
        places: dict[int, list[Binding]] = {}
        for variable in variables:
            if identity_of(variable.holder) not in escapes.old:
                places.setdefault(id(variable.get()), []).append(variable)
        for prefix, module in modules:
            for kind in ("_parameters", "_buffers"):
                held = vars(module)[kind]
                for name, tensor in held.items():
                    if tensor is not None:
                        label = below(prefix, name)
                        variable = Binding(f"{kind[1:-1]} {label}", held, name)
                        places.setdefault(id(tensor), []).append(variable)
            attributes = vars(module)
            for name in [n for n in attributes if n not in _OF_EVERY_MODULE]:
                label = below(prefix, name)
                own = Binding(f"attribute {label}", attributes, name)
                for variable in (own, *_entries_of(own)):
                    is_old = identity_of(variable.holder) in escapes.old
                    if isinstance(variable.get(), Tensor) and not is_old:
                        places.setdefault(id(variable.get()), []).append(variable)
        found = [places.get(id(t)) or _find_in_old(escapes, t) for t in tensors]
        self._places = [variables[-1] if variables else None for variables in found]
        # no reference to a tensor that can be found anew: it is garbage once another has its place
        self._tensors: list[Any] = [None if v else t for t, v in zip(tensors, found, strict=True)]
        self._shared = [variables for variables in found if len(variables) > 1]
        self.labels = [
            f"the closed-over tensor {i}" if place is None else f"the {place.label}"
            for i, place in enumerate(self._places)
        ]

        held_in_dicts = [p for p in self._places if p is not None and type(p.holder) is dict]
        self._entries = [(p.holder, p.key) for p in held_in_dicts]
        self._all_in_dicts = len(self._entries) == len(self._tensors)

    @property
    def are_all_found(self) -> bool:
        """Whether each has a place, in which another tensor would be found."""
        return None not in self._places

    def current(self) -> list[Tensor] | None:
        """The tensors that the variables refer to now.

        `None` if one is gone (a weight was pruned, say), or two that were one tensor are not.
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

    def current_tensors(self) -> list[Any]:
        found = self.current()
        if found is None:
            raise RetraceError(
                "a tensor that the function closes over is gone, or no longer the one that it has "
                "under another name, since it ran. A derivative of higher order traces the "
                "function again: keep what it reads until the derivatives are taken."
            )
        return found


class StartingPoint:
    """The modules and variables that a function starts from, before it is traced."""

    def __init__(self, fun: Callable[..., Any], variables: Sequence[Binding], prefix: str) -> None:
        self.variables = variables
        self.roots = roots_of(fun, variables)
        self.inside = list(dict.fromkeys(m for _, root in self.roots for m in root.modules()))
        self.unchanged = VariableGuard([*variables, *variables_of_modules(self.inside)])
        self._prefix = prefix

    def name_modules(self, paths: ModulePaths) -> list[tuple[str, nn.Module]]:
        """The modules there, and those that ran in a trace, by qualified name."""
        modules = dict.fromkeys([*self.inside, *paths.seen])
        return [(below(self._prefix, paths.name_of(m)), m) for m in modules]
