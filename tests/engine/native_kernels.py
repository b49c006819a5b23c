"""Help for tests of the C kernels: skip where there are none, run with each instruction set and number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.ops.cpu import native

needs_kernels = pytest.mark.skipif(not native.is_available(), reason=f"C kernels: {native.reason_unavailable()}")
ISAS = ("avx2", "avx512")


@contextmanager
def running_on(isa: str, num_threads: int = 1) -> Iterator[None]:
    """Use ``isa`` and ``num_threads`` within; skip the test where this CPU lacks it."""
    before = native.isa()
    if not native.set_isa(isa):
        pytest.skip(f"this CPU lacks {isa}")
    native.set_threads(num_threads)
    try:
        yield
    finally:
        native.set_isa(before)
        native.set_threads(1)
