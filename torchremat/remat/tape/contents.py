"""Contents of storages, and the operators that make them: a tape consists of both.

An operator makes storages or writes to them. A *content* is the state of a storage between two
writes, so it never changes. Views need no operator: an argument is a content and a geometry.

    a = x @ w         content 1 = mm(x, w)
    b = a.T           (nothing: content 1, transposed)
    a.add_(1)         content 2 = add_(content 1, 1), in the same storage
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchremat.policies.policy import Value


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        offset = tensor.storage_offset()
        return cls(tensor.shape, tensor.stride(), offset, tensor.dtype)  # type: ignore[arg-type]

    def view_of(self, tensor: Tensor) -> Tensor:
        """The tensor that lies so in the storage of `tensor`."""
        if tensor.dtype is not self.dtype:
            empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
            return empty.set_(tensor.untyped_storage(), self.offset, self.size, self.stride)
        if (
            tensor.shape == self.size
            and tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
        ):
            return tensor
        return tensor.as_strided(self.size, self.stride, self.offset)

    def is_apart_from(self, other: "Geometry") -> bool:
        """Whether it is sure that no element lies in both: two chunks of one tensor, say.

        Both are boxes of one grid: the strides are the same, each a multiple of the next.
        """
        if self.dtype is not other.dtype or self.stride != other.stride:
            return False
        grid = sorted(zip(self.stride, self.size, other.size, strict=True), reverse=True)
        mine, theirs, is_apart = self.offset, other.offset, False
        row = None
        for stride, my_size, their_size in grid:
            if stride == 0 or (row is not None and row % stride):
                return False
            my_start, mine = divmod(mine, stride)
            their_start, theirs = divmod(theirs, stride)
            my_end, their_end = my_start + my_size, their_start + their_size
            if row is not None and max(my_end, their_end) * stride > row:
                return False  # it goes on in the next row
            is_apart |= my_end <= their_start or their_end <= my_start
            row = stride
        return is_apart and mine == theirs == 0

    def empty_in(self, storage: torch.UntypedStorage) -> Tensor:
        """A new tensor that lies so in `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


class Content:
    """The state of a storage between two writes.

    Attributes:
        maker: the operator that makes it; `None` if no operator of the tape does.
        is_saved: whether it is saved if it is needed, and not recomputed.
        reason: why.
        value: the value as the policy sees it; `None` for an input.
        names: those that `checkpoint_name` gave it.
        held: a tensor of the storage, once somebody needs it; a Variable until the call ends.
        input_id: the `id` of the storage, if it is an input.
        storage: that of `held` when it was taken; `t.data = ...` gives a tensor another one.
        version: of `held`, which nobody may change before the backward pass.
        is_lost: whether it was overwritten unseen, so that nobody has it any more.
        is_undefined: whether memory in it that no operator wrote may have been written unseen.
        is_packed: whether autograd saves it, or part of it.
        is_read: whether an operator reads it whose own result is recomputed.
        inherits: whether it is saved in place of what it overwrote, of which there is no copy.
        is_forced: whether it is saved whatever a budget says.
        place: where in the program it is made, and `count` how many were made there before it.
    """

    # most have most of the defaults: to fill the slots of an object takes four times as long
    is_saved = True
    reason = ""
    value: Value | None = None
    names: tuple[str, ...] = ()
    held: Tensor | None = None
    storage: torch.UntypedStorage | None = None
    version: int | None = None
    input_id = 0
    is_lost = is_undefined = is_packed = is_read = False
    inherits = is_forced = False
    place: Any = None
    count = 0

    def __init__(self, maker: "Entry | None", geometry: Geometry, nbytes: int) -> None:
        self.maker = maker
        self.geometry = geometry
        self.nbytes = nbytes

    def hold(self, tensor: Tensor) -> None:
        """Save it by `tensor`, which lies in its storage."""
        if self.held is None:
            self.held, self.storage = tensor, tensor.untyped_storage()

    def release(self) -> None:
        """Hold it no longer: what needs it has it in another way."""
        self.held = self.storage = None

    def settle(self) -> None:
        """Save the memory as it is, whatever the function's own tensor becomes."""
        assert self.held is not None
        if self.storage is not None and self.held.untyped_storage() is not self.storage:
            self.held = self.geometry.empty_in(self.storage)
        # not the Variable, whose `grad_fn` would keep the tape alive
        self.held, self.storage = self.held.detach(), None


class Slot:
    """A storage that the recorder has met: it has one content after the other."""

    __slots__ = ("content", "storage")

    def __init__(self, storage: torch.UntypedStorage, content: Content) -> None:
        self.storage = weakref.ref(storage)
        self.content = content


class Read(NamedTuple):
    """An argument of an operator: a content, seen through a geometry."""

    content: Content
    geometry: Geometry


class Blank(NamedTuple):
    """An argument of which only the layout is read, or all of which is overwritten."""

    geometry: Geometry
    device: torch.device
    fill: float | None = None
    """The number that it is filled with, for kernels that read it and do not use it."""


class Entry:
    """One operator of a tape."""

    __slots__ = (
        "args", "index", "is_grad_enabled", "kwargs", "makes", "op", "reads", "state", "writes",
    )  # fmt: skip

    def __init__(self, index: int, op: Any, args: Any, kwargs: Any) -> None:
        self.index = index
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.is_grad_enabled = torch.is_grad_enabled()
        """Some kernels go by it: recurrent networks have a workspace for gradients alone."""
        self.reads: tuple[Content, ...] = ()
        self.makes: list[tuple[int, weakref.ref[Content]]] = []
        """Contents of new storages, with the number of the tensor among the results.

        Weak references, since a content refers to its maker: a cycle would keep what the operator
        reads until Python looks for garbage.
        """
        self.writes: list[tuple[Read | Blank, weakref.ref[Content]]] = []
        """The arguments that it writes to, with what is in them afterwards."""
        self.state: tuple[Tensor, torch.device] | None = None
        """The state of the generator that it drew from, and the device."""

    def list_results(self) -> list[Content]:
        """List what it makes and what it leaves in its arguments, as far as anybody has it."""
        references = [ref for _, ref in (*self.makes, *self.writes)]
        return [content for ref in references if (content := ref()) is not None]


def demote(content: Content) -> bool:
    """Let `content` be recomputed, if what it is made of is still there or can be, too."""
    maker = content.maker
    if maker is None or content.is_undefined:
        return False
    for read in maker.reads:
        if read.held is None and read.is_saved and not demote(read):
            return False
    content.is_saved = False
    return True


def copy_storage(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage()).clone()
