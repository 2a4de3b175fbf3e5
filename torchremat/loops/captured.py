"""The tensors that the functions of a loop close over, as arguments of each step.

w = torch.randn(3, 3)               look    collects w
body = lambda h: h @ w              step    runs with the argument in the place of w
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, wrap_torch_function

from torchremat import _torch
from torchremat.tracing.capture import TENSOR_GETTERS, map_arguments
from torchremat.tracing.outer_arguments import is_replacing_paused, replace_arguments


class NewInputError(Exception):
    """Steps read tensors that are outside of the loop, and that the first step did not read.

    The loop runs again from its start, with more arguments.
    """


@dataclass(eq=False)
class Found:
    """Tensors from outside that steps have read, and that are no inputs of the loop.

    Attributes:
        inputs: those that may have a gradient, so that they must be.
        others: the others, with their versions when they were first read.
    """

    inputs: list[Tensor] = field(default_factory=list)
    others: list[tuple[weakref.ref[Tensor], int | None]] = field(default_factory=list)

    def was_written(self) -> bool:
        """Whether a step wrote to one of the others, if that is still there."""
        pairs = ((reference(), version) for reference, version in self.others)
        return any(t is not None and version_of(t) != version for t, version in pairs)


class Arguments(TorchFunctionMode):
    """Passes `given` to PyTorch's functions where the user's function gives them `captured`.

    Args:
        own: other tensors that the function may read.
        found: gets tensors from outside that are none of `captured`.
    """

    def __init__(
        self,
        captured: Sequence[Tensor],
        given: Sequence[Tensor],
        own: Sequence[Tensor],
        found: "Found",
    ) -> None:
        super().__init__()
        self._given = {id(t): inside for t, inside in zip(captured, given, strict=True)}
        self._inside: dict[int, weakref.ref[Tensor]] = {}
        self._found = found
        self._leaves = (*given, *own)
        self.note(list(self._leaves))

    @contextmanager
    def enter(self) -> Iterator[None]:
        with self, replace_arguments(self):
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__" and func not in TENSOR_GETTERS:
            return func(*args)  # x.shape
        if is_replacing_paused():  # a trace replaces them by its own
            return func(*args, **(kwargs or {}))
        lift = self.lift
        args = tuple([lift(a) if isinstance(a, Tensor) else map_arguments(lift, a) for a in args])
        if kwargs:
            return self.note(func(*args, **map_arguments(lift, kwargs)))
        return self.note(func(*args))

    def lift(self, tensor: Tensor) -> Tensor:
        given = self._given.get(id(tensor))
        if given is not None:
            return given
        if not self._is_inside(tensor):
            self._take(tensor)
        return tensor

    def _take(self, tensor: Tensor) -> None:
        if has_derivative(tensor):
            self._found.inputs.append(tensor)
            if not self._is_level_inside(tensor):  # no operator here can read it
                raise NewInputError
        else:
            self._found.others.append((weakref.ref(tensor), version_of(tensor)))
        self.note(tensor)

    def _is_inside(self, tensor: Tensor) -> bool:
        known = self._inside.get(id(tensor))
        if known is not None and known() is tensor:
            return True
        if _torch.innermost_tensor(tensor) is not tensor:
            return self._is_level_inside(tensor)
        return reaches_leaf([tensor], self._leaves)

    def _is_level_inside(self, tensor: Tensor) -> bool:
        """Whether `tensor` is of a level of `torch.func` that is entered: the function made it."""
        return not _torch.is_of_level_above(tensor, _torch.transform_depth())

    def note(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            return self._add(result)
        map_arguments(self._add, result)
        return result

    def _add(self, tensor: Tensor) -> Tensor:
        self._inside[id(tensor)] = weakref.ref(tensor)
        return tensor


class Collector(Arguments):
    """Finds out what the functions of a loop close over: `captured`, with their versions."""

    def __init__(self, captured: list[Tensor], own: Sequence[Tensor]) -> None:
        super().__init__((), (), own, Found())
        self._captured = captured
        self.versions: list[tuple[Tensor, int | None]] = []
        self._depth = _torch.transform_depth()

    def _is_level_inside(self, tensor: Tensor) -> bool:
        return _torch.is_of_level_above(tensor, self._depth)

    def _take(self, tensor: Tensor) -> None:
        self._captured.append(tensor)
        self.versions.append((tensor, version_of(tensor)))
        self.note(tensor)


def version_of(tensor: Tensor) -> int | None:
    """How often `tensor` was written to; `None` for one of inference mode, which does not count."""
    return None if tensor.is_inference() else _torch.version_of(tensor)


@wrap_torch_function(lambda *tensors: tensors)
def announce(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors`, or what a loop around has in their place.

    An inner loop passes to its derivative what its functions close over; the outer one sees it.
    """
    return tensors


def find_stray_leaf(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Tensor | None:
    """A tensor that `outputs` have a gradient for, and that is none of `leaves`."""
    known = {id(leaf) for leaf in leaves}
    return next((leaf for leaf in _leaves_of(outputs) if id(leaf) not in known), None)


def reaches_leaf(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Whether `outputs` have a gradient for one of `leaves`."""
    known = {id(leaf) for leaf in leaves}
    return any(id(leaf) in known for leaf in _leaves_of(outputs))


def _leaves_of(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    stack = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        stack.extend(parent for parent, _ in node.next_functions)


def has_derivative(tensor: Tensor) -> bool:
    """Whether some level of differentiation, or of `vmap`, looks at `tensor`."""
    is_wrapped = _torch.innermost_tensor(tensor) is not tensor
    return is_wrapped or _torch.requires_grad_at_any_level(tensor)
