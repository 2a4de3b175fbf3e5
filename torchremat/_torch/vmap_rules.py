"""Inside of a batching rule of `vmap`, and the errors and warnings where there is none."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DispatchKey
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter


@dataclass(frozen=True)
class VmapLevel:
    """A level of `vmap`: its number, and the size of its axis."""

    number: int
    size: int


@contextmanager
def at_level_below() -> Iterator[VmapLevel]:
    """In a batching rule: what runs in the block runs below its level, which is yielded."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    keys = torch._C.DispatchKeySet(DispatchKey.FuncTorchBatched)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield VmapLevel(interpreter.level(), interpreter.batch_size())


unwrap_batched_tensor: Callable[[torch.Tensor, int], tuple[torch.Tensor, int | None]] = (
    torch._C._functorch._unwrap_batched
)
add_batch_dim: Callable[[torch.Tensor, int, int], torch.Tensor] = torch._C._functorch._add_batch_dim


def asks_for_value(error: RuntimeError) -> bool:
    """Whether `error` is that of `vmap` where Python asks for the value of a mapped tensor."""
    return "It looks like you're calling .item() on a Tensor" in str(error)


def needs_mapped_value(error: RuntimeError) -> bool:
    """Whether `error` says that Python, or the size of a result, depends on a mapped tensor."""
    return any(text in str(error) for text in _NEEDS_MAPPED_VALUE)


_NEEDS_MAPPED_VALUE = (
    "vmap: It looks like you're",
    "vmap: We do not support batching operators that can",  # nonzero, a mask as an index
    "Cannot access data pointer of Tensor that doesn't have storage",  # tolist, numpy
)

LOOP_WARNING = "There is a performance drop because we have not yet implemented"
"""How the warning begins that PyTorch gives where it maps an operator by a loop."""


def dispatch_restored() -> AbstractContextManager[None]:
    """After the block the dispatcher's state is as before it.

    What fails inside of several levels of `torch.func` leaves PyTorch 2.13 in another, once the
    error that it raised is forgotten: catch it inside the block.
    """
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def looped_operator(warning: str) -> str | None:
    """The operator that such a warning is about."""
    if not warning.startswith(LOOP_WARNING):
        return None
    return warning.partition("batching rule for ")[2].partition(" ")[0].rstrip(".")
