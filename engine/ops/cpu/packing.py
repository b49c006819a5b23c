"""How the CPU backend keeps weights: fp32 as they are, int8 and int4 as the C kernels or torch's packed products read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.cpu import bitsandbytes_products
from engine.ops.cpu.bitsandbytes_products import BitsAndBytesPacked
from engine.ops.cpu.dense_dtype import dense_dtype
from engine.ops.cpu.int4_layout import BLOCK_ROWS, int4_layout
from engine.ops.cpu.native import linear as native_linear
from engine.ops.cpu.native.linear import NativePacked
from engine.ops.interface import Packed
from engine.weights.quantize import INT4_GROUP, INT4_GROUPS, quantize_int4, quantize_int8, row_slices

SCHEMES = ("none", "int8", *INT4_GROUPS, *bitsandbytes_products.SCHEMES)
_BATCHES_BEFORE_KEEPING = 4  # one short prompt is no reason to spend memory
_STEPS_TO_KEEP_ALL = 16
_serial = count()


@dataclass(slots=True)
class Unpacked:
    """What batches keep of a matrix: ``weight`` as its dense product reads it, once enough batches came by.

    batches_left: how many more must come. It differs from matrix to matrix, so that no single step unpacks them all.
    """

    weight: Tensor | None = None
    batches_left: int = field(default_factory=lambda: _BATCHES_BEFORE_KEEPING + next(_serial) % _STEPS_TO_KEEP_ALL)


@dataclass(frozen=True, slots=True)
class CpuPacked(Packed):
    """``Packed`` with room for an unpacked copy; see ``products.Products``."""

    unpacked: Unpacked = field(default_factory=Unpacked, compare=False, repr=False)

    @property
    def copy_bytes(self) -> int:
        weight = self.unpacked.weight
        return 0 if weight is None else weight.numel() * weight.element_size()


def pack(weight: Tensor, bias: Tensor | None, scheme: str, use_native: bool, sensitive: bool = False) -> Packed:
    """Lay ``weight`` [out, in] out for ``linear``. ValueError for an unknown scheme or weights that are not finite."""
    if use_native and scheme in native_linear.SCHEMES:
        return native_linear.pack(weight, bias, scheme, sensitive)
    if scheme in bitsandbytes_products.SCHEMES:
        return bitsandbytes_products.pack(weight, bias, scheme, dense_dtype())
    if scheme == "none":
        data: tuple[Tensor, ...] = (weight.float().contiguous(),)
        path = "none: torch dense product, fp32"
    elif scheme == "int8":
        quantized = quantize_int8(weight)
        # torch's kernel takes whole steps of input features and reads past the end of a shorter row.
        values = F.pad(quantized.values, (0, -weight.shape[1] % INT4_GROUP))
        data = (values, quantized.scales.bfloat16())
        path = "int8: torch packed product, bf16 activations"
    elif scheme in INT4_GROUPS:
        data = _pack_int4(weight, INT4_GROUPS[scheme])
        path = f"{scheme}: torch packed product, bf16 activations"
    else:
        raise ValueError(f"There is no weight scheme {scheme!r}. Choose one of: {', '.join(SCHEMES)}.")
    if bias is not None:
        bias = bias.to(torch.float32 if scheme == "none" else torch.bfloat16)
    num_bytes = sum(tensor.nbytes for tensor in data) + (0 if bias is None else bias.nbytes)
    out_features, in_features = weight.shape
    return CpuPacked(scheme, out_features, in_features, data, bias, num_bytes, path)


def _pack_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(packed bytes, scales and offsets).

    Packed: uint8 [rows, in / 2] in torch's layout, rows padded to whole blocks and in to whole groups; scales and offsets: bf16
    [in / group, rows, 2], weight = (value - 8) * scale + offset.
    """
    out_features, in_features = weight.shape
    rows_padded = -(-out_features // BLOCK_ROWS) * BLOCK_ROWS
    in_padded = -(-in_features // group) * group
    quantized = quantize_int4(weight, group)
    packed = torch.zeros(rows_padded, in_padded // 2, dtype=torch.uint8)
    scales = torch.zeros(in_padded // group, rows_padded, 2, dtype=torch.bfloat16)
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
    if isinstance(packed, NativePacked):
        return native_linear.unpack(packed)
    if isinstance(packed, BitsAndBytesPacked):
        return bitsandbytes_products.unpack(packed)
    if packed.scheme == "none":
        return packed.data[0]
    if packed.scheme == "int8":
        return packed.data[0][:, : packed.in_features] * packed.data[1].float().unsqueeze(1)
    rows_padded = packed.data[0].shape[0]
    columns = torch.empty(packed.data[0].shape[1] * 2, rows_padded)
    bytes_, scales = packed.data
    unpack_int4_columns(bytes_, scales, columns)
    return columns.T[: packed.out_features, : packed.in_features].contiguous()


def unpack_int4_columns(packed: Tensor, scales: Tensor, columns: Tensor) -> None:
    """Write the weights of packed [rows, in / 2], scales [in / group, rows, 2] to columns [in, rows].

    The values are centred before they are scaled: the offset from the group's middle is small, so that bf16 rounds it by
    little; the offset from its smallest value would be rounded by a per cent of a step, the same for all its weights.
    """
    int4_layout().write_columns(packed, columns)
    grouped = columns.view(scales.shape[0], -1, columns.shape[1])
    scale = scales[..., 0].to(columns.dtype).unsqueeze(1)
    offset = scales[..., 1].to(columns.dtype).unsqueeze(1)
    torch.addcmul(offset, grouped, scale, out=grouped)


def embedding_rows(packed: Packed, token_ids: Tensor) -> Tensor:
    """Rows token_ids [T] of the table, without unpacking the rest: fp32 [T, in]."""
    if isinstance(packed, NativePacked):
        return native_linear.rows(packed, token_ids)
    if isinstance(packed, BitsAndBytesPacked):
        return bitsandbytes_products.rows(packed, token_ids)
    if packed.scheme == "none":
        return packed.data[0].index_select(0, token_ids)
    if packed.scheme == "int8":
        values, scales = packed.data
        rows = values.index_select(0, token_ids)[:, : packed.in_features]
        return rows * scales.index_select(0, token_ids).float().unsqueeze(1)
    bytes_, scales = packed.data
    values = int4_layout().rows(bytes_, token_ids).unflatten(1, (scales.shape[0], -1))
    scale, offset = scales.index_select(1, token_ids).float().permute(2, 1, 0).unsqueeze(3)
    rows = (values.float() - 8.0) * scale + offset
    return rows.flatten(1)[:, : packed.in_features]
