"""This process's memory, as the operating system counts it. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import psutil


def free_bytes() -> int:
    """Memory that can be had without swapping."""
    return int(psutil.virtual_memory().available)


def settled_bytes() -> int:
    """Memory this process holds once what it has freed is given back, so that two calls can be subtracted."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # glibc only; others keep what they keep
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
