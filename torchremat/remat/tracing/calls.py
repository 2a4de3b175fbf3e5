"""Calls of a traced function: tensors apart from all that is part of the key."""

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.api_util import StaticArguments, WrapHashably, flatten_axes
from torchremat.core.open_objects import close_objects, flatten_open, flatten_result
from torchremat.core.slots import read_attributes
from torchremat.errors import TraceError
from torchremat.graph.symbolic_sizes import SYMBOLIC, Size
from torchremat.remat.escapes.reach import Path, Roots
from torchremat.remat.escapes.read_watch import has_stand_ins
from torchremat.remat.escapes.templates import CallValues, Template
from torchremat.remat.tape.recorder import is_taping
from torchremat.tracing.dtensors import Sharding, is_sharded, local_part

_SCALARS = (int, float, bool, complex, str, type(None))
_CONSTANTS = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, enum.Enum, slice
)  # fmt: skip
_TENSOR = "tensor"


@dataclass(frozen=True)
class Call:
    """The tensors of a call in order, and the rest of it as a key."""

    tensors: list[Tensor]
    key: tuple[Any, ...]
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = field(default=((), {}), compare=False)
    """The arguments as they were given, by position and by name."""

    @property
    def static_values(self) -> list[Any]:
        """The arguments that are no tensors, numbers or texts."""
        return [part.value for part in self.key if isinstance(part, WrapHashably)]


def is_in_plain_step() -> bool:
    """Whether calls are those of a training step, with nothing around that traces or transforms."""
    return not (
        has_stand_ins()
        or _torch.functorch_is_active()
        or _torch.in_dual_level()
        or _torch.innermost_proxy_mode() is not None
        or _torch.is_faking()
    )


def flatten_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], statics: StaticArguments, *, lenient: bool
) -> Call:
    """Take a call apart. `lenient` accepts any object as a static value, as modules do."""
    tensors: list[Tensor] = []
    key: list[Any] = []
    opened: set[int] = set()
    positions = statics.positions(len(args), kwargs) if statics else ()
    for i, value in enumerate(args):
        if i in positions:
            key.append(WrapHashably(value))
        elif isinstance(value, Tensor):
            tensors.append(value)
            key.append(_TENSOR)
        elif type(value) in _SCALARS:
            key.append(_key_of_scalar(value))
        else:
            leaves, spec = flatten_open(value, opened)
            key.append(spec)
            _add_leaves(leaves, tensors, key, lambda i=i: f"positional argument {i}", lenient)  # type: ignore[misc]
    for name in sorted(kwargs):
        key.append(name)
        if name in statics.all_names:
            key.append(WrapHashably(kwargs[name]))
        else:
            leaves, spec = flatten_open(kwargs[name], opened)
            key.append(spec)
            _add_leaves(leaves, tensors, key, lambda n=name: f"argument {n!r}", lenient)  # type: ignore[misc]
    return Call(tensors, tuple(key), (args, kwargs))


def read_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], statics: StaticArguments, *, lenient: bool
) -> Call | TraceError | None:
    """The call, or why it cannot be read; `None` inside a tape, whose policy decides on it."""
    if is_taping():
        return None
    try:
        return flatten_call(args, kwargs, statics, lenient=lenient)
    except TraceError as error:
        return error


def _key_of_scalar(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    if kind is float:
        return (float, value.hex())  # apart are 0.0 and -0.0; not a number is like itself
    if kind is complex:
        return (complex, value.real.hex(), value.imag.hex())
    return (kind, value)


class AnyNumber:
    """An entry of a trace's key for a number that the function does not read: any of that type.

    >>> ("tensor", AnyNumber(int)) == ("tensor", (int, 38)), AnyNumber(int) == (float, "0x1.0p+0")
    (True, False)
    """

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return is_number(other) and _type_of_number(other) is self.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return f"AnyNumber({self.kind.__name__})"


def is_number(entry: Any) -> bool:
    """Whether an entry of a key is that of an `int` or a `float`."""
    return type(entry) is AnyNumber or (type(entry) is tuple and entry[0] in (int, float))


def _type_of_number(entry: Any) -> type:
    kind: type = entry.kind if type(entry) is AnyNumber else entry[0]
    return kind


def differing_numbers(a: tuple[Any, ...], b: tuple[Any, ...]) -> frozenset[int] | None:
    """The positions of numbers that differ in two keys, or may; `None` if anything else does.

    >>> x = "tensor"
    >>> differing_numbers((x, (int, 3), (bool, True)), (x, (int, 4), (bool, True)))
    frozenset({1})
    >>> differing_numbers((x, (int, 3)), (x, (float, "0x1.8p+1"))) is None
    True
    """
    if len(a) != len(b):
        return None
    found = set()
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if AnyNumber in (type(x), type(y)) or x != y:
            if not (is_number(x) and is_number(y) and _type_of_number(x) is _type_of_number(y)):
                return None
            found.add(i)
    return frozenset(found)


def ignore_numbers(key: tuple[Any, ...], positions: Collection[int]) -> tuple[Any, ...]:
    """A key that equals those with other numbers at `positions`."""
    return tuple(AnyNumber(_type_of_number(k)) if i in positions else k for i, k in enumerate(key))


def _add_leaves(
    leaves: Sequence[Any],
    tensors: list[Tensor],
    key: list[Any],
    where: Callable[[], str],
    lenient: bool,
) -> None:
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            key.append(_TENSOR)
        elif type(leaf) in _SCALARS:
            key.append(_key_of_scalar(leaf))
        elif isinstance(leaf, SYMBOLIC):  # of the trace around, which no other call is part of
            key.append((type(leaf), str(leaf)))
        elif lenient or isinstance(leaf, _CONSTANTS):
            _refuse_hidden_tensors(leaf, where)
            key.append(WrapHashably(leaf))
        else:
            raise TraceError(
                f"{where()} holds {leaf!r} of type {type(leaf).__name__}, which is not a tensor, "
                "number, string or None, nor a tree of them. Name the argument in `static_argnums` "
                "or `static_argnames` if the function may be traced anew for each value. Or "
                "register the type as a tree with torch.utils._pytree.register_pytree_node."
            )


def _refuse_hidden_tensors(leaf: Any, where: Callable[[], str]) -> None:
    held = [name for name, value in read_attributes(leaf).items() if _holds(value)]
    if held:
        raise TraceError(
            f"{where()}, of type {type(leaf).__name__}, holds tensors ({', '.join(held)}), which a "
            "checkpoint would not see change. Pass the tensors themselves, or register the type as "
            "a tree; a key/value cache belongs to inference: switch it off for training "
            "(use_cache=False)."
        )


def _holds(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds, value[:8]))
    return isinstance(value, Tensor)


def wrap_statics(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], statics: StaticArguments
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in the order of `flatten_call`, with static ones as leaves of the tree."""
    positions = statics.positions(len(args), kwargs) if statics else ()
    names = statics.all_names
    return (
        tuple(WrapHashably(a) if i in positions else a for i, a in enumerate(args)),
        {n: WrapHashably(kwargs[n]) if n in names else kwargs[n] for n in sorted(kwargs)},
    )


def prevent_cse_of(prevent_cse: Any, args: Any, kwargs: Any) -> tuple[bool, ...]:
    """`prevent_cse` for each tensor of a call, in order: a bool, or a tree prefix of `args`.

    Tensors passed by keyword have `True`, unless a single `False` is for all.
    """
    opened: set[int] = set()
    leaves, spec = flatten_open(args, opened)
    named = flatten_open([kwargs[name] for name in sorted(kwargs)], opened)[0]
    if isinstance(prevent_cse, bool):
        flags = [prevent_cse] * (len(leaves) + len(named))
    else:
        flags = flatten_axes("prevent_cse", spec, tuple(prevent_cse), tupled_args=True)
        flags += [True] * len(named)
    pairs = zip([*leaves, *named], flags, strict=True)
    return tuple(flag for leaf, flag in pairs if isinstance(leaf, Tensor))


class Result:
    """The result of a function: its tensors, its literals and their structure.

    A tensor that stands in several places is one output. A list, dict or object that was there
    before, or that the function leaves elsewhere, too, is that of each call: `find_elsewhere` gives
    the way there, or how it is made.
    """

    def __init__(
        self,
        value: Any,
        describe: Callable[[], str],
        find_elsewhere: Callable[[Any], Path | Template | None] | None = None,
    ) -> None:
        leaves, self.spec = flatten_result(value, find_elsewhere)
        self.tensors: list[Tensor] = []
        self._leaves: list[Any] = []
        self._shardings: dict[int, Sharding] = {}
        numbers: dict[int, int] = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if _torch.is_traceable_wrapper_subclass(leaf) and not is_sharded(leaf):
                    raise TraceError(
                        f"{describe()} made and returned a {type(leaf).__name__}, which a graph of "
                        "plain tensors cannot. Return its parts (x.values()), and rebuild it "
                        "outside the checkpoint."
                    )
                number = numbers.setdefault(id(leaf), len(self.tensors))
                if number == len(self.tensors):
                    self._add_tensor(leaf)
                self._leaves.append(number)
            elif isinstance(leaf, Path | Template):
                self._leaves.append(leaf)
            elif isinstance(leaf, (*_SCALARS, *_CONSTANTS, type)):
                self._leaves.append(WrapHashably(leaf))
            elif isinstance(leaf, SYMBOLIC):
                self._leaves.append(Size(leaf))
            else:
                raise TraceError(
                    f"{describe()} returned a value of type {type(leaf).__name__} ({leaf!r}), "
                    "which is not a tensor, number, string or None, nor a tree of them. Return "
                    "tensors, and make other objects of them outside the checkpoint."
                )
        self.is_tensor = isinstance(value, Tensor)
        in_order = self._leaves == list(range(len(self.tensors)))
        self.is_tuple = (
            type(value) is tuple and in_order and all(isinstance(item, Tensor) for item in value)
        )

    def _add_tensor(self, tensor: Tensor) -> None:
        sharding = Sharding.of(tensor)
        if sharding is not None:
            self._shardings[len(self.tensors)] = sharding
        self.tensors.append(local_part(tensor))

    @property
    def is_of_one_module(self) -> bool:
        """Whether something in it is found from a module, and not from the call."""
        places = [leaf for leaf in self._leaves if isinstance(leaf, Path)]
        return any(not isinstance(place.root, str) for place in places)

    def find_known(self, roots: Roots) -> Sequence[Any]:
        """The objects in the result of a call that are there before it; before it writes."""
        return [leaf.find(roots) for leaf in self._leaves if isinstance(leaf, Path)]

    def rebuild(self, tensors: tuple[Tensor, ...], values: CallValues, known: Sequence[Any]) -> Any:
        """The result of a call that made `tensors`; `known` as `find_known` gave it."""
        if self._shardings:
            shardings = (self._shardings.get(i) for i in range(len(tensors)))
            tensors = tuple(
                tensor if sharding is None else sharding.wrap(tensor)
                for tensor, sharding in zip(tensors, shardings, strict=True)
            )
        if self.is_tensor:
            return tensors[0]
        if self.is_tuple:
            return tensors[: len(self._leaves)]
        left = iter(known)
        leaves: list[Any] = []
        for leaf in self._leaves:
            if isinstance(leaf, WrapHashably):
                leaves.append(leaf.value)
            elif isinstance(leaf, Size):
                leaves.append(leaf.symbolic if values.sizes is None else leaf.at(values.sizes))
            elif isinstance(leaf, Path):
                leaves.append(next(left))
            elif isinstance(leaf, Template):
                leaves.append(values.make(leaf))
            else:
                leaves.append(tensors[leaf])
        return close_objects(_torch.tree_unflatten(leaves, self.spec))
