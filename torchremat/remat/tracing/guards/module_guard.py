"""The guard on modules: mode, plain attributes, children, hooks and `forward`."""

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from types import FunctionType, MethodType
from typing import Any

from torch import Generator, Tensor, nn

from torchremat.api_util import same_value
from torchremat.remat.escapes.escapes import Escapes
from torchremat.remat.tracing.guards.entries import MISSING, OF_EVERY_MODULE, SIMPLE, is_plain
from torchremat.remat.tracing.guards.references import is_same, reference_to
from torchremat.tracing.modules.attribute_reads import AttributeReads

_GUARDED = (
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


_Check = tuple[Callable[[Any], Any], dict[str, Any], tuple[Any, ...], int, "LikeForward"]


class ModuleGuard:
    """Whether modules are as they were: class, mode, plain attributes, children, hooks, `forward`.

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
        modules = list(modules)
        self._modules = [weakref.ref(module) for _, module in modules]
        self._classes = [type(module) for _, module in modules]
        for prefix, module in modules:
            attributes = vars(module)
            plain = [n for n, v in attributes.items() if is_plain(v)]
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
                needed = [n for n in guarded if n in read or n in OF_EVERY_MODULE]
                # of a wrapped module it is the checkpoint itself, which another may take over
                forward = patched if "forward" in read else _AnyForward()
                check = self._check(attributes, needed, forward)
            self._prefixes.append(prefix)
            self._checks.append(check)
            self._every_check.append(every)

    def _check(self, attributes: dict[str, Any], guarded: list[str], patched: Any) -> _Check:
        of_every_module = [*_GUARDED, *(n for n in guarded if n in OF_EVERY_MODULE)]
        names = [*of_every_module, *(n for n in guarded if n not in OF_EVERY_MODULE)]
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

    def _current_classes(self) -> list[type]:
        return [type(module()) for module in self._modules]

    def holds(self) -> bool:
        if self._current_classes() != self._classes:
            return False
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
        pairs = zip(self._prefixes, self._current_classes(), self._classes, strict=True)
        for prefix, now, before in pairs:
            if now is not before:
                return f"the class of the module {prefix}"
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


class LikeForward:
    """The `forward` that a module itself has, not its class: that very one, or another made alike.

    What records outputs (of attention, say) gives modules a new `forward` before each step: of the
    same code, with another closure. Such a one is alike unless the trace reads tensors in there.
    """

    def __init__(self, value: Any, captured: Sequence[Tensor]) -> None:
        self._reference = reference_to(value)
        self.is_patched = value is not None
        self._likeness = None
        if isinstance(value, FunctionType):
            self._likeness = _likeness_of(value, frozenset(map(id, captured)))

    def is_like(self, value: Any) -> bool:
        if is_same(self._reference, value):
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
    return (type(value), value) if type(value) in SIMPLE else _Same(value)


@dataclass(frozen=True)
class _TensorOf:
    shape: Any
    dtype: Any


class _Same:
    """Equal for the same object, which is referred to weakly where it can be."""

    def __init__(self, value: Any) -> None:
        self._reference = reference_to(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        mine = self._reference and self._reference()
        return is_same(other._reference, mine)

    def __hash__(self) -> int:
        return 0
