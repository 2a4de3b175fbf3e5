"""Memory of the host for offloaded values: lent up to a limit, and returned when it is dead.

On a GPU it is pinned, and PyTorch's allocator rounds each block up to a power of two, which is what
counts here. Values on the CPU are copied to the pool as well, so that their figures are those of a
GPU. When the pool is full, a value stays on its device, with one `OffloadWarning`.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchremat import config
from torchremat.core.accelerators import has_streams
from torchremat.core.source import warn_user
from torchremat.errors import OffloadWarning
from torchremat.remat.offload.streams import Copy


@dataclass(frozen=True, slots=True)
class HostStats:
    """The bytes in the pool, and counts of its copies.

    Attributes:
        nbytes: bytes of the pool that are in use now.
        peak_nbytes: the most that were in use at one time.
        limit_nbytes: how many there may be.
        num_copied: how many values were copied to the host,
        num_fetched: and back.
        num_refused: how many stayed on their device because the pool was full.
    """

    nbytes: int
    peak_nbytes: int
    limit_nbytes: int
    num_copied: int
    num_fetched: int
    num_refused: int


def stats() -> HostStats:
    """The bytes in the pool now, and counts of copies since the start or the last reset.

    Between a forward pass that offloads and its backward pass the offloaded values are in it.
    """
    return POOL.stats()


def reset_counts() -> None:
    """Start the counts of the pool anew; its peak becomes what is in use now."""
    POOL.reset_counts()


def holds(storage: torch.UntypedStorage) -> bool:
    return POOL.is_lent(storage)


@dataclass(frozen=True, eq=False)
class _Loan:
    storage: "weakref.ref[torch.UntypedStorage]"
    key: int
    nbytes: int
    device: torch.device
    """The device that the value in it came from."""


class HostPool:
    """Memory of the host that is lent, up to a limit. A block comes back when its storage dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loans: dict[int, _Loan] = {}
        self._numbers: dict[int, int] = {}
        """The loan of each storage, by identity."""
        # A storage may die at any time, also while a thread has the lock. So its death is noted
        # here, and what belongs to it is dropped, by single operations that no thread interrupts.
        self._returned: deque[int] = deque()
        self._sources: dict[int, tuple[Copy, Tensor]] = {}
        """Copies to the host that have begun, by loans, the oldest first, and what they read."""
        self._arrivals: dict[int, Any] = {}
        """Values on their way back to the device, by loans."""
        self.devices: set[torch.device] = set()
        self._last = 0
        self._nbytes = 0
        self._peak = 0
        self._warned_at: int | None = None
        self.num_copied = self.num_fetched = self.num_refused = 0

    def stats(self) -> HostStats:
        with self._lock:
            self._take_back()
            return HostStats(
                self._nbytes,
                self._peak,
                _limit(),
                self.num_copied,
                self.num_fetched,
                self.num_refused,
            )

    def reset_counts(self) -> None:
        with self._lock:
            self._take_back()
            self._peak = self._nbytes
            self.num_copied = self.num_fetched = self.num_refused = 0

    def count_fetch(self) -> None:
        with self._lock:
            self.num_fetched += 1
        self._free_copied()

    def is_lent(self, storage: torch.UntypedStorage) -> bool:
        return self._number_of(storage) is not None

    def _number_of(self, storage: torch.UntypedStorage) -> int | None:
        number = self._numbers.get(id(storage), 0)
        loan = self._loans.get(number)
        return number if loan is not None and loan.storage() is storage else None

    def keep_source(self, storage: torch.UntypedStorage, copy: Copy, source: Tensor) -> None:
        """Hold `source` until it is copied to `storage`, or too many newer copies have begun."""
        number = self._number_of(storage)
        if number is not None:
            self._sources[number] = (copy, source)
        self._free_copied()

    def _free_copied(self) -> None:
        numbers = list(self._sources)
        num_too_many = len(numbers) - max(config.offload_copies_at_once, 0)
        for i, number in enumerate(numbers):
            copy, _ = self._sources.get(number, (None, None))
            if copy is None:
                continue
            if i < num_too_many:
                copy.wait()
            elif not copy.is_done():
                return  # nor is any after it
            self._sources.pop(number, None)

    def add_arrival(self, storage: torch.UntypedStorage, arrival: object) -> None:
        """Store an `arrival` that was started early, as long as `storage` lives."""
        number = self._number_of(storage)
        if number is not None:
            self._arrivals[number] = arrival

    def has_arrival(self, storage: torch.UntypedStorage) -> bool:
        return self._number_of(storage) in self._arrivals

    def take_arrival(self, storage: torch.UntypedStorage) -> Any:
        number = self._number_of(storage) if self._arrivals else None
        return None if number is None else self._arrivals.pop(number, None)

    def device_of(self, storage: torch.UntypedStorage) -> torch.device | None:
        number = self._number_of(storage)
        return None if number is None else self._loans[number].device

    def lend(self, nbytes: int, device: torch.device) -> Tensor | None:
        """That many bytes, as a tensor of them, for `device`; `None` if there is no room."""
        pinned = has_streams(device)
        size = 1 << (nbytes - 1).bit_length() if pinned and nbytes else nbytes
        limit = _limit()
        with self._lock:
            self._take_back()
            if has_room := self._nbytes + size <= limit:
                self._nbytes += size
                self._peak = max(self._peak, self._nbytes)
                self.num_copied += 1
            else:
                self.num_refused += 1
        if not has_room:
            self._refuse(nbytes, limit, f"{self._nbytes:,} of {limit:,} bytes are in use")
            return None
        try:
            block = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            with self._lock:
                self._nbytes -= size
                self.num_copied -= 1
                self.num_refused += 1
            self._refuse(nbytes, limit, f"the host has no more memory to give ({error})")
            return None
        self.devices.add(device)
        self._register(block.untyped_storage(), size, device)
        return block

    def _register(self, storage: torch.UntypedStorage, size: int, device: torch.device) -> None:
        returned, sources, arrivals = self._returned, self._sources, self._arrivals
        with self._lock:
            self._last = number = self._last + 1

            def is_dead(_: object) -> None:
                # what a copy to the host reads may change now: nobody will read what it writes
                sources.pop(number, None)
                arrivals.pop(number, None)
                returned.append(number)

            self._loans[number] = _Loan(weakref.ref(storage, is_dead), id(storage), size, device)
            self._numbers[id(storage)] = number

    def _take_back(self) -> None:
        while self._returned:
            number = self._returned.popleft()
            loan = self._loans.pop(number)
            self._nbytes -= loan.nbytes
            if self._numbers.get(loan.key) == number:
                del self._numbers[loan.key]

    def _refuse(self, nbytes: int, limit: int, why: str) -> None:
        if self._warned_at != limit:
            self._warned_at = limit
            warn_user(
                f"a value of {nbytes:,} bytes is not offloaded but stays on its device, as will "
                f"others: {why}. Raise config.host_pool_nbytes, or offload less",
                OffloadWarning,
            )


POOL = HostPool()
"""The pool of this process."""


def _limit() -> int:
    limit = config.host_pool_nbytes
    return _half_of_the_host() if limit is None else limit


@cache
def _half_of_the_host() -> int:
    return min(_memory_of_the_host(), default=16 << 30) // 2


def _memory_of_the_host() -> Iterator[int]:
    """The bytes of the machine, and the most that a container may have of them, as far as known."""
    if hasattr(os, "sysconf"):
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        if path.exists() and (text := path.read_text().strip()).isdecimal():
            yield int(text)


_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
