"""A step whose values lie in one buffer, each at the address that a plan gives it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchremat.planning.memory.timeline import Timeline


class OneBuffer(TorchDispatchMode):
    """Moves what each operator makes to its address, where it stays while it is read.

    A value that was placed over one that is still read would change it, and so the results.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        arena = timeline.place_values()
        self.buffer = torch.zeros(arena.nbytes, dtype=torch.uint8)
        sizes = [lifetime.value.nbytes for lifetime in timeline.lifetimes]
        places = zip(sizes, arena.offsets[: len(sizes)], strict=True)
        self.left = [(nbytes, offset) for nbytes, offset in places if nbytes]
        self.left.reverse()
        self._before: set[int] = set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        there = {storage_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        results = function(*args, **kwargs)
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and storage_of(result) not in there:
                self._move(result)
                there.add(storage_of(result))
        return results

    def _move(self, result: Tensor) -> None:
        storage = result.untyped_storage()
        if not storage.nbytes():
            return
        nbytes, offset = self.left.pop()
        assert nbytes == storage.nbytes()
        self.buffer[offset : offset + nbytes].copy_(
            torch.tensor([], dtype=torch.uint8).set_(storage)
        )
        start = offset // result.element_size() + result.storage_offset()
        result.set_(self.buffer.untyped_storage(), start, result.size(), result.stride())


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
