"""Memory for packed weights: parts in order, aligned, their own, given back with the last of a chunk."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref
from pathlib import Path

import pytest
import torch

from engine.ops.cpu import arena
from engine.ops.cpu.arena import CHUNK_BYTES, HUGE_BYTES, LINE_BYTES, Arena

needs_advice = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system knows no huge pages")


def test_parts_are_aligned_and_their_own() -> None:
    weights = Arena()
    sizes = [1, 64, 1000, 0, 4097, 65, 300_001]
    parts = [weights.new(size) for size in sizes]
    for value, part in enumerate(parts):
        part.fill_(value)
    for value, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        assert part.shape == (size,)
        assert part.dtype == torch.uint8
        assert part.data_ptr() % LINE_BYTES == 0
        assert bool((part == value).all())


@needs_advice
def test_parts_follow_each_other_and_large_ones_get_their_own_chunk() -> None:
    weights = Arena()
    first, second = weights.new(100), weights.new(5000)
    assert second.data_ptr() == first.data_ptr() + 128
    large = weights.new(CHUNK_BYTES + HUGE_BYTES)
    large[-1] = 7
    assert large.data_ptr() % HUGE_BYTES == 0
    third = weights.new(CHUNK_BYTES // 2)
    third[-1] = 7
    assert large[-1] == 7


@needs_advice
def test_a_chunk_goes_with_its_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        pass

    def watched(*args: int, **kwargs: int) -> Watched:
        memory = Watched(*args, **kwargs)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(arena.mmap, "mmap", watched)
    weights = Arena()
    parts = [weights.new(CHUNK_BYTES // 4) for _ in range(6)]
    assert len(made) == 2
    del parts[0]
    gc.collect()
    assert [memory() is None for memory in made] == [False, False]
    del parts[:3]
    gc.collect()
    assert [memory() is None for memory in made] == [True, False]
    del parts
    gc.collect()
    assert [memory() is None for memory in made] == [True, True]


def test_without_huge_pages_parts_are_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    part = Arena().new(1000)
    assert part.shape == (1000,)
    assert part.untyped_storage().nbytes() == 1000


@needs_advice
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_kernel_was_asked_for_huge_pages() -> None:
    part = Arena().new(HUGE_BYTES)
    part.fill_(1)
    regions = Path("/proc/self/smaps").read_text().split("\nVmFlags:")
    for region, flags in zip(regions, [after.split("\n", 1)[0] for after in regions[1:]], strict=False):
        begin, end = (int(address, 16) for address in _header(region).split("-"))
        if begin <= part.data_ptr() < end:
            assert " hg" in flags
            return
    pytest.fail("the part's region is not in the list")


def _header(region: str) -> str:
    """The address range of an entry of /proc/self/smaps, the previous entry's flags before it."""
    return next(line for line in region.splitlines() if "-" in line.split(" ", 1)[0] and " " in line).split(" ", 1)[0]
