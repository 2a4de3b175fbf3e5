"""A tape, and what autograd has of it in place of the tensors that it would save."""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchremat import _torch
from torchremat.autodiff.replay_rules import has_gaps
from torchremat.policies.policy import Value
from torchremat.remat.tape.checksum import Checksum, WholeValue
from torchremat.remat.tape.contents import Content, Entry, Geometry


class TapedTensor:
    """A tensor that autograd saves: itself, or its place on the tape if it is recomputed."""

    __slots__ = ("__weakref__", "check", "content", "geometry", "node", "tape", "tensor", "version")

    def __init__(self, tape: "Tape", content: Content, tensor: Tensor) -> None:
        self.tape = tape
        self.check: Checksum | WholeValue | None = None
        self.content = content
        self.geometry = Geometry.of(tensor)
        self.version = _torch.version_of(tensor)
        self.node = _torch.next_node_number() - 1
        """The number of the node of autograd that saves it, which has just been made."""
        self.tensor = _without_node(tensor, self.node) if content.is_saved else None


def _without_node(tensor: Tensor, node: int) -> Tensor:
    """`tensor`, which must not refer to the node that saves it: nothing would free such a cycle."""
    maker = tensor.grad_fn
    return tensor if maker is None or _torch.node_number_of(maker) != node else tensor.detach()


class Tape:
    """The operators of one call, as far as its backward pass needs them.

    They are found from the contents that autograd saves: each content knows the operator that
    makes it, and an operator what it reads.
    """

    def __init__(self) -> None:
        self._num_entries = 0
        self._packed: list[weakref.ref[TapedTensor]] = []
        self._held: list[Content] = []
        """Contents that somebody may need, until the call ends."""
        self.check: type[Checksum | WholeValue] | None = None
        """By which a recomputed value is compared with the first one, if at all."""
        self.summary = TapeSummary(())
        self.reruns: dict[int, Any] = {}
        """The results so far, of each backward pass that runs."""
        self.lock = threading.RLock()

    def next_index(self) -> int:
        self._num_entries += 1
        return self._num_entries

    def pack(self, content: Content, tensor: Tensor) -> TapedTensor:
        packed = TapedTensor(self, content, tensor)
        if not content.is_saved:
            packed.check = self._make_check(content, tensor)
        self._packed.append(weakref.ref(packed))
        return packed

    def hold(self, content: Content, tensor: Tensor) -> None:
        """Save `content` by `tensor`, which lies in its storage, for what is recomputed from it."""
        if content.held is None:
            content.hold(tensor)
            self._held.append(content)

    def hold_reads(self, reads: Iterable[tuple[Content, Tensor]]) -> None:
        """Save what may be saved of `reads`: something has to be recomputed from them."""
        for content, tensor in reads:
            content.is_read = True
            if content.is_saved:
                self.hold(content, tensor)

    def list_packed(self) -> list[TapedTensor]:
        """List the tensors of the call that autograd still saves."""
        return [packed for ref in self._packed if (packed := ref()) is not None]

    def drop(self, content: Content) -> None:
        """Let autograd have a place on the tape instead of the tensor that it has."""
        if content.is_packed:
            for packed in self.list_packed():
                if packed.content is content:
                    self.drop_packed(packed)

    def drop_packed(self, packed: TapedTensor) -> None:
        if packed.tensor is not None:
            packed.check = self._make_check(packed.content, packed.tensor)
            packed.tensor = None

    def _make_check(self, content: Content, tensor: Tensor) -> Checksum | WholeValue | None:
        value = content.value
        if self.check is None or (value is not None and has_gaps(value.op, value.index)):
            return None
        return self.check.of(tensor)

    def finish(self) -> None:
        """Forget all that no backward pass can need; nobody may change the rest from now on."""
        live = self.list_packed()
        self._packed = [weakref.ref(packed) for packed in live]
        entries = entries_for(packed.content for packed in live)
        sources = {id(c): c for entry in entries for c in entry.reads if c.is_saved}
        sources |= {
            id(p.content): p.content for p in live if p.content.is_saved and p.tensor is None
        }
        saved = sources | {id(p.content): p.content for p in live if p.content.is_saved}
        self.summary = TapeSummary.of(saved.values(), entries)
        beside = {id(c): c for e in entries for c in e.list_results() if c.is_saved}
        for content in (beside | saved).values():
            content.maker = None
        for content in self._held:
            if id(content) not in sources:
                content.release()
        self._held.clear()
        for content in sources.values():
            if content.held is None:
                content.is_lost = True
            else:
                content.settle()
                content.version = _torch.version_of(content.held)


@dataclass(frozen=True)
class TapeRow:
    """The decision on a value, for reports, without a tensor."""

    value: Value | None
    """`None` for an input."""
    names: tuple[str, ...]
    geometry: Geometry
    nbytes: int
    is_saved: bool
    reason: str
    storage_id: int


@dataclass(frozen=True)
class TapeSummary:
    """The decisions of one call."""

    rows: tuple[TapeRow, ...]

    @classmethod
    def of(cls, saved: Iterable[Content], entries: Iterable[Entry]) -> "TapeSummary":
        again = [c for e in entries for c in e.list_results() if not c.is_saved]
        return cls(
            tuple(
                TapeRow(c.value, c.names, c.geometry, c.nbytes, c.is_saved, c.reason, c.input_id)
                for c in (*saved, *again)
            )
        )


def entries_for(contents: Iterable[Content]) -> list[Entry]:
    """The operators that recompute those of `contents` that are not saved, in their order."""
    found: dict[int, Entry] = {}
    stack = [content for content in contents if not content.is_saved]
    while stack:
        entry = stack.pop().maker
        assert entry is not None, "what no operator makes is saved"
        if entry.index not in found:
            found[entry.index] = entry
            stack += [content for content in entry.reads if not content.is_saved]
    return [found[index] for index in sorted(found)]
