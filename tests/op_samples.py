"""PyTorch's own samples of its operators, as functions of tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

LARGEST = 4000  # numbers in a sample that need not be larger


def _not_seeded(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# it sets the seed inside the operator, and puts the generator back: no random stream to compare
common_methods_invocations.wrapper_set_seed = _not_seeded


def _dtype(op: Any) -> torch.dtype | None:
    """The dtype in which `op` is differentiated on the CPU: double precision, real if it can be."""
    supported = op.supported_backward_dtypes("cpu") if op.supports_autograd else ()
    return next((d for d in (torch.float64, torch.complex128) if d in supported), None)


OPS = {
    ".".join(part for part in (op.name, op.variant_test_name) if part): op
    for op in op_db
    if _dtype(op)
}
"""The operators that PyTorch differentiates on the CPU, each variant by its own name."""


@dataclass(frozen=True)
class Sample:
    """A call of an operator: the function of its tensors, and which of them are differentiated.

    The other arguments are closed over. The outputs are those that PyTorch's tests differentiate.
    """

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    is_differentiated: tuple[bool, ...]

    def fresh(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors, as leaves, and those that are differentiated."""
        tensors = [t.detach() for t in self.tensors]
        pairs = zip(tensors, self.is_differentiated, strict=True)
        return tensors, [t.requires_grad_() for t, chosen in pairs if chosen]


def samples(name: str, count: int) -> Iterator[Sample]:
    """`count` samples of the operator at even distances, or all of them if they are fewer."""
    op = OPS[name]
    torch.manual_seed(0)
    found = list(islice(op.sample_inputs("cpu", _dtype(op), requires_grad=True), 100))
    found = [s for s in found if any(t.requires_grad for t in _tensors(s))]
    small = [s for s in found if sum(t.numel() for t in _tensors(s)) <= LARGEST] or found[:1]
    number = min(count, len(small))
    for i in range(number):
        yield _as_sample(op, small[i * len(small) // number])


def _as_sample(op: Any, sample: Any) -> Sample:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = tuple(_tensors(sample))
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    process = sample.output_process_fn_grad

    def function(*values: Tensor) -> Any:
        left = iter(values)
        full = [next(left) if t else v for t, v in zip(is_tensor, rest, strict=True)]
        x, args, kwargs = pytree.tree_unflatten(full, spec)
        return process(op(x, *args, **kwargs))

    return Sample(function, tensors, tuple(t.requires_grad for t in tensors))


def _tensors(sample: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
