"""Matrix products with fp32, int8 and int4 weights on torch's fast CPU paths.

Few rows: torch's packed products, which read the small weights directly but cost about the same again for each row, and are
fast with bf16 activations only. Many rows: a slice of the weight at a time is unpacked to a scratch buffer that
stays in the cache, and the dense product runs on it; unpacking is paid once for all rows.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.cpu.int4_layout import BLOCK_ROWS, int4_layout
from engine.ops.interface import Packed
from engine.weights.quantize import INT4_GROUP, quantize_int4, quantize_int8, row_slices

SCHEMES = ("none", "int8", "int4")
PACKED_ROWS = 24  # rows up to which the packed product beats unpacking (measured, M = 1 to 512)
_SCRATCH_ELEMENTS = 1 << 21  # weights unpacked at a time


@cache
def dense_dtype() -> torch.dtype:
    """The dtype for dense products of many rows: bf16 where the CPU multiplies it itself (AMX, AVX-512 BF16), else fp32,
    since emulated bf16 runs at a quarter of fp32's rate."""
    has_native_bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if has_native_bf16 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def pack(weight: Tensor, bias: Tensor | None, scheme: str) -> Packed:
    """Lay ``weight`` [out, in] out for ``linear``. ValueError for an unknown scheme or weights that are not finite."""
    if scheme == "none":
        data: tuple[Tensor, ...] = (weight.float().contiguous(),)
        path = "none: torch dense product, fp32"
    elif scheme == "int8":
        quantized = quantize_int8(weight)
        # torch's kernel takes whole steps of input features and reads past the end of a shorter row.
        values = F.pad(quantized.values, (0, -weight.shape[1] % INT4_GROUP))
        data = (values, quantized.scales.bfloat16())
        path = "int8: torch packed product, bf16 activations"
    elif scheme == "int4":
        data = _pack_int4(weight)
        path = "int4: torch packed product, bf16 activations"
    else:
        raise ValueError(f"There is no weight scheme {scheme!r}. Choose one of: {', '.join(SCHEMES)}.")
    if bias is not None:
        bias = bias.to(torch.float32 if scheme == "none" else torch.bfloat16)
    num_bytes = sum(tensor.nbytes for tensor in data) + (0 if bias is None else bias.nbytes)
    out_features, in_features = weight.shape
    return Packed(scheme, out_features, in_features, data, bias, num_bytes, path)


def _pack_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed bytes, scales and offsets).

    Packed: uint8 [rows, in / 2] in torch's layout, rows padded to whole blocks and in to whole groups; scales and offsets: bf16
    [in / 32, rows, 2], weight = (value - 8) * scale + offset.
    """
    out_features, in_features = weight.shape
    rows_padded = -(-out_features // BLOCK_ROWS) * BLOCK_ROWS
    in_padded = -(-in_features // INT4_GROUP) * INT4_GROUP
    quantized = quantize_int4(weight)
    packed = torch.zeros(rows_padded, in_padded // 2, dtype=torch.uint8)
    scales = torch.zeros(in_padded // INT4_GROUP, rows_padded, 2, dtype=torch.bfloat16)
    for rows in row_slices(out_features, in_features, BLOCK_ROWS):
        values = quantized.values[rows]
        values = F.pad(values, (0, 0, 0, -values.shape[0] % BLOCK_ROWS))
        bytes_ = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 1)
        packed[rows.start : rows.start + values.shape[0]] = bytes_
    scales[:, :out_features, 0] = quantized.scales.T
    scales[:, :out_features, 1] = (quantized.minimums + 8 * quantized.scales).T
    return packed, scales


def unpack(packed: Packed) -> Tensor:
    """The weights that ``packed`` stands for, fp32 [out, in]."""
    if packed.scheme == "none":
        return packed.data[0]
    if packed.scheme == "int8":
        return packed.data[0][:, : packed.in_features] * packed.data[1].float().unsqueeze(1)
    rows_padded = packed.data[0].shape[0]
    columns = torch.empty(packed.data[0].shape[1] * 2, rows_padded)
    bytes_, scales = packed.data
    _unpack_int4_columns(bytes_, scales, columns)
    return columns.T[: packed.out_features, : packed.in_features].contiguous()


def _unpack_int4_columns(packed: Tensor, scales: Tensor, columns: Tensor) -> None:
    """Write the weights of packed [rows, in / 2], scales [in / 32, rows, 2] to columns [in, rows]."""
    int4_layout().write_columns(packed, columns)
    grouped = columns.view(scales.shape[0], -1, columns.shape[1])
    scale = scales[..., 0].to(columns.dtype).unsqueeze(1)
    offset = scales[..., 1].to(columns.dtype).unsqueeze(1) - 8 * scale
    torch.addcmul(offset, grouped, scale, out=grouped)


def embedding_rows(packed: Packed, token_ids: Tensor) -> Tensor:
    """Rows token_ids [T] of the table, without unpacking the rest: fp32 [T, in]."""
    if packed.scheme == "none":
        return packed.data[0].index_select(0, token_ids)
    if packed.scheme == "int8":
        values, scales = packed.data
        rows = values.index_select(0, token_ids)[:, : packed.in_features]
        return rows * scales.index_select(0, token_ids).float().unsqueeze(1)
    bytes_, scales = packed.data
    values = int4_layout().rows(bytes_, token_ids).unflatten(1, (-1, INT4_GROUP))
    scale, offset = scales.index_select(1, token_ids).float().permute(2, 1, 0).unsqueeze(3)
    rows = (values.float() - 8.0) * scale + offset
    return rows.flatten(1)[:, : packed.in_features]


class Products:
    """``linear`` over packed weights, with the scratch buffer its dense paths share.

    active_path: the path the latest product with quantized weights took.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.active_path = ""

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """x [N, in] -> [N, out] in x's dtype, bias added."""
        if packed.scheme == "none":
            return F.linear(x, packed.data[0], packed.bias)
        if x.shape[0] <= PACKED_ROWS:
            self.active_path = packed.path
            out = _packed_int8(x, packed) if packed.scheme == "int8" else _packed_int4(x, packed)
        else:
            self.active_path = f"{packed.scheme}: unpacked for {x.shape[0]} rows, {dtype_name(dense_dtype())} product"
            wide = _padded(x, packed).to(dense_dtype())
            out = self._dense_int8(wide, packed) if packed.scheme == "int8" else self._dense_int4(wide, packed)
        out = out.to(x.dtype)
        return out if packed.bias is None else out.add_(packed.bias)

    def _buffer(self, dtype: torch.dtype, num_elements: int) -> Tensor:
        """Uninitialized, at least ``num_elements``; reused by the next product."""
        buffer = self._scratch.get(dtype)
        if buffer is None or buffer.numel() < num_elements:
            buffer = self._scratch[dtype] = torch.empty(max(num_elements, _SCRATCH_ELEMENTS), dtype=dtype)
        return buffer[:num_elements]

    def _dense_int8(self, x: Tensor, packed: Packed) -> Tensor:
        """int8 values are exact in bf16 and fp32, so the scales can wait for the result."""
        values, scales = packed.data
        out = x.new_empty(x.shape[0], packed.out_features)
        step = max(BLOCK_ROWS, _SCRATCH_ELEMENTS // values.shape[1])
        for start in range(0, packed.out_features, step):
            part = values[start : start + step]
            weight = self._buffer(x.dtype, part.numel()).view(part.shape)
            weight.copy_(part)
            torch.mul(F.linear(x, weight), scales[start : start + step], out=out[:, start : start + step])
        return out

    def _dense_int4(self, x: Tensor, packed: Packed) -> Tensor:
        bytes_, scales = packed.data
        rows_padded, in_padded = bytes_.shape[0], bytes_.shape[1] * 2
        out = x.new_empty(x.shape[0], rows_padded)
        step = max(1, _SCRATCH_ELEMENTS // in_padded // BLOCK_ROWS) * BLOCK_ROWS
        for start in range(0, rows_padded, step):
            rows = slice(start, min(start + step, rows_padded))
            columns = self._buffer(x.dtype, (rows.stop - start) * in_padded).view(in_padded, -1)
            _unpack_int4_columns(bytes_[rows], scales[:, rows], columns)
            torch.mm(x, columns, out=out[:, rows])
        return out[:, : packed.out_features]


def _packed_int8(x: Tensor, packed: Packed) -> Tensor:
    return torch._weight_int8pack_mm(_padded(x.bfloat16(), packed), packed.data[0], packed.data[1])


def _packed_int4(x: Tensor, packed: Packed) -> Tensor:
    bytes_, scales = packed.data
    x = _padded(x.bfloat16(), packed)
    out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, bytes_, INT4_GROUP, scales)
    return out if bytes_.shape[0] == packed.out_features else out[:, : packed.out_features]


def _padded(x: Tensor, packed: Packed) -> Tensor:
    """x [N, in] with zeros up to whole groups of input features, as the weights were padded."""
    missing = -packed.in_features % INT4_GROUP
    return F.pad(x, (0, missing)) if missing else x
