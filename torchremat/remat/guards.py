"""What a trace took for granted: modules, closed-over tensors and the values of variables.

Each is checked at every call, so that a module switched to `eval`, a layer that was replaced or a
global that was set anew is traced anew. Nothing here holds the traced function itself.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import CellType
from typing import Any

from torch import Tensor, nn

_SIMPLE = (int, float, bool, str, type(None))
_GUARDED = ("_modules", "_forward_hooks", "_forward_pre_hooks")


class ModuleGuard:
    """Whether modules are as they were: mode, plain attributes, children and forward hooks.

    One `itemgetter` and one comparison a module, both in C: 0.5 us.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._checks: list[tuple[Callable[[Any], Any], dict[str, Any], tuple[Any, ...]]] = []
        for module in modules:
            attributes = vars(module)
            names = [*_GUARDED, *(n for n, v in attributes.items() if type(v) in _SIMPLE)]
            get = itemgetter(*names)
            recorded = [dict(v) if isinstance(v, dict) else v for v in get(attributes)]
            self._checks.append((get, attributes, tuple(recorded)))

    def holds(self) -> bool:
        """Whether nothing changed."""
        try:
            for get, attributes, recorded in self._checks:
                if get(attributes) != recorded:
                    return False
        except KeyError:  # an attribute was deleted
            return False
        return True


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that a function reads: an entry of a dict, or a cell of its closure."""

    label: str
    holder: Any
    key: str | None

    def get(self) -> Any:
        """The value now."""
        return self.holder.cell_contents if self.key is None else self.holder[self.key]


class VariableGuard:
    """Whether plain variables have the values that they had."""

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._values = [(v, v.get()) for v in variables if type(v.get()) in _SIMPLE]

    def holds(self) -> bool:
        """Whether nothing changed."""
        for variable, value in self._values:
            current = variable.get()
            if type(current) is not type(value) or current != value:
                return False
        return True


class CapturedTensors:
    """The tensors that a function closes over, found anew where they can have been replaced."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        variables: Sequence[Variable],
        modules: Sequence[tuple[str, nn.Module]],
    ) -> None:
        places = {id(v.get()): v for v in variables}
        for prefix, module in modules:
            for kind in ("_parameters", "_buffers"):
                held = vars(module)[kind]
                for name, tensor in held.items():
                    if tensor is not None:
                        label = ".".join(p for p in (prefix, name) if p)
                        places[id(tensor)] = Variable(f"{kind[1:-1]} {label}", held, name)
        self.tensors = list(tensors)
        self._places = [places.get(id(t)) for t in tensors]
        self.labels = [
            f"the closed-over tensor {i}" if place is None else f"the {place.label}"
            for i, place in enumerate(self._places)
        ]

        held_in_dicts = [p for p in self._places if p is not None and p.key is not None]
        self._entries = [(p.holder, p.key) for p in held_in_dicts]
        self._all_in_dicts = len(self._entries) == len(self.tensors)

    def current(self) -> list[Tensor]:
        """What the variables hold now."""
        if self._all_in_dicts:  # a module's parameters, say
            return [holder[key] for holder, key in self._entries]
        return [
            tensor if place is None else place.get()
            for tensor, place in zip(self.tensors, self._places, strict=True)
        ]


def variables_of(fun: Callable[..., Any]) -> list[Variable]:
    """The variables that the code of `fun` reads from its closure and its module."""
    fun = getattr(fun, "__func__", fun)
    fun = inspect.unwrap(fun)
    code = getattr(fun, "__code__", None)
    if code is None:
        return []
    cells = zip(code.co_freevars, fun.__closure__ or (), strict=True)
    found = [Variable(f"closed-over {n}", cell, None) for n, cell in cells if _is_set(cell)]
    globals_ = fun.__globals__
    found += [Variable(f"closed-over {n}", globals_, n) for n in code.co_names if n in globals_]
    return found


def _is_set(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def modules_in(variables: Iterable[Variable]) -> Iterator[tuple[str, nn.Module]]:
    """The modules among the variables, by the names that the function knows them by."""
    for variable in variables:
        value = variable.get()
        if isinstance(value, nn.Module):
            yield variable.label.removeprefix("closed-over "), value
