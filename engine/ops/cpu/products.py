"""Matrix products with fp32, int8 and int4 weights: the C kernels where they are, else torch's fast CPU paths by the number of rows.

one or a few    torch's packed product: it reads the small weights directly, but each row costs nearly as much again,
                and it is fast with bf16 activations only
a batch         where the CPU multiplies bf16 itself and memory is plentiful: the dense bf16 product on an unpacked copy,
                which is made once batches of this size keep coming, and kept; elsewhere as above
many            the kept copy if there is one; else a slice of the weight at a time is unpacked into a scratch buffer
                that stays in the cache: unpacking is paid once for all rows
"""

from __future__ import annotations

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.cpu import bitsandbytes_products
from engine.ops.cpu.bitsandbytes_products import BitsAndBytesPacked
from engine.ops.cpu.dense_dtype import dense_dtype, dtype_name
from engine.ops.cpu.int4_layout import BLOCK_ROWS
from engine.ops.cpu.native import linear as native_linear
from engine.ops.cpu.native.linear import NativePacked
from engine.ops.cpu.packing import CpuPacked, unpack_int4_columns
from engine.ops.interface import Packed
from engine.weights.quantize import INT4_GROUP, INT4_GROUPS

# Rows from which another path is faster, measured for M = 1 to 512 on SmolLM2's shapes.
BATCH_ROWS = 6  # a kept bf16 copy beats the packed product
LARGEST_BATCH_ROWS = 64  # more rows than this are a prompt, not a batch of chats
SCRATCH_ROWS = {torch.bfloat16: 20, torch.float32: 48}  # unpacking for this one product beats the packed product

_SHARE_LEFT_AVAILABLE = 0.5  # of the machine's memory, after keeping copies
_SCRATCH_ELEMENTS = 1 << 21  # weights unpacked at a time


class Products:
    """``linear`` over packed weights, with the scratch buffer its dense paths share.

    active_path: the path the latest product took.
    """

    def __init__(self) -> None:
        self._dtype = dense_dtype()
        self._scratch = torch.empty(0, dtype=self._dtype)
        self._scratch_rows = SCRATCH_ROWS[self._dtype]
        self._may_keep = self._dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
        self.active_path = ""

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
        """x [N, in] -> [N, out], bias (and residual) added; in x's dtype, or fp32 from the C kernels."""
        if isinstance(packed, NativePacked):
            self.active_path = packed.path
            return native_linear.linear(x, packed, residual)
        if isinstance(packed, BitsAndBytesPacked):
            self.active_path = packed.path
            out = bitsandbytes_products.linear(x, packed)
            return out if residual is None else residual + out
        out = self._torch_linear(x, packed)
        return out if residual is None else residual + out

    def _torch_linear(self, x: Tensor, packed: Packed) -> Tensor:
        if packed.scheme == "none":
            self.active_path = packed.path
            return F.linear(x, packed.data[0], packed.bias)
        num_rows = x.shape[0]
        if num_rows >= BATCH_ROWS and self._is_dense(num_rows, packed):
            out = self._dense(x, packed)
        else:
            self.active_path = packed.path
            out = _packed_product(x, packed)
        if out.dtype != x.dtype:
            out = out.to(x.dtype)
        return out if packed.bias is None else out.add_(packed.bias)

    def _is_dense(self, num_rows: int, packed: Packed) -> bool:
        """Whether the dense product is the faster one; keeps a copy of the weight when batches make it worth while."""
        assert isinstance(packed, CpuPacked)
        unpacked = packed.unpacked
        if unpacked.weight is None and self._may_keep and num_rows <= LARGEST_BATCH_ROWS:
            unpacked.batches_left -= 1
            if unpacked.batches_left < 0:
                self._keep(packed)
        return unpacked.weight is not None or num_rows >= self._scratch_rows

    def _keep(self, packed: CpuPacked) -> None:
        """Unpack a matrix for good, unless memory is short: then no further copies are made."""
        rows_padded, in_padded = _padded_shape(packed)
        memory = psutil.virtual_memory()
        num_bytes = rows_padded * in_padded * self._dtype.itemsize
        if memory.available - num_bytes < _SHARE_LEFT_AVAILABLE * memory.total:
            self._may_keep = False
            return
        weight = torch.empty(rows_padded, in_padded, dtype=self._dtype)
        for rows in _slices(packed):
            self._unpack(packed, rows, weight[rows].T)
        if packed.scheme == "int8":
            weight.mul_(packed.data[1].unsqueeze(1))
        weight = weight[: packed.out_features, : packed.in_features].contiguous()
        # In oneDNN's own order the product needs no packing at each call: a third faster at 8 rows.
        packed.unpacked.weight = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH_ROWS)

    def _kept_product(self, x: Tensor, packed: CpuPacked) -> Tensor:
        """x [N, in] -> bf16 [N, out] with the kept copy."""
        self.active_path = f"{packed.scheme}: bf16 copy kept for batches, oneDNN product of {x.shape[0]} rows"
        return torch.ops.mkldnn._linear_pointwise(x.to(self._dtype), packed.unpacked.weight, None, "none", [], "")

    def _dense(self, x: Tensor, packed: Packed) -> Tensor:
        """x [N, in] -> [N, out] in the dense dtype."""
        if isinstance(packed, CpuPacked) and packed.unpacked.weight is not None:
            return self._kept_product(x, packed)
        self.active_path = f"{packed.scheme}: unpacked for {x.shape[0]} rows, dense {dtype_name(self._dtype)} product"
        x = _padded(x.to(self._dtype), packed)
        out = x.new_empty(x.shape[0], _padded_shape(packed)[0])
        for rows in _slices(packed):
            columns = _columns(self._buffer((rows.stop - rows.start) * x.shape[1]), packed)
            self._unpack(packed, rows, columns)
            torch.mm(x, columns, out=out[:, rows])
        if packed.scheme == "int8":
            out.mul_(packed.data[1])
        return out[:, : packed.out_features]

    def _unpack(self, packed: Packed, rows: slice, columns: Tensor) -> None:
        """Write the weights of some rows to columns [in, rows]. int8 is exact in bf16: its scales wait for the product."""
        if packed.scheme == "int8":
            columns.copy_(packed.data[0][rows].T)
        else:
            unpack_int4_columns(packed.data[0][rows], packed.data[1][:, rows], columns)

    def _buffer(self, num_elements: int) -> Tensor:
        """Scratch, uninitialized; reused by the next product."""
        if self._scratch.numel() < num_elements:
            self._scratch = torch.empty(max(num_elements, _SCRATCH_ELEMENTS), dtype=self._dtype)
        return self._scratch[:num_elements]


def _packed_product(x: Tensor, packed: Packed) -> Tensor:
    """x [N, in] -> bf16 [N, out]."""
    weight, scales = packed.data
    x = _padded(x.bfloat16(), packed)
    if packed.scheme == "int8":
        return torch._weight_int8pack_mm(x, weight, scales)
    out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, INT4_GROUPS[packed.scheme], scales)
    return out if weight.shape[0] == packed.out_features else out[:, : packed.out_features]


def _padded(x: Tensor, packed: Packed) -> Tensor:
    """x [N, in] with zeros up to whole groups of input features, as the weights were padded."""
    missing = -packed.in_features % INT4_GROUPS.get(packed.scheme, INT4_GROUP)
    return F.pad(x, (0, missing)) if missing else x


def _padded_shape(packed: Packed) -> tuple[int, int]:
    """Rows and input features of the weights as kept."""
    rows, width = packed.data[0].shape
    return rows, width if packed.scheme == "int8" else 2 * width


def _columns(buffer: Tensor, packed: Packed) -> Tensor:
    """``buffer`` as [in, rows], in the order in which the packed weights can be written without transposing them."""
    in_features = _padded_shape(packed)[1]
    return buffer.view(-1, in_features).T if packed.scheme == "int8" else buffer.view(in_features, -1)


def _slices(packed: Packed) -> list[slice]:
    """Rows to unpack at a time, whole blocks of the int4 layout each."""
    rows, in_features = _padded_shape(packed)
    step = max(1, _SCRATCH_ELEMENTS // in_features // BLOCK_ROWS) * BLOCK_ROWS
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
