"""Which dtype this CPU multiplies many rows fastest in."""

from __future__ import annotations

from functools import cache

import torch


@cache
def dense_dtype() -> torch.dtype:
    """The dtype for dense products of many rows: bf16 where the CPU multiplies it itself (AMX, AVX-512 BF16), else fp32,
    since emulated bf16 runs at a quarter of fp32's rate."""
    has_native_bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if has_native_bf16 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
