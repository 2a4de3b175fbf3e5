"""Keeps a call within the bytes that a policy allows, whatever the values make it do.

The keeper counts the bytes that are alive. Above the limit it drops values that autograd saves, and
that can be recomputed from others: those first that take the least time for each byte.

    saved x1 x2 x3, limit exceeded     x2 = x1 + a2, a2 = mm(h2, w2), h2 is saved
                                       dropped: x2. To recompute it takes an addition and a product
"""

import heapq
import weakref
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.open_objects import flatten_result
from torchremat.policies.policy import Policy
from torchremat.remat.tape.contents import Content, Entry
from torchremat.remat.tape.limited_calls import TapeCall, TapeRecord
from torchremat.remat.tape.operator_facts import tensors_in
from torchremat.remat.tape.tape import Tape, TapedTensor
from torchremat.remat.tape.tape_decisions import TapeDecision

# The bytes that are dropped beyond the excess, as a part of the most that were alive: to look for
# values takes a pass over all that are saved. Chosen by hand.
_LEAST_STEP = 1 / 64
# Operators that one dropped value may take. The search for them ends there; chosen by hand.
_MOST_AGAIN = 64


class Keeper:
    """One call of a function under a limit."""

    def __init__(self, call: TapeCall, policy: Policy, tape: Tape) -> None:
        self.call = call
        self.live = 0
        """Bytes of storages that operators of the call made, and that are alive."""
        self._saved_reason = f"{policy} saves it: to recompute it would take longer"
        self._again_reason = f"{policy} recomputes it"
        self.tape = tape
        self._first_node = _torch.next_node_number()
        self.made: list[Content] = []
        self._counts: Counter[int] = Counter()
        self._inputs: dict[int, Tensor] = {}
        self._current: dict[int, Content] = {}
        """The content of each storage now, by the `id` of the storage."""
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._dropped = 0
        """Bytes that plain autograd would save, and that are not."""
        self._most = 0
        self._largest = 0
        self._in_vain = 0.0
        """Bytes up to which it is in vain to look for what to drop."""

    # --- while the call runs ---------------------------------------------------------------------

    def note_made(self, content: Content, decision: TapeDecision, tensor: Tensor) -> None:
        """Decide on a content that an operator made, or wrote to an older storage."""
        self.made.append(content)
        storage = tensor.untyped_storage()
        if id(storage) not in self._current:
            self._count_storage(storage, content.nbytes)
        self._current[id(storage)] = content
        content.is_forced = decision.is_saved or content.maker is None
        if content.is_forced or content.inherits or decision.place is None:
            return
        content.place, content.count = decision.place, self._counts[decision.place.number]
        self._counts[decision.place.number] += 1
        content.is_saved = self.call.lets_save(decision.place, content.count)
        content.reason = self._saved_reason if content.is_saved else self._again_reason

    def note_input(self, content: Content, tensor: Tensor) -> None:
        """Remember the tensor of an input, which outlives the call."""
        self._inputs[id(content)] = tensor
        self._current[id(tensor.untyped_storage())] = content

    def find_input(self, content: Content) -> Tensor | None:
        """The tensor of an input, as long as nobody has written to it."""
        given = self._inputs.get(id(content))
        if given is None or self._current.get(id(given.untyped_storage())) is not content:
            return None
        return given

    def _count_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = id(storage)
        myself = weakref.ref(self)

        def remove(_: object) -> None:
            keeper = myself()
            if keeper is not None:
                keeper._alive.pop(key, None)
                keeper._current.pop(key, None)
                keeper.live -= nbytes

        self._alive[key] = weakref.ref(storage, remove)
        self.live += nbytes
        self._largest = max(self._largest, nbytes)

    def is_above(self) -> bool:
        """Whether too many bytes are alive, and it is worth while to look for what to drop."""
        self._most = max(self._most, self.live + self._dropped)
        return self.live > max(self._limit(), self._in_vain)

    def _limit(self) -> float:
        limit = self.call.limit(self._most)
        return limit - self._largest if self._dropped or self.call.is_tight else limit

    def relieve(self) -> None:
        """Drop values that are saved, until there is room for some operators more."""
        step = _LEAST_STEP * self._most
        excess = self.live - self._limit() + step
        saving = _Saving(self)
        walls = self.call.find_walls(self.made, lambda c: saving.find(c) is not None)
        for content in saving.cheapest_first(self.call, walls):
            if excess <= 0:
                break
            if saving.drop(content, self._again_reason):
                self._dropped += content.nbytes
                excess -= content.nbytes
        self._in_vain = self.live + step if excess > step else 0.0

    # --- at its end ------------------------------------------------------------------------------

    def settle(self, result: object) -> None:
        """Drop what is not to stay saved, now that all operators of the call are known."""
        saving = _Saving(self)
        outputs = tensors_in(flatten_result(result)[0])
        numbers = {id(storage): content for storage, content in self._list_current()}
        record = TapeRecord(
            self.made,
            [packed for group in saving.packed.values() for packed in group],
            [numbers[n] for t in outputs if (n := _storage_number(t)) in numbers],
            [(t.grad_fn, t.output_nr) for t in outputs if t.grad_fn is not None],
            self._first_node,
            frozenset(n for n, c in saving.contents.items() if saving.find(c) is not None),
        )
        kept = self.call.settle(record)
        wanted = [c for n, c in saving.contents.items() if c.is_saved and n not in kept]
        for content in wanted:
            if content.maker is not None and not content.is_forced:
                saving.drop(content, self._again_reason)

    def close(self) -> None:
        """Forget all: autograd may refer to the recorder as long as it saves a tensor."""
        self.made.clear()
        self._inputs.clear()
        self._current.clear()
        self._alive.clear()

    def _list_current(self) -> Iterator[tuple[torch.UntypedStorage, Content]]:
        for key, ref in self._alive.items():
            storage = ref()
            if storage is not None and key in self._current:
                yield storage, self._current[key]


def _storage_number(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or _torch.is_traceable_wrapper_subclass(tensor):
        return 0
    return id(tensor.untyped_storage())


class _Saving:
    """The values that are in memory at a moment, which may be dropped."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.packed: dict[int, list[TapedTensor]] = {}
        self.contents: dict[int, Content] = {}
        """The contents that autograd saves, or that others are recomputed from."""
        for packed in keeper.tape.list_packed():
            self.packed.setdefault(id(packed.content), []).append(packed)
            self.contents[id(packed.content)] = packed.content
        self.contents.update((id(c), c) for c in keeper.made if c.held is not None)

    def find(self, content: Content) -> Tensor | None:
        """The tensor of a content that is saved, if it is in memory."""
        if not content.is_saved or content.is_lost:
            return None
        if content.held is not None:
            return content.held
        for packed in self.packed.get(id(content), ()):
            tensor = packed.tensor
            if tensor is not None and _torch.version_of(tensor) == packed.version:
                return tensor
        return self._keeper.find_input(content)

    def drop(self, content: Content, reason: str) -> bool:
        """Let `content` be recomputed, if what it is made of is in memory or can be, too."""
        again: dict[int, Content] = {}
        sources: list[tuple[Content, Tensor]] = []
        stack = [content]
        while stack:
            one = stack.pop()
            if one.maker is None or one.is_undefined or one.is_forced:
                return False
            again[id(one)] = one
            for read in one.maker.reads:
                if read.is_saved and id(read) not in again:
                    tensor = self.find(read)
                    if tensor is None:
                        stack.append(read)
                    else:
                        sources.append((read, tensor))
        for source, tensor in sources:
            self._keeper.tape.hold(source, tensor)
        for one in again.values():
            one.is_saved, one.reason = False, reason
        content.release()
        for packed in self.packed.get(id(content), ()):
            self._keeper.tape.drop_packed(packed)
        return True

    def cheapest_first(self, call: TapeCall, walls: frozenset[int]) -> Iterator[Content]:
        """The contents that may be dropped, by the time for each byte as it is now."""
        heap = [
            (self._price(content, call), number, content)
            for number, (key, content) in enumerate(self.contents.items())
            if content.is_saved and content.nbytes and content.maker is not None
            and key not in walls and self.find(content) is not None
        ]  # fmt: skip
        heapq.heapify(heap)
        while heap:
            _, number, content = heapq.heappop(heap)
            price = self._price(content, call)
            if heap and price > heap[0][0] * (1 + 1e-9):
                heapq.heappush(heap, (price, number, content))
            elif price < _NEVER:
                yield content

    def _price(self, content: Content, call: TapeCall) -> float:
        seconds = 0.0
        entries: dict[int, Entry] = {}
        stack: list[Content] = [content]
        while stack:
            again = stack.pop()
            entry = again.maker
            if entry is None or again.is_undefined or again.is_forced:
                return _NEVER
            if entry.index not in entries:
                entries[entry.index] = entry
                seconds += call.seconds_of(entry)
                if len(entries) > _MOST_AGAIN:
                    return _NEVER
                stack += [read for read in entry.reads if self.find(read) is None]
        return seconds / content.nbytes


_NEVER = float("inf")
