"""NF4 and LLM.int8 weights, multiplied by bitsandbytes' own operations (Dettmers 2022 and 2023).

They are made for GPUs. On a CPU bitsandbytes unpacks the whole matrix at each call and then multiplies it densely (int8 without
AVX-512 too), so the bytes that a token moves go up, not down: the weights are small in memory and slow to use.

    nf4       4 bits per weight: one of 16 numbers spread like a normal distribution, times the largest of each 64 weights
    llm_int8  8 bits per weight, a scale per row; activations in 8 bits, a scale per token, but inputs in which some token of the
              step reaches 6 or more are multiplied in full. So a token's result depends on what is computed beside it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.ops.interface import Packed

SCHEMES = ("nf4", "llm_int8")
NF4_BLOCK = 64  # weights that share a scale, along the rows
OUTLIER = 6.0  # the threshold of the LLM.int8 paper


@dataclass(frozen=True, slots=True)
class BitsAndBytesPacked(Packed):
    """``data``: nf4 (uint8 [out * in / 2, 1], fp32 scales; in rounded up to whole blocks); llm_int8 (int8 [out, in], fp32 [out], the largest of each row).

    state: bitsandbytes' own description of NF4 weights; None for llm_int8.
    """

    state: Any


@cache
def _library() -> Any:
    """The bitsandbytes package, imported when a model first needs it: that takes seconds. ValueError when it cannot be."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that are not meant for this
    try:
        import bitsandbytes
    except Exception as error:  # whatever a package built for other hardware may raise
        raise ValueError(
            f"bitsandbytes cannot be loaded here ({error}). Install it again, or choose weights=int4 or int8."
        ) from error
    return bitsandbytes


def pack(weight: Tensor, bias: Tensor | None, scheme: str, dtype: torch.dtype) -> BitsAndBytesPacked:
    """Quantize weight [out, in]. dtype: what NF4 weights are unpacked to and multiplied in. ValueError for NaN or infinity."""
    weight = weight.float().contiguous()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("A weight matrix holds NaN or infinite values. The model file is damaged; download it again.")
    functional = _library().functional
    state, path = None, "llm_int8: bitsandbytes, int8 activations, outliers in fp32"
    data: tuple[Tensor, ...]
    if scheme == "nf4":
        values, state = functional.quantize_4bit(_in_whole_blocks(weight), quant_type="nf4", blocksize=NF4_BLOCK)
        state.dtype = dtype
        data = (values, state.absmax)
        path = f"nf4: bitsandbytes, unpacked at each call, {'bf16' if dtype == torch.bfloat16 else 'fp32'} product"
    else:
        data = functional.int8_vectorwise_quant(weight)[:2]
    bias = None if bias is None else bias.float()
    num_bytes = sum(tensor.nbytes for tensor in data) + (0 if bias is None else bias.nbytes)
    out_features, in_features = weight.shape
    return BitsAndBytesPacked(scheme, out_features, in_features, data, bias, num_bytes, path, state)


def linear(x: Tensor, packed: BitsAndBytesPacked) -> Tensor:
    """x [N, in] @ weight.T + bias -> [N, out], in x's dtype."""
    if packed.scheme == "nf4":
        out = (
            _library()
            .matmul_4bit(_in_whole_blocks(x.to(packed.state.dtype)), packed.data[0].t(), packed.state)
            .to(x.dtype)
        )
    else:
        out = _int8_product(x.float(), packed).to(x.dtype)
    return out if packed.bias is None else out.add_(packed.bias)


def _int8_product(x: Tensor, packed: BitsAndBytesPacked) -> Tensor:
    """What bitsandbytes' Linear8bitLt does, but in fp32 instead of fp16, which holds no activation above 65504."""
    values, largest = packed.data
    quantized, scales, outlier_columns = _library().functional.int8_vectorwise_quant(x, threshold=OUTLIER)
    out, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(x, quantized, values, scales, largest, outlier_columns)
    return out


def unpack(packed: BitsAndBytesPacked) -> Tensor:
    """The weights that ``packed`` stands for, fp32 [out, in]."""
    values, scales = packed.data
    if packed.scheme == "nf4":
        return _nf4_weights(packed, values, scales, packed.out_features)
    return values * (scales / 127).unsqueeze(1)


def rows(packed: BitsAndBytesPacked, ids: Tensor) -> Tensor:
    """Rows ids [T] of the matrix, fp32 [T, in], without unpacking the others."""
    values, scales = packed.data
    if packed.scheme == "llm_int8":
        return values[ids] * (scales[ids] / 127).unsqueeze(1)
    values, scales = (part.view(packed.out_features, -1)[ids] for part in (values, scales))
    return _nf4_weights(packed, values.view(-1, 1), scales.flatten(), ids.shape[0])


def _nf4_weights(packed: BitsAndBytesPacked, values: Tensor, scales: Tensor, num_rows: int) -> Tensor:
    shape = (num_rows, packed.state.shape[1])
    weights: Tensor = torch.ops.bitsandbytes.dequantize_4bit(values, scales, NF4_BLOCK, "nf4", shape, torch.float32)
    return weights[:, : packed.in_features].contiguous()


def _in_whole_blocks(matrix: Tensor) -> Tensor:
    """[N, in] with zeros up to whole blocks: bitsandbytes' C code takes no odd rows, and its stand-in starts torch's compiler."""
    missing = -matrix.shape[1] % NF4_BLOCK
    return torch.nn.functional.pad(matrix, (0, missing)) if missing else matrix
