"""GGUF's common block formats to fp32 in C, bit for bit what the gguf package's decoders give."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

from torch import Tensor

from engine.ops.cpu import native

GGML_TYPES = frozenset((2, 3, 6, 7, 8, 12, 13, 14))  # Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K


@cache
def _entry() -> Any:
    return native.function("rl_dequantize", c_int64, c_void_p, c_int64, c_void_p)


def can_dequantize(ggml_type: int) -> bool:
    return ggml_type in GGML_TYPES and native.is_available()


def dequantize(stored: Tensor, ggml_type: int, block_bytes: int, out: Tensor) -> None:
    """stored: whole blocks, uint8, contiguous. out: fp32, contiguous, as many weights as the blocks hold."""
    assert stored.is_contiguous() and out.is_contiguous() and stored.nbytes % block_bytes == 0
    code = _entry()(ggml_type, stored.data_ptr(), stored.nbytes // block_bytes, out.data_ptr())
    assert code == 0, f"type {ggml_type} is not known"
