"""The bytes that PyTorch's caching allocator reserves, against its header and a naive twin."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchremat as tr
from torchremat.planning.memory.caching_allocator import CachingAllocator, count_reserved

KIB, MIB = 1 << 10, 1 << 20
HEADER = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [(1, 2), (512 * KIB, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10),
     (10 * MIB + 1, 12), (33 * MIB, 34)],
)  # fmt: skip
def test_a_segment_is_as_large_as_the_request_says(nbytes, reserved):
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert allocator.reserved_bytes == reserved * MIB


@pytest.mark.skipif(not HEADER.exists(), reason="a build of PyTorch without headers")
def test_sizes_are_those_of_pytorchs_header():
    text = HEADER.read_text()
    found = {name: int(value) for name, value in re.findall(r"size_t (k\w+) = (\d+);", text)}
    if "kMinBlockSize" not in found:
        pytest.skip("this PyTorch has them elsewhere")
    small, rounding = found["kSmallSize"], found["kRoundLarge"]
    first_large = found["kMinLargeAlloc"]

    def reserved(*sizes: int) -> int:
        return count_reserved([(0, 0, size) for size in sizes])

    assert reserved(small) == reserved(small // 2, small // 2) == found["kSmallBuffer"]
    assert reserved(small + 1) == reserved(first_large - 512) > reserved(first_large)
    assert reserved(first_large + 1) == first_large + rounding
    blocks = found["kSmallBuffer"] // found["kMinBlockSize"]
    assert reserved(*[1] * blocks) == found["kSmallBuffer"]
    assert reserved(*[1] * (blocks + 1)) == 2 * found["kSmallBuffer"]


def test_what_is_left_of_a_large_block_is_split_off_above_one_mebibyte():
    allocator = CachingAllocator()
    allocator.allocate(19 * MIB)  # a segment of 20: one is left, which is no block of its own
    allocator.allocate(1 * MIB + 512)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(18 * MIB)  # what the second left of its segment
    assert allocator.reserved_bytes == 40 * MIB


def test_freed_neighbours_are_joined():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)
    allocator.allocate(15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_an_expandable_segment_grows_at_its_end():
    sizes = [(0, 0, 12 * MIB), (1, 1, 30 * MIB), (2, 2, 55 * MIB)]
    assert count_reserved(sizes) == (12 + 30 + 56) * MIB
    assert count_reserved(sizes, expandable_segments=True) == 60 * MIB


class Naive:
    """The same rules over lists of intervals, searched from end to end."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, bool, list[list[int]]]] = []
        self.reserved = 0

    def allocate(self, nbytes):
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        found = None
        for _, is_small, blocks in self.segments:
            for block in blocks:
                fits = is_small == small and not block[2] and block[1] >= size
                if fits and (found is None or block[1] < found[0][1]):
                    found = block, blocks
        if found is None:
            whole = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else -(-size // (2 * MIB)) * 2 * MIB
            )
            blocks = [[0, whole, False]]
            self.segments.append((self.reserved, small, blocks))
            self.reserved += whole
            found = blocks[0], blocks
        block, blocks = found
        rest = block[1] - size
        if rest >= 512 if small else rest > MIB:
            blocks.insert(blocks.index(block) + 1, [block[0] + size, rest, False])
            block[1] = size
        block[2] = True
        return block, blocks

    def free(self, handle):
        block, blocks = handle
        block[2] = False
        merged: list[list[int]] = []
        for b in blocks:
            if merged and not merged[-1][2] and not b[2]:
                merged[-1][1] += b[1]
            else:
                merged.append(b)
        blocks[:] = merged


sizes = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(1, 24 * MIB), st.just(MIB)
)


@given(st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 99)), max_size=60))
def test_reserved_bytes_are_those_of_a_naive_twin(steps):
    allocator, naive = CachingAllocator(), Naive()
    alive = []
    for frees, nbytes, which in steps:
        if frees and alive:
            ours, theirs = alive.pop(which % len(alive))
            allocator.free(ours)
            naive.free(theirs)
        else:
            alive.append((allocator.allocate(nbytes), naive.allocate(nbytes)))
        assert allocator.reserved_bytes == naive.reserved


@given(st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 99)), max_size=60))
def test_expandable_blocks_do_not_overlap(steps):
    allocator = CachingAllocator(expandable_segments=True)
    alive = []
    for frees, nbytes, which in steps:
        if frees and alive:
            allocator.free(alive.pop(which % len(alive)))
        else:
            alive.append(allocator.allocate(nbytes))
        for is_small in (False, True):
            blocks = sorted((b for b in alive if b.is_small == is_small), key=lambda b: b.address)
            ends = [b.address + b.nbytes for b in blocks]
            assert all(end <= b.address for end, b in zip(ends, blocks[1:], strict=False))
        assert sum(b.nbytes for b in alive) <= allocator.reserved_bytes


def build():
    layers = [torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)]
    return torch.nn.Sequential(*layers * 3).to("meta"), torch.empty(2048, 256, device="meta")


def test_an_estimate_and_a_plan_say_what_is_reserved():
    model, x = build()
    found = tr.estimate(model, x, optimizer=torch.optim.AdamW)
    assert found.total_bytes <= found.reserved_bytes <= 2 * found.total_bytes
    assert "reserved on a GPU" in str(found)
    plan = tr.plan(model, x, budget="70%", device="h100")
    assert plan.peak_bytes <= plan.reserved_bytes < plan.baseline.reserved_bytes
    assert plan.reserved_bytes == plan.timeline().count_reserved_bytes()
    assert "reserved" in str(plan)
    whole = tr.plan(model, x, budget="100%", device="h100", optimizer=torch.optim.AdamW)
    assert whole.peak_bytes <= whole.reserved_bytes


def test_a_plan_of_an_earlier_file_does_not_know_what_is_reserved():
    model, x = build()
    plan = tr.plan(model, x, budget="100%", device="h100")
    loaded = type(plan).from_json(plan.to_json())
    assert loaded.reserved_bytes == plan.reserved_bytes
    old = re.sub(r'\n *"reserved_bytes": \d+,', "", plan.to_json())
    old = re.sub(r',\n *"reserved_bytes": \d+', "", old)
    assert "reserved_bytes" not in old
    earlier = type(plan).from_json(old)
    assert earlier.reserved_bytes == 0
    assert "reserved" not in str(earlier)
