"""The tensors that a function closes over, and where another may take their place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchremat.core.slots import identity_of
from torchremat.errors import RetraceError
from torchremat.remat.escapes.escapes import Escapes
from torchremat.remat.tracing.guards.entries import OF_EVERY_MODULE, Binding, entries_of
from torchremat.tracing.modules.module_paths import below


@dataclass(frozen=True)
class _Followed(Binding):
    """A variable inside a value that the function replaces at each call."""

    def get(self) -> Any:
        return self.holder()


def _find_in_old(escapes: Escapes, tensor: Tensor) -> list[Binding]:
    follow = escapes.places.get(id(tensor))
    return [] if follow is None or follow() is not tensor else [_Followed("tensor", follow)]


def _tensors_of(prefix: str, module: nn.Module) -> Iterator[Binding]:
    """The tensors of a module: its parameters, buffers, and what its attributes are or hold."""
    for kind in ("_parameters", "_buffers"):
        held = vars(module)[kind]
        for name in [name for name, tensor in held.items() if tensor is not None]:
            yield Binding(f"{kind[1:-1]} {below(prefix, name)}", held, name)
    attributes = vars(module)
    for name in [n for n in attributes if n not in OF_EVERY_MODULE]:
        own = Binding(f"attribute {below(prefix, name)}", attributes, name)
        yield from (v for v in (own, *entries_of(own)) if isinstance(v.get(), Tensor))


class CapturedTensors:
    """The tensors that a function closes over, found anew where they can have been replaced."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        variables: Sequence[Binding],
        modules: Sequence[tuple[str, nn.Module]],
        escapes: Escapes,
        *,
        writes: bool,
    ) -> None:
        """`writes` says that the function writes in place: then no two may become one tensor."""
        self._are_apart = writes
        places: dict[int, list[Binding]] = {}
        inside = (v for prefix, module in modules for v in _tensors_of(prefix, module))
        for variable in (*variables, *inside):
            if identity_of(variable.holder) not in escapes.old:
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

        `None` if one is gone (a weight was pruned, say), or two that were one tensor are not. So it
        is where two have become one, of which the function may write to one.
        """
        found = self._find()
        if found is not None and self._are_apart and len(set(map(id, found))) < len(found):
            return None
        return found

    def _find(self) -> list[Tensor] | None:
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
