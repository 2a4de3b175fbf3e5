"""Forms of operators that run in place: the operator that writes, and a part that it writes to.

    add(s, y), which was add_(s, y)              add_(s, y)
    mm(a, b), which was mm(a, b, out=s)          mm(a, b, out=s)
    slice_scatter(b, y, 1, 0, 4)                 copy_(slice(b, 1, 0, 4), y)

Only what was in place in the user's code is again: then its numbers are those of plain PyTorch.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.aliasing import is_static
from torchremat.graph.nodes import call_of, is_identity, is_item, is_view
from torchremat.graph.notes import notes_of
from torchremat.graph.symbolic_sizes import Size

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class WrittenPart:
    """A part of a tensor: what `op` gives of the tensor and these arguments."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Form:
    """The operator that writes. It takes the memory first, or else as `out`.

    With a `part` it writes to that part of the memory.
    """

    op: Any
    part: WrittenPart | None = None
    is_out: bool = False

    @property
    def is_plain_copy(self) -> bool:
        return self.part is None and self.op is aten.copy_.default


_PARTS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


def part_of(scatter: fx.Node) -> WrittenPart | None:
    """The part of its first argument that `scatter` replaces; `None` of any other operator."""
    op = _PARTS.get(scatter.target)
    return None if op is None else WrittenPart(op, scatter.args[2:], scatter.kwargs)


def is_copy(node: fx.Node) -> bool:
    return node.target is aten.copy.default


def form_in_place(node: fx.Node) -> Form | None:
    """The form of `node` that writes to its first argument, if the user's code ran that."""
    if is_copy(node):
        return Form(aten.copy_.default)
    ran = notes_of(node).written_by
    if ran is None or not isinstance(node.target, _torch.OpOverload):
        return None
    name = _torch.schema_of(ran).name
    is_form = name == f"{_torch.schema_of(node.target).name}_" and arguments_written_by(ran) == [0]
    return Form(ran) if is_form and _parameters(ran) == _parameters(node.target) else None


def form_with_out(node: fx.Node) -> Form | None:
    """The form of `node` that writes to an argument `out`, if the user's code ran that."""
    ran = notes_of(node).written_by
    if ran is None or not isinstance(node.target, _torch.OpOverload):
        return None
    parameters = _parameters(ran)
    is_form = (
        _torch.schema_of(ran).name == _torch.schema_of(node.target).name
        and arguments_written_by(ran) == [len(parameters) - 1]
        and parameters[-1][0] == "out"
        and parameters[:-1] == _parameters(node.target)
    )
    return Form(ran, is_out=True) if is_form else None


def outs_of(node: fx.Node) -> tuple[str, ...]:
    """The arguments to which the user's code had the call `node` write all of several results."""
    ran = notes_of(node).written_by
    if ran is None or not isinstance(node.target, _torch.OpOverload) or node.op != "call_function":
        return ()
    count = len(_torch.schema_of(node.target).returns)
    parameters = _parameters(ran)
    start = len(parameters) - count
    is_form = (
        count > 1
        and _torch.schema_of(ran).name == _torch.schema_of(node.target).name
        and arguments_written_by(ran) == [*range(start, len(parameters))]
        and parameters[:start] == _parameters(node.target)
    )
    return tuple(name for name, _ in parameters[start:]) if is_form else ()


def parts_with(value: fx.Node) -> list[tuple[fx.Node, WrittenPart]]:
    """The tensors in whose part `value` is put, and that part."""
    found = ((user, part_of(user)) for user in value.users)
    return [
        (user.args[0], part)
        for user, part in found
        if part is not None and user.args[1] is value and isinstance(user.args[0], fx.Node)
    ]


def writes_into_first(node: fx.Node) -> bool:
    """Whether `node` gives its first argument after a write, which may run in place."""
    return part_of(node) is not None or form_in_place(node) is not None


def values_after_writes(value: fx.Node) -> set[fx.Node]:
    """The values in the memory of `value` if all writes to it run in place; `value` too."""
    found = {value}
    stack = [value]
    while stack:
        node = stack.pop()
        for user in node.users:
            goes_on = is_view(user) or (user.args[:1] == (node,) and writes_into_first(user))
            if goes_on and user not in found:
                found.add(user)
                stack.append(user)
    return found


def value_after_writes(value: fx.Node) -> fx.Node:
    """The value that `value` became by the last write of the user's code to its memory."""
    while (after := _value_after_write(value)) is not None:
        value = after
    return value


def _value_after_write(value: fx.Node) -> fx.Node | None:
    # a part that was put into a view is put, with that, into what it is a view of
    is_written = any(of(value) is not None for of in (form_with_out, form_in_place, part_of))
    lying, found = [value], None
    for node in lying:
        for user in node.users:
            if is_view(user):
                lying.append(user)
            elif notes_of(user).written_by is not None and (
                (user.args[0] is node and writes_into_first(user))
                or (is_written and part_of(user) is not None and user.args[1] is node)
            ):
                found = user
    return found


def arguments_written_by(op: Any) -> list[int]:
    return [i for i, a in enumerate(_torch.schema_arguments(op)) if _is_written(a)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _parameters(op: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in _torch.schema_arguments(op)]


# --- memory --------------------------------------------------------------------------------------

# They return their argument where there is nothing to do, which their schemas do not say.
_MAY_RETURN_ARGUMENT = {
    aten.conj_physical.default,
    aten.native_dropout.default,
}


def gives_new_memory(node: fx.Node) -> bool:
    """Whether all results of the call `node` lie in memory of their own."""
    call = call_of(node)
    if call.op != "call_function" or is_view(call) or call.target in _MAY_RETURN_ARGUMENT:
        return False
    if not isinstance(call.target, _torch.OpOverload):
        return False
    schema = _torch.schema_of(call.target)
    return (
        schema.name.startswith(("aten::", "prims::", "torchremat::"))
        and not schema.is_mutable
        and all(returned.alias_info is None for returned in schema.returns)
    )


# `reshape`, which may copy, is none of them; `expand` and `as_strided` name an element twice.
_VIEWS_OF_EACH_ELEMENT = {
    aten.slice.Tensor,
    aten.select.int,
    aten.diagonal.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unbind.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.view.default,
    aten._unsafe_view.default,
}


def is_writable_view(node: fx.Node) -> bool:
    """Whether a write to `node`, a view, is one to what it is a view of, each element once."""
    return is_item(node) or is_identity(node) or node.target in _VIEWS_OF_EACH_ELEMENT


# --- where parts lie -----------------------------------------------------------------------------

_SLICE = aten.slice.Tensor
_DEFAULTS = {_SLICE: (0, None, None, 1)}


class Parts:
    """How the parts of fake tensors lie.

    Of symbols it knows what `nodes` say: a view that the trace has lies as it does there.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._traced: dict[tuple[str, ...], Tensor] = {}
        for node in nodes:
            source = node.args[0] if node.target is _SLICE else None
            if isinstance(source, fx.Node) and isinstance(source.meta.get("val"), Tensor):
                part = WrittenPart(_SLICE, node.args[1:], node.kwargs)
                self._traced[_key_of(part, source.meta["val"])] = node.meta["val"]

    def of(self, part: WrittenPart, layout: Any) -> Any:
        """How `part` of a tensor with this layout lies; `None` if that is not known."""
        if not isinstance(layout, Tensor) or _is_whole(part, layout):
            return layout
        if not any(isinstance(a, Size) for a in part.args) and _is_numeric(part, layout):
            with _torch.isolate(), layout.fake_mode:  # type: ignore[attr-defined]
                return part.op(layout, *part.args, **part.kwargs)
        return self._traced.get(_key_of(part, layout))


def _key_of(part: WrittenPart, layout: Tensor) -> tuple[str, ...]:
    numbers = (*layout.shape, *layout.stride(), layout.storage_offset(), layout.dtype)
    return (*map(str, numbers), str(_arguments_of(part)), str(part.kwargs), str(part.op))


def _arguments_of(part: WrittenPart) -> list[Any]:
    return [*part.args, *_DEFAULTS.get(part.op, ())[len(part.args) :]]


def _is_whole(part: WrittenPart, layout: Tensor) -> bool:
    """Whether it is all of `layout`, whatever its symbols stand for: `x[:]`."""
    if part.op is not _SLICE or part.kwargs:
        return False
    dim, start, end, step = _arguments_of(part)
    if end is None or (isinstance(end, int) and end >= sys.maxsize):
        end = layout.shape[dim]
    return start in (0, None) and step == 1 and str(end) == str(layout.shape[dim])


def _is_numeric(part: WrittenPart, layout: Tensor) -> bool:
    """Whether no symbol decides on the part: it is along a dimension whose size is a number."""
    if is_static(layout):
        return True
    dim = part.args[0] if part.args else 0
    return (
        part.op in (_SLICE, aten.select.int)
        and not part.kwargs
        and isinstance(layout.shape[dim], int)
    )
