"""Values that go to the host's memory and come back, beside the operators.

A value that a policy offloads is copied to the host as soon as it is made. The graph of the
backward pass fetches it some operators before it is read. A plan says when each copy must be done:

    policy      y = mm(x, w);  h = to_host(y);  s = sin(y)                        -> s, h
    plan        y = mm(x, w);  c = start_copy(y);  s = sin(y);  h = finish_copy(c)     -> s, h
    backward    f = start_fetch(h);  g = mul(dy, c);  y = finish_fetch(f);  dw = mm(g, y)

A value is copied with the whole storage that it lies in, so that strides, offset and overlap stay.
The memory comes from `host_pool.py`, the streams that copy from `streams.py`.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.accelerators import is_captured
from torchremat.remat.offload.host_pool import POOL, holds
from torchremat.remat.offload.streams import Copy, stream_of


def to_host(value: Tensor, like: Tensor | None = None) -> Tensor:
    """A copy of `value` in the pool, which may only have begun; `value` if it cannot be there.

    The source stays alive until the copy is done, or `config.offload_copies_at_once` newer
    ones have begun. `like` is what this gave for another value in the same storage: they share the
    copy.
    """
    if like is not None:
        return _share_copy(like, value)
    sending = start_copy(value)
    if sending.copy is not None:
        POOL.keep_source(sending.kept.untyped_storage(), sending.copy, sending.source)
    return sending.kept


@dataclass(slots=True, eq=False)
class Sending:
    """A value that is copied from `source` to `kept`, in the pool; one that stays is both."""

    kept: Tensor
    source: Tensor
    copy: Copy | None = None


def start_copy(value: Tensor) -> Sending:
    """Begin to copy `value` to the pool. Whoever holds what this gives holds `value`."""
    if type(value) is not Tensor or value.layout is not torch.strided or _is_captured(value):
        return Sending(value, value)
    with _unseen():
        value = value.resolve_neg()
        storage = value.untyped_storage()
        block = POOL.lend(storage.nbytes(), value.device)
        if block is None:
            return Sending(value, value)
        source = _bytes_of(storage)
        copy = stream_of(value.device).copy(block, source)
        return Sending(_place_in(block.untyped_storage(), value), source, copy)


def finish_copy(sending: Sending) -> Tensor:
    """The copy in the pool; the operators that follow have waited for it."""
    if sending.copy is not None:
        sending.copy.wait()
        sending.copy = None
    return sending.kept


def _share_copy(like: Tensor, value: Tensor) -> Tensor:
    storage = like.untyped_storage()
    if type(value) is not Tensor or not holds(storage):
        return value
    with _unseen():
        return _place_in(storage, value)


def _is_captured(value: Tensor) -> bool:
    """Whether a CUDA graph is being recorded, to which no other stream may lead in and out."""
    return value.is_cuda and is_captured()


@dataclass(slots=True, eq=False)
class Arrival:
    """A storage on its way back to `made`, memory on the device."""

    made: Tensor
    copy: Copy | None

    def wait(self) -> None:
        if self.copy is not None:
            self.copy.wait()
            self.copy = None

    def __del__(self) -> None:
        # of a backward pass that failed: nobody may have the memory before the copy is done
        self.wait()


@dataclass(slots=True, eq=False)
class Fetch:
    """A result `kept` of `to_host` on its way back; without an `arrival` it never left."""

    kept: Tensor
    arrival: Arrival | None


def start_fetch(kept: Tensor, device: torch.device) -> Fetch:
    """Begin to bring `kept`, what `to_host` gave, back to `device`, if it has not begun."""
    storage = kept.untyped_storage()
    if kept.device == device and not holds(storage):  # it stayed there
        return Fetch(kept, None)
    arrival: Arrival | None = POOL.take_arrival(storage)
    if arrival is None or (arrival.copy is not None and not arrival.copy.is_of_here()):
        arrival = _bring(storage, device)
    return Fetch(kept, arrival)


def _bring(storage: torch.UntypedStorage, device: torch.device) -> Arrival:
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    POOL.count_fetch()
    with _unseen():
        return Arrival(made, stream_of(device).copy(made, _bytes_of(storage)))


def finish_fetch(fetch: Fetch, kept: Tensor | None = None) -> Tensor:
    """The value that `fetch` brings back; with `kept`, another that shared its storage."""
    wanted = fetch.kept if kept is None else kept
    arrival = fetch.arrival
    if arrival is None and kept is None:
        return fetch.kept
    if arrival is None or wanted.untyped_storage() is not fetch.kept.untyped_storage():
        # somebody gave back another copy of it
        device = fetch.kept.device if arrival is None else arrival.made.device
        return fetch_value(wanted, device)
    arrival.wait()
    with _unseen():
        return _place_in(arrival.made.untyped_storage(), wanted)


def fetch_value(kept: Tensor, device: torch.device) -> Tensor:
    return finish_fetch(start_fetch(kept, device))


def wait_for_copies() -> None:
    """Wait until every copy that has begun is done: what is in the pool can be read by the host."""
    for device in tuple(POOL.devices):
        stream_of(device).synchronize()


@dataclass(frozen=True, eq=False)
class Kept:
    """The values that one run of a checkpoint left in the pool.

    Attributes:
        storages: the memory, in the order of the checkpoint's offloaded residuals.
        first: positions of those that its backward pass reads first, once that is known.
    """

    storages: tuple["weakref.ref[torch.UntypedStorage]", ...]
    first: Sequence[int]


class _Chain(threading.local):
    """Of a thread: what ran last in the forward pass, and what is likely to run next backwards."""

    last: Kept | None = None
    next: Kept | None = None


_chain = _Chain()


def note_kept(values: Sequence[Tensor], first: Sequence[int]) -> Kept | None:
    """Note what a checkpoint left in the pool; gives what the one that ran before it did.

    In the backward pass that is likely to be the next that runs.
    """
    before = _chain.last
    _chain.last = Kept(tuple(weakref.ref(v.untyped_storage()) for v in values), first)
    return before


def expect(kept: Kept | None) -> None:
    """Let `bring_next`, in the backward graph that this thread runs now, bring what is `kept`."""
    _chain.next = kept


def bring_next() -> None:
    """Begin to bring what the backward pass that is likely to run next reads first.

    What has gone since, or begun to come, is left out.
    """
    kept, _chain.next = _chain.next, None
    if kept is None:
        return
    for storage in [kept.storages[i]() for i in kept.first]:
        if storage is not None:
            _bring_early(storage)


def bring_early(kept: Tensor) -> None:
    """Begin to bring `kept` back, if it is in the pool: a `start_fetch` will find it."""
    _bring_early(kept.untyped_storage())


def _bring_early(storage: torch.UntypedStorage) -> None:
    device = POOL.device_of(storage)
    if device is not None and not POOL.has_arrival(storage):
        POOL.add_arrival(storage, _bring(storage, device))


COPIES = frozenset({to_host, start_copy, finish_copy, start_fetch, finish_fetch, bring_next})
"""The functions above that are nodes of graphs."""


def _unseen() -> AbstractContextManager[Any]:
    return _isolate() if _torch.is_transformed_or_watched() else torch.no_grad()


@contextmanager
def _isolate() -> Iterator[None]:
    with _torch.isolate(), torch.no_grad():
        yield


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _place_in(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor in `storage`, with the layout that `like` has in its own."""
    made = torch.empty(0, dtype=like.dtype, device=storage.device)
    made.set_(storage, like.storage_offset(), like.size(), like.stride())
    return made.conj() if like.is_conj() else made
