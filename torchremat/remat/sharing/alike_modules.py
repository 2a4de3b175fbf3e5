"""Compare two modules in all that a trace of the first depends on.

The trace of the first holds for the second if each read gives the second what stands for it:

    layers.0                        layers.1
    fc      Linear                  fc      Linear                  modules, of one class
    weight  f32[4,4]                weight  f32[4,4]                tensors, laid out alike
    eps     1e-5                    eps     1e-5                    values that were read: equal
    config  the object C            config  the object C            one object, see `shared_objects`
    index   0                       index   1                       never read: no matter

Two tensors that are one in the first are one in the second, and the other way round.
"""

import functools
from collections.abc import Iterator, Sequence
from types import MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torchremat import _torch
from torchremat.api_util import same_value
from torchremat.errors import TraceError
from torchremat.remat.escapes.reach import ATOMS
from torchremat.remat.tracing.guards.entries import OF_EVERY_MODULE, is_user_written
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.attribute_reads import AttributeReads

_HELD = ("_parameters", "_buffers", "_modules")
_HOOKS = sorted(name for name in OF_EVERY_MODULE if name.endswith("_hooks"))
_VALUES = (*ATOMS, bool, torch.layout, torch.memory_format)

# Chosen by hand: a list of records in a configuration of a layer has five.
_MOST_LEVELS = 8


class AlikeModules:
    """Pairs what is in the module `first` with what stands for it in `second`.

    `reads` are the attributes that were read of the first, and of the modules in it.
    """

    def __init__(self, first: nn.Module, second: nn.Module, reads: AttributeReads) -> None:
        self._reads = reads
        self._twins: dict[int, tuple[Any, Any]] = {}
        self._seconds: dict[int, Any] = {}
        self._modules: list[tuple[nn.Module, nn.Module]] = []
        self._storages: dict[int, int] = {}
        self.in_both: dict[int, Any] = {}
        """Objects that both have, and that were not compared."""
        self.are_alike = self._pair_modules(first, second) and all(
            self._have_like_attributes(a, b) for a, b in self._modules
        )

    @property
    def modules(self) -> list[tuple[nn.Module, nn.Module]]:
        return self._modules

    @property
    def own(self) -> Iterator[Any]:
        """The modules and tensors of one of the two that the other lacks."""
        for a, b in self._twins.values():
            if a is not b:
                yield a
                yield b

    def twin_of(self, value: Any) -> Any:
        """The value for `value` in the second module: itself, if the first does not own it."""
        return self._twins.get(id(value), (value, value))[1]

    def _pair(self, a: Any, b: Any) -> bool | None:
        """Whether `a` and `b` are known as a pair, `None` if they are one from now on."""
        if id(a) in self._twins or id(b) in self._seconds:
            return self._twins.get(id(a), (a, None))[1] is b
        self._twins[id(a)] = (a, b)
        self._seconds[id(b)] = a
        return None

    def _pair_modules(self, a: nn.Module, b: nn.Module) -> bool:
        known = self._pair(a, b)
        if known is not None:
            return known
        self._modules.append((a, b))
        if type(a) is not type(b) or a.training is not b.training or _has_slots(type(a)):
            return False
        if any(vars(m).get(name) for m in (a, b) for name in _HOOKS):
            return False
        for kind in _HELD:
            ours, theirs = vars(a)[kind], vars(b)[kind]
            if list(ours) != list(theirs):
                return False
            pairs = zip(ours.values(), theirs.values(), strict=True)
            if not all(self._pair_held(x, y) for x, y in pairs):
                return False
        return True

    def _pair_held(self, a: Any, b: Any) -> bool:
        if a is None or b is None:
            return a is b
        return self._pair_modules(a, b) if isinstance(a, nn.Module) else self._pair_tensors(a, b)

    def _pair_tensors(self, a: Tensor, b: Tensor) -> bool:
        known = self._pair(a, b)
        if known is not None:
            return known
        spec = _spec_of(a)
        if type(a) is not type(b) or spec is None or spec != _spec_of(b):
            return False
        if _torch.is_traceable_wrapper_subclass(a) or _torch.is_fake(a):
            return False
        ours, theirs = _torch.storage_id(a), _torch.storage_id(b)
        if self._storages.setdefault(ours, theirs) != theirs:
            return False
        if list(self._storages.values()).count(theirs) > 1:
            return False
        return self._are_alike(vars(a), vars(b), 0)

    def _have_like_attributes(self, a: nn.Module, b: nn.Module) -> bool:
        names = self._reads.names_of(a)
        if names is None:
            return False
        ours, theirs = vars(a), vars(b)
        for name in names - OF_EVERY_MODULE:
            if (name in ours) is not (name in theirs):
                return False
            if name in ours and not self._are_alike(ours[name], theirs[name], 0):
                return False
        return True

    def _are_alike(self, a: Any, b: Any, level: int) -> bool:
        if isinstance(a, _VALUES):
            return same_value(a, b)
        if type(a) is not type(b) or level > _MOST_LEVELS:
            return False
        if id(a) in self._twins:
            return self._twins[id(a)][1] is b
        if a is b:
            self.in_both[id(a)] = a
            return True
        if isinstance(a, Tensor):
            return self._pair_tensors(a, b)
        parts = _parts_of(a), _parts_of(b)
        return (
            self._are_like_objects(a, b, level) if None in parts else self._are_equal(*parts, level)
        )

    def _are_equal(self, ours: Any, theirs: Any, level: int) -> bool:
        """Whether two sequences have like items."""
        pairs = zip(ours, theirs, strict=False)
        return len(ours) == len(theirs) and all(self._are_alike(a, b, level + 1) for a, b in pairs)

    def _are_like_objects(self, a: Any, b: Any, level: int) -> bool:
        """Whether two objects of a user's class are alike that have their state in attributes."""
        kind = type(a)
        if isinstance(a, nn.Module | type) or not is_user_written(kind) or _has_slots(kind):
            return False
        if not _has_state_in_attributes(a) or self._pair(a, b) is False:
            return False
        return self._are_alike(vars(a), vars(b), level + 1)


def _spec_of(tensor: Tensor) -> InputSpec | None:
    try:
        return InputSpec.of(tensor)
    except TraceError:  # it is of a kind that no trace can read, and no input
        return None


def _parts_of(value: Any) -> Sequence[Any] | None:
    """The parts of a container, method or partial function, in order; `None` of other objects."""
    if type(value) in (list, tuple):
        return value  # type: ignore[no-any-return]
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    if type(value) in (set, frozenset):
        return sorted(value) if all(isinstance(item, str) for item in value) else None
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if type(value) is functools.partial:
        return [value.func, value.args, value.keywords]
    return None


def _has_state_in_attributes(value: Any) -> bool:
    """Whether all that `value` holds is in its `__dict__`, as pickling would see it."""
    kind = type(value)
    if any(getattr(kind, name) is not getattr(object, name) for name in _PICKLING):
        return False
    try:
        reduced: tuple[Any, ...] = object.__reduce_ex__(value, 2)  # type: ignore[assignment]
    except TypeError:  # it holds something else, in C
        return False
    state, *items = reduced[2:]
    return (state is None or type(state) is dict) and not any(i is not None for i in items)


_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")


def _has_slots(kind: type) -> bool:
    return any(
        isinstance(value, MemberDescriptorType) for c in kind.__mro__ for value in vars(c).values()
    )
