"""Typed equations: what each operator of a graph reads and gives, by name and aval."""

import inspect
import operator
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.core.avals import Aval
from torchremat.core.source import Source
from torchremat.graph.nodes import attribute, is_item
from torchremat.graph.notes import notes_of
from torchremat.graph.ops import equals_default, op_name

__all__ = ["Eqn", "Literal", "Var"]


def __dir__() -> list[str]:
    return sorted(__all__)


Number = bool | int | float | complex


@dataclass(frozen=True, slots=True)
class Var:
    """A value of a graph: its name, aval and node. One that nobody reads is called `_`."""

    name: str
    aval: Aval
    node: fx.Node | None

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Literal:
    """A number that stands where a tensor could.

    >>> Literal(1.0)
    1.0:f32[]
    """

    value: Number

    @property
    def aval(self) -> Aval:
        """A scalar of the dtype that PyTorch gives such a number, of weak type."""
        return Aval((), _dtype_of(self.value), weak_type=True)

    def __repr__(self) -> str:
        return f"{self.value!r}:{self.aval}"


@dataclass(frozen=True, eq=False, slots=True)
class Eqn:
    """One operator of a graph: `outputs = op[params] inputs`."""

    op: Any
    inputs: tuple[Var | Literal, ...]
    outputs: tuple[Var, ...]
    params: Mapping[str, Any]
    node: fx.Node

    @property
    def avals(self) -> tuple[Aval, ...]:
        """The avals of the inputs."""
        return tuple(value.aval for value in self.inputs)

    @property
    def out_avals(self) -> tuple[Aval, ...]:
        """The avals of the outputs."""
        return tuple(value.aval for value in self.outputs)

    @property
    def source(self) -> Source | None:
        """The user's line."""
        return notes_of(self.node).source

    @property
    def module(self) -> str:
        """The qualified name of the `nn.Module` that ran it, `''` outside any."""
        return notes_of(self.node).module or ""

    @property
    def name(self) -> str:
        """The name of the operator, as equations print it."""
        return op_name(self.op).removeprefix("higher_order.").removesuffix(".default")

    def __repr__(self) -> str:
        outputs = " ".join(f"{v.name}:{v.aval}" for v in self.outputs)
        return f"{outputs} = {self.name} {' '.join(map(repr, self.inputs))}".rstrip()


class Names:
    """Names for the nodes of a graph and of its bodies, given as they are met: a, b, ..., z, aa."""

    def __init__(self) -> None:
        self._names: dict[fx.Node, str] = {}

    def of(self, node: fx.Node) -> str:
        if node not in self._names:
            self._names[node] = _letters(len(self._names))
        return self._names[node]

    def share(self, node: fx.Node, like: fx.Node) -> None:
        self._names[node] = self.of(like)

    def var(self, node: fx.Node) -> Var:
        return Var(self.of(node), aval_of(node), node)


def equations(module: fx.GraphModule, names: Names) -> Iterator[Eqn]:
    """The equations of a graph in program order. Names are given as one goes through them."""
    for node in module.graph.nodes:
        if node.op == "call_function" and not is_item(node):
            outputs = _outputs(node, names)
            inputs, params = _arguments(node, module, names)
            yield Eqn(node.target, inputs, outputs, params, node)


def aval_of(node: fx.Node) -> Aval:
    return Aval.of(node.meta["val"])


def _outputs(node: fx.Node, names: Names) -> tuple[Var, ...]:
    value = node.meta.get("val")
    if not isinstance(value, tuple | list):
        return (names.var(node),) if isinstance(value, Tensor) else ()
    items: dict[int, fx.Node] = {}
    for user in node.users:
        if user.target is operator.getitem:
            index = user.args[1]
            assert isinstance(index, int)
            if index in items:
                names.share(user, items[index])
            items.setdefault(index, user)
    return tuple(
        names.var(items[i]) if i in items else Var("_", Aval.of(element), None)
        for i, element in enumerate(value)
        if isinstance(element, Tensor)
    )


def _arguments(
    node: fx.Node, module: fx.GraphModule, names: Names
) -> tuple[tuple[Var | Literal, ...], dict[str, Any]]:
    inputs: list[Var | Literal] = []
    params: dict[str, Any] = {}
    for name, value, takes_tensor, default in _bind_arguments(node):
        if isinstance(value, fx.Node) and value.op == "get_attr":
            params[name] = attribute(module, str(value.target))
        elif isinstance(value, fx.Node):
            inputs.append(names.var(value))
        elif takes_tensor and isinstance(value, Number):
            inputs.append(Literal(value))
        elif isinstance(value, tuple | list) and any(isinstance(v, fx.Node) for v in value):
            inputs += [names.var(v) for v in value if isinstance(v, fx.Node)]
            if not all(isinstance(v, fx.Node) for v in value):
                params[name] = fx.node.map_arg(value, names.var)  # type: ignore[arg-type]
        elif default is inspect.Parameter.empty or not equals_default(value, default):
            params[name] = fx.node.map_arg(value, names.var)  # type: ignore[arg-type]
    if hasattr(node.target, "params_of"):
        params |= node.target.params_of(params)
    return tuple(inputs), params


def _bind_arguments(node: fx.Node) -> Iterator[tuple[str, Any, bool, Any]]:
    """Name, value, whether a tensor is meant, and default of the arguments of a call."""
    if isinstance(node.target, _torch.OpOverload):
        schema = _torch.schema_arguments(node.target)
        given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
        for argument in schema:
            if argument.name in given:
                has_default = argument.has_default_value()
                default = argument.default_value if has_default else inspect.Parameter.empty
                is_tensor = str(argument.type) in ("Tensor", "Optional[Tensor]")
                yield argument.name, given[argument.name], is_tensor, default
        return
    declared = list(inspect.signature(type(node.target).__call__).parameters.values())[1:]
    for i, value in enumerate(node.args):
        parameter = declared[min(i, len(declared) - 1)] if declared else None
        name = f"arg{i}" if parameter is None else parameter.name
        yield name, value, False, inspect.Parameter.empty
    for name, value in node.kwargs.items():
        yield name, value, False, None


def _dtype_of(value: Number) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    return torch.get_default_dtype() if isinstance(value, float) else torch.complex64


def _letters(number: int) -> str:
    """The name with that number.

    >>> [_letters(i) for i in (0, 25, 26, 27, 702)]
    ['a', 'z', 'aa', 'ab', 'aaa']
    """
    name = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        name = string.ascii_lowercase[digit] + name
    return name
