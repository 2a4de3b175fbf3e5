"""The parts of one module that correspond to those of another which is built alike.

Two layers of a model have the same code, shapes and settings, and other weights. What a trace of
one refers to (dicts of parameters, submodules, containers) has a counterpart in the other, found by
its place:

    layers.0.attn.q.weight   ->   layers.7.attn.q.weight
"""

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torchremat.api_util import same_value
from torchremat.remat.tracing.variables import _OF_EVERY_MODULE, _SIMPLE, Binding

_VALUES = (torch.device, torch.Size, set, frozenset)
_DICTS = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(
    name
    for name in vars(nn.Module())
    if name.endswith("_hooks") and not name.startswith(("_state", "_load"))
)


class Counterparts:
    """For the objects of one module, those of another in their places.

    `pairs` are the modules of both in the order of `named_modules`, the outermost first.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        self._others: dict[int, Any] = {}
        self._originals: dict[int, int] = {}
        """The identity of each tensor, by that of its counterpart: ties are the same in both."""
        self._kept: list[Any] = []  # an identity is that of one object while this lives
        for one, other in pairs:
            self._note(one, other)
        self.are_alike = all(
            _have_no_hooks(one) and _have_no_hooks(other) and self._are_alike(one, other, i == 0)
            for i, (one, other) in enumerate(pairs)
        )

    @classmethod
    def of(cls, inside: Sequence[tuple[str, Any]], other: nn.Module) -> "Counterparts | None":
        """The counterparts of `inside`, modules by name as weak references, in `other`, if any."""
        named = list(other.named_modules())
        ones = [reference() for _, reference in inside]
        if [name for name, _ in named] != [name for name, _ in inside] or None in ones:
            return None
        pairs = list(zip(ones, (module for _, module in named), strict=True))
        if any(type(one) is not type(module) for one, module in pairs):
            return None
        found = cls(pairs)
        return found if found.are_alike else None

    def of_object(self, value: Any) -> Any:
        """The counterpart of `value`; itself if it belongs to neither module."""
        return self._others.get(id(value), value)

    def of_binding(self, variable: Binding) -> Binding:
        return Binding(variable.label, self.of_object(variable.holder), variable.key)

    def of_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.of_object(value) for name, value in values.items()}

    def _note(self, one: Any, other: Any) -> None:
        self._others[id(one)] = other
        self._kept.append(one)

    def _are_alike(self, one: nn.Module, other: nn.Module, is_root: bool) -> bool:
        mine, theirs = vars(one), vars(other)
        self._note(mine, theirs)
        if mine.keys() != theirs.keys():
            return False
        if is_root and "forward" in mine:  # any will do, and other attributes are methods of it
            self._note(mine["forward"], theirs["forward"])
        names = [n for n in mine if n not in _OF_EVERY_MODULE and not (is_root and n == "forward")]
        return all(self._pair(mine[n], theirs[n]) for n in (*_DICTS, *names))

    def _pair(self, one: Any, other: Any) -> bool:
        """Note that `other` is in the place of `one`; whether it can be the counterpart.

        Numbers and strings may differ: guards compare those that the trace has read.
        """
        if id(one) in self._others:
            return self._others[id(one)] is other
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return self._pair_tensors(one, other)
        if one is other or (type(one) in _SIMPLE and type(other) in _SIMPLE):
            return True
        return type(one) is type(other) and self._pair_objects(one, other)

    def _pair_objects(self, one: Any, other: Any) -> bool:
        if isinstance(one, _VALUES):
            return bool(one == other)
        if isinstance(one, dict):
            self._note(one, other)
            return list(one) == list(other) and all(self._pair(one[k], other[k]) for k in one)
        if type(one) in (list, tuple):
            self._note(one, other)
            return len(one) == len(other) and all(map(self._pair, one, other))
        if type(one) is MethodType:
            self._note(one, other)
            return one.__func__ is other.__func__ and self._pair(one.__self__, other.__self__)
        return False

    def _pair_tensors(self, one: Tensor, other: Tensor) -> bool:
        if self._originals.setdefault(id(other), id(one)) != id(one):
            return False
        self._note(one, other)
        return _layout_of(one) == _layout_of(other) and same_value(vars(one), vars(other))


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """The facts about a tensor that code can ask without reading its values."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return (
        type(tensor),
        tensor.shape,
        tensor.stride() if is_strided else None,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.layout,
        tensor.is_quantized,
    )


def _have_no_hooks(module: nn.Module) -> bool:
    attributes = vars(module)
    return not any(attributes.get(name) for name in _HOOKS)
