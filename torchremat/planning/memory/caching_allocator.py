"""The bytes that PyTorch's caching allocator takes from a device for a sequence of tensors.

    request     rounded     from the pool of        segments of
    to 1 MiB    512 bytes   small blocks            2 MiB
    to 10 MiB   512 bytes   large blocks            20 MiB
    above       512 bytes   large blocks            the request, rounded to 2 MiB

A request gets the smallest free block that holds it, of which the rest is split off; freed
neighbours are joined. Segments are never given back while there is memory. With expandable segments
a pool is one range of addresses that grows by pages. Source: c10/cuda/CUDACachingAllocator.cpp of
PyTorch (round_size, get_allocation_size, get_free_block, should_split), with default settings.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# kMinBlockSize in c10/core/AllocatorConfig.h: requests are multiples of it
_SMALLEST_BLOCK = 512
# kSmallSize there: the largest request that the pool of small blocks serves
_SMALL_REQUEST = 1 << 20
# kSmallBuffer there: a segment of the pool of small blocks
_SMALL_SEGMENT = 2 << 20
# large_segment_size_ there, which large_segment_size_mb sets
_LARGE_SEGMENT = 20 << 20
# kMinLargeAlloc there: from here on a request has a segment of its own
_LARGE_REQUEST = 10 << 20
# kRoundLarge there: segments of their own are multiples of it
_LARGE_ROUNDING = 2 << 20


@dataclass(eq=False, slots=True)
class Block:
    """A range of addresses in a segment, with its neighbours there."""

    address: int
    nbytes: int
    is_small: bool
    is_free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def order(self) -> tuple[int, int]:
        return self.nbytes, self.address


@dataclass
class CachingAllocator:
    """PyTorch's allocator of a device whose memory does not end, for one stream.

    Attributes:
        reserved_bytes: the bytes of all segments so far.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 << 20)             # 3 MiB, of a segment of 20 MiB
    >>> allocator.free(block)
    >>> block = allocator.allocate(17 << 20)            # of the same segment
    >>> allocator.reserved_bytes >> 20
    20
    """

    expandable_segments: bool = False
    reserved_bytes: int = 0
    _free: tuple[list[Block], list[Block]] = field(default_factory=lambda: ([], []))
    """Free blocks of the pools of large and of small ones, by size and address."""
    _ends: list[Block | None] = field(default_factory=lambda: [None, None])
    """The last block of each pool, where segments are expandable."""
    _next_address: int = 0

    def allocate(self, nbytes: int) -> Block:
        """A block of at least `nbytes`, which is positive."""
        size = _round_up(nbytes, _SMALLEST_BLOCK)
        is_small = size <= _SMALL_REQUEST
        pool = self._free[is_small]
        i = bisect_left(pool, (size, -1), key=lambda block: block.order)
        block = pool.pop(i) if i < len(pool) else self._take(size, is_small)
        block.is_free = False
        rest = block.nbytes - size
        if (
            rest >= _SMALLEST_BLOCK
            if is_small or self.expandable_segments
            else rest > _SMALL_REQUEST
        ):
            self._split(block, size)
        return block

    def free(self, block: Block) -> None:
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._remove(neighbour)
                self._join(block, neighbour)
        self._put(block)

    def _take(self, size: int, is_small: bool) -> Block:
        """A block of a new segment, or at the end of one that grows."""
        if not self.expandable_segments:
            nbytes = _segment_nbytes(size)
            block = Block(self._next_address, nbytes, is_small)
            self._next_address += nbytes
            self.reserved_bytes += nbytes
            return block
        end = self._ends[is_small]
        page = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        at_end = end.nbytes if end is not None and end.is_free else 0
        grown = _round_up(size - at_end, page)
        self.reserved_bytes += grown
        if end is not None and end.is_free:
            self._remove(end)
            end.nbytes += grown
            return end
        address = 0 if end is None else end.address + end.nbytes
        block = Block(address, grown, is_small, before=end)
        if end is not None:
            end.after = block
        self._ends[is_small] = block
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(
            block.address + size,
            block.nbytes - size,
            block.is_small,
            before=block,
            after=block.after,
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, size
        if self._ends[block.is_small] is block:
            self._ends[block.is_small] = rest
        self._put(rest)

    def _join(self, block: Block, neighbour: Block) -> None:
        if neighbour is block.before:
            block.address, block.before = neighbour.address, neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.nbytes += neighbour.nbytes
        if self._ends[block.is_small] is neighbour:
            self._ends[block.is_small] = block

    def _put(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], block, key=lambda block: block.order)

    def _remove(self, block: Block) -> None:
        pool = self._free[block.is_small]
        del pool[bisect_left(pool, block.order, key=lambda block: block.order)]


def count_reserved(
    lifetimes: Sequence[tuple[int, int, int]],
    before: Iterable[int] = (),
    *,
    expandable_segments: bool = False,
) -> int:
    """The bytes that the allocator takes from the device for tensors with these lifetimes.

    `lifetimes` are pairs of the first and the last moment, and bytes, in the order in which the
    tensors are made. `before` are the bytes of tensors that are there from the start.

    >>> count_reserved([(0, 1, 6 << 20), (1, 2, 6 << 20), (2, 2, 6 << 20)]) >> 20
    20
    """
    allocator = CachingAllocator(expandable_segments)
    for nbytes in before:
        if nbytes:
            allocator.allocate(nbytes)
    moments = max((last for _, last, _ in lifetimes), default=-1) + 1
    made: list[list[int]] = [[] for _ in range(moments)]
    dropped: list[list[int]] = [[] for _ in range(moments)]
    for i, (first, last, nbytes) in enumerate(lifetimes):
        if nbytes:
            made[first].append(i)
            dropped[last].append(i)
    blocks: dict[int, Block] = {}
    for begins, ends in zip(made, dropped, strict=True):
        blocks |= {i: allocator.allocate(lifetimes[i][2]) for i in begins}
        for i in ends:
            allocator.free(blocks.pop(i))
    return allocator.reserved_bytes


def _segment_nbytes(size: int) -> int:
    if size <= _SMALL_REQUEST:
        return _SMALL_SEGMENT
    if size < _LARGE_REQUEST:
        return _LARGE_SEGMENT
    return _round_up(size, _LARGE_ROUNDING)


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
