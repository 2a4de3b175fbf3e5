"""Functions that replace what they close over, and calls inside that no function mode sees.

A loop runs its function with other tensors in the place of those that it closes over. A checkpoint
inside has the latter among its inputs, and is called past all modes: the loop replaces them here.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from torch import Tensor

from torchremat import _torch
from torchremat.tracing.capture import map_arguments

R = TypeVar("R")


class OuterArguments(Protocol):
    """Replaces tensors, and notes those that are made inside."""

    def lift(self, tensor: Tensor) -> Tensor: ...

    def note(self, result: R) -> R: ...


class _InForce(threading.local):
    def __init__(self) -> None:
        self.outer: list[OuterArguments] = []
        self.is_paused = False


_in_force = _InForce()


@contextmanager
def replace_arguments(outer: OuterArguments) -> Iterator[None]:
    """Let `call_lifted` in the block, and in this thread, pass tensors through `outer`."""
    _in_force.outer.append(outer)
    try:
        yield
    finally:
        _in_force.outer.pop()


@contextmanager
def pause_replacing() -> Iterator[None]:
    """A block of the library's own, whose tensors are none of the user's function."""
    before, _in_force.is_paused = _in_force.is_paused, True
    try:
        yield
    finally:
        _in_force.is_paused = before


def is_replacing_paused() -> bool:
    return _in_force.is_paused


def call_lifted(call: Callable[[Sequence[Tensor]], R], tensors: Sequence[Tensor]) -> R:
    """`call(tensors)`, with those that a function around replaces.

    >>> import torch
    >>> call_lifted(len, [torch.ones(2)])
    1
    """
    outer = _in_force.outer
    if not outer:
        return call(tensors)
    inputs = [_lift(tensor) for tensor in tensors]
    with pause_replacing():  # nothing inside is closed over
        result = call(inputs)
    for arguments in outer:
        arguments.note(result)
    return result


def handle_function_calls() -> AbstractContextManager[None]:
    """Let `apply` of each `autograd.Function` in the block have what replaces its arguments."""
    return _torch.handle_function_calls(_call_function)


def _call_function(_: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
    outer = _in_force.outer
    if not outer or _in_force.is_paused:
        return apply(*args)
    result = apply(*map_arguments(_lift, args))
    for arguments in outer:
        arguments.note(result)
    return result


def _lift(tensor: Tensor) -> Tensor:
    for arguments in reversed(_in_force.outer):
        tensor = arguments.lift(tensor)
    return tensor
