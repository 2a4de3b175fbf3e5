"""The linear part of a rule for tangents: all that it computes from these, to be transposed."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from torchremat import _torch

Tensors = Sequence[Tensor]


def depends_only_on(tensor: Tensor, leaves: Tensors) -> bool:
    """Whether autograd finds `leaves` below `tensor`, and no other tensor.

    A checkpoint computes values and their tangents in one node, so that a value seems to depend on
    the tangents.
    """
    stack, seen, found = [tensor.grad_fn], set(), False
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            if not any(variable is leaf for leaf in leaves):
                return False
            found = True
        stack.extend(before for before, _ in node.next_functions)
    return found


@dataclass(frozen=True, eq=False)
class _LinearPart:
    """A rule that runs on tangents at a level of `torch.func`, and will be transposed."""

    depth: int
    tangents: Tensors
    primals: Tensors

    def computes(self, tensor: Tensor) -> bool:
        """Whether `tensor` has been computed from the tangents."""
        if self.depth:  # nothing else in the rule is differentiated at this level
            return _torch.without_level(tensor, self.depth)[1]
        if not tensor.requires_grad:
            return False
        if self._is_tangent(tensor):
            return True
        seen = {tensor.grad_fn for tensor in self.primals}
        stack = [tensor.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if self._is_tangent(getattr(node, "variable", None)):
                return True
            stack.extend(before for before, _ in node.next_functions)
        return False

    def _is_tangent(self, tensor: Tensor | None) -> bool:
        return any(tensor is tangent for tangent in self.tangents)


class _LinearParts(threading.local):
    def __init__(self) -> None:
        self.running: list[_LinearPart] = []


_linear_parts = _LinearParts()


@contextmanager
def note_linear_part(tangents: Tensors, primals: Tensors) -> Iterator[None]:
    """A block in which a rule for tangents runs with these `tangents` and `primals`."""
    _linear_parts.running.append(_LinearPart(_torch.transform_depth(), tangents, primals))
    try:
        yield
    finally:
        _linear_parts.running.pop()


def is_in_linear_part(inputs: Tensors) -> bool:
    """Whether a rule for tangents, at this level, calls a function with some of its tangents.

    The function is linear in them, so that it is transposed as the function that it is: its own
    rule, transposed, would call it with tangents again, without end. So it is in JAX.
    """
    depth = _torch.transform_depth()
    parts = [part for part in _linear_parts.running if part.depth == depth]
    return any(part.computes(tensor) for part in parts for tensor in inputs)
