"""Memory for packed weights: one tensor after the other, in huge pages where the system has them.

A decoder reads all of its weights for every token. In pages of 4 KiB each of them costs a walk through the page tables, which is why a
product reads faster from pages of 2 MiB; and the hardware's prefetchers stop at the end of a page.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20  # asked for at a time; what is never written takes no memory
HUGE_BYTES = 2 << 20
LINE_BYTES = 64


class Arena:
    """Hands out parts of chunks in the order of the calls. A chunk is given back when none of its parts is left.

    Where the system knows no huge pages each part is a tensor of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: weakref.ref[mmap.mmap] | None = None  # the parts hold it, not the arena
        self._used = 0

    def new(self, num_bytes: int) -> Tensor:
        """Uninitialized memory: uint8 [num_bytes], aligned to a cache line."""
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is None or num_bytes == 0:
            return torch.empty(num_bytes, dtype=torch.uint8)
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            if chunk is None or self._used + num_bytes > len(chunk):
                chunk = _new_chunk(num_bytes, advice)
                self._chunk, self._used = weakref.ref(chunk), _first_huge_page(chunk)
            part = torch.frombuffer(chunk, dtype=torch.uint8, count=num_bytes, offset=self._used)
            self._used += -(-num_bytes // LINE_BYTES) * LINE_BYTES
            return part


def _new_chunk(num_bytes: int, advice: int) -> mmap.mmap:
    """Room for num_bytes and more from the first huge page on."""
    size = max(CHUNK_BYTES, -(-num_bytes // HUGE_BYTES) * HUGE_BYTES) + HUGE_BYTES
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has rules of its own
    with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve as well
        chunk.madvise(advice)
    return chunk


def _first_huge_page(chunk: mmap.mmap) -> int:
    """Offset of the first byte at which a huge page can begin."""
    return -torch.frombuffer(chunk, dtype=torch.uint8, count=1).data_ptr() % HUGE_BYTES
