"""How to make a value that holds tensors of a trace again, of the tensors of a call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from torchremat import _torch
from torchremat.api_util import WrapHashably
from torchremat.core.slots import read_attributes, write_attributes
from torchremat.graph.symbolic_sizes import SYMBOLIC, Size, Sizes
from torchremat.remat.escapes.reach import Path, Roots, WeakKey
from torchremat.tracing.modules.attribute_changes import is_of_trace

# Chosen by hand: a list of records of tuples of tensors has four levels.
_MOST_LEVELS = 6


# These are not looked into: the attributes of torch's modules are compared by themselves.
_OPAQUE = (str, bytes, int, float, nn.Module, type)


def holds_traced(value: Any, levels: int = _MOST_LEVELS) -> bool:
    """Whether `value` is a tensor of a trace, or a container or object that holds one.

    Each object is looked at once, the nearest first: a package that the function imported holds
    all others in some way. So a Python module is looked into only if it is `value` itself.
    """
    seen: set[int] = set()
    layer = [value]
    for _ in range(levels + 1):
        inner: list[Any] = []
        for item in layer:
            if isinstance(item, Tensor):
                if is_of_trace(item):
                    return True
            elif isinstance(item, SYMBOLIC):
                return True
            elif id(item) not in seen and not isinstance(item, _OPAQUE):
                seen.add(id(item))
                inner += [] if isinstance(item, ModuleType) and item is not value else _parts(item)
        layer = inner
    return False


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return list(read_attributes(value).values())


@dataclass
class CallValues:
    """The tensors that a region returned and those that it was given, to fill templates with."""

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    sizes: Sizes | None
    roots: Roots
    made: dict[int, Any] = field(default_factory=dict)
    """Values by template: what stands in two places is one object."""

    def make(self, template: "Template") -> Any:
        if id(template) not in self.made:
            self.made[id(template)] = template.fill(self)
        return self.made[id(template)]


@dataclass(frozen=True, eq=False)
class Template:
    """A value without its tensors: `fill` makes it again."""

    fill: Callable[[CallValues], Any]
    signature: Any
    """Equal for templates that make equal values of equal tensors."""
    is_plain: bool = False
    """Whether there is no tensor in it."""


class TemplateMaker:
    """Makes templates; `tensors` are the tensors of the trace that they need as outputs."""

    def __init__(self, input_of: Callable[[Tensor], int | None], known: dict[int, Path]) -> None:
        self.tensors: list[Tensor] = []
        self._input_of = input_of
        self._known = known
        self._numbers: dict[int, int] = {}
        self.made: dict[int, tuple[Any, Template]] = {}
        """Values with their templates, by `id`."""

    def make(self, value: Any) -> Template:
        found = self.made.get(id(value))
        if found is None:
            self.made[id(value)] = found = (value, self._make(value))  # which keeps the id
        return found[1]

    def _make(self, value: Any) -> Template:
        if isinstance(value, Tensor) and is_of_trace(value):
            return self._of_tensor(value)
        if isinstance(value, SYMBOLIC):
            size = Size(value)
            return Template(
                lambda v: size.symbolic if v.sizes is None else size.at(v.sizes), ("size",)
            )
        if id(value) in self._known and isinstance(value, Tensor):  # another in a later call
            at = self._known[id(value)]
            return Template(lambda v: at.find(v.roots), ("there", at.key))
        if not holds_traced(value) and not self._holds_known(value):
            kept = WeakKey(value)
            return Template(lambda v: kept.value, ("same", WrapHashably(value)), is_plain=True)
        if id(value) in self._known and not isinstance(value, tuple):
            place = self._known[id(value)]
            return Template(lambda v: place.find(v.roots), ("there", place.key))
        if isinstance(value, set | frozenset):
            kind, items = type(value), [self.make(item) for item in value]
            return Template(
                lambda v: kind(v.make(t) for t in items), (kind, *(t.signature for t in items))
            )
        leaves, spec = _torch.tree_flatten(value)
        if leaves and leaves[0] is not value:
            parts = [self.make(leaf) for leaf in leaves]
            return Template(
                lambda v: _torch.tree_unflatten([v.make(t) for t in parts], spec),
                (spec, *(t.signature for t in parts)),
            )
        return self._of_object(value)

    def _holds_known(self, value: Any) -> bool:
        """Whether `value` is a new container of tensors that were there before the trace."""
        if id(value) in self._known or not isinstance(value, list | tuple | dict):
            return False
        leaves = _torch.tree_flatten(value)[0]
        return any(isinstance(leaf, Tensor) and id(leaf) in self._known for leaf in leaves)

    def _of_tensor(self, value: Tensor) -> Template:
        number = self._input_of(value)
        if number is not None:
            return Template(lambda v: v.inputs[number], ("input", number))
        position = self._numbers.setdefault(id(value), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(value)
        return Template(lambda v: v.outputs[position], ("output", position))

    def _of_object(self, value: Any) -> Template:
        kind = type(value)
        attributes = {name: self.make(item) for name, item in read_attributes(value).items()}

        # an object of C has one of its own, and one of Python may take arguments
        new: Any = kind.__new__ if type(kind.__new__) is BuiltinFunctionType else object.__new__

        def fill(values: CallValues) -> Any:
            made = new(kind)
            write_attributes(made, {name: values.make(t) for name, t in attributes.items()})
            return made

        return Template(fill, (kind, *((n, t.signature) for n, t in attributes.items())))
