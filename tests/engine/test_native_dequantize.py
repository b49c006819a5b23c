"""The C decoders of GGUF blocks against the gguf package's, on random bytes: equal to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.ops.cpu import native
from engine.ops.cpu.native import dequantize as native_dequantize
from engine.weights.ggml_types import block_of, dequantize_rows

pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"no C kernels: {native.reason_unavailable()}")


@pytest.mark.parametrize("ggml_type", sorted(native_dequantize.GGML_TYPES))
@pytest.mark.parametrize("num_blocks", [1, 57])
def test_blocks_decode_to_the_same_bits(ggml_type: int, num_blocks: int) -> None:
    block = block_of(ggml_type)
    assert block is not None
    blocks = np.random.default_rng(ggml_type).integers(0, 256, (num_blocks, block.bytes), dtype=np.uint8)
    wanted = dequantize_rows(blocks, ggml_type).reshape(-1)
    out = torch.empty(num_blocks * block.elements)
    native_dequantize.dequantize(torch.from_numpy(blocks), ggml_type, block.bytes, out)
    # Random scales include NaN, whose payload no arithmetic promises to keep.
    numbers = ~np.isnan(wanted)
    assert numbers.any()
    assert np.array_equal(numbers, ~np.isnan(out.numpy()))
    assert np.array_equal(wanted[numbers], out.numpy()[numbers])


def test_other_types_are_left_to_others() -> None:
    assert not native_dequantize.can_dequantize(0)
    assert native_dequantize.can_dequantize(3)
