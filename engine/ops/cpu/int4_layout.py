"""The byte layout of torch's packed int4 weights on this CPU, so that rows can be read back without a second copy.

``_convert_weight_to_int4pack_for_cpu`` cuts the rows into blocks whose size depends on the vector unit (64 with AVX-512,
32 with AVX2) and writes, for each input feature of a block, one byte for two rows. torch does not document the pairing,
so it is found by packing a known matrix and recognising it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK_ROWS = 64  # rows are padded to this, a multiple of every layout's block


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """Rows of a block of ``block`` rows share bytes: row r with row r + block / 2, or, if ``adjacent``, 2r with 2r + 1.

    The first row of a pair is in the low four bits.
    """

    block: int
    adjacent: bool

    def blocks(self, packed: Tensor) -> Tensor:
        """The packed bytes of whole blocks of rows, [rows, in / 2], as a view [rows / block, in, block / 2]."""
        return packed.view(packed.shape[0] // self.block, -1, self.block // 2)

    def write_columns(self, packed: Tensor, columns: Tensor) -> None:
        """Write the values of ``packed`` [rows, in / 2], less 8 (so -8..7), to ``columns`` [in, rows], any dtype, transposed."""
        bytes_ = self.blocks(packed)
        num_blocks, in_features, half = bytes_.shape
        if self.adjacent:
            pairs = columns.view(in_features, num_blocks, half, 2)
            low, high = pairs[..., 0], pairs[..., 1]
        else:
            pairs = columns.view(in_features, num_blocks, 2, half)
            low, high = pairs[:, :, 0], pairs[:, :, 1]
        low.transpose(0, 1).copy_(bytes_.bitwise_and(15).view(torch.int8).sub_(8))
        high.transpose(0, 1).copy_(bytes_.bitwise_right_shift(4).view(torch.int8).sub_(8))

    def rows(self, packed: Tensor, indices: Tensor) -> Tensor:
        """The values 0..15 of some rows: indices [T] -> uint8 [T, in]."""
        place = indices % self.block
        half = self.block // 2
        if self.adjacent:
            column, is_high = place // 2, place % 2
        else:
            column, is_high = place % half, place // half
        bytes_ = self.blocks(packed)[indices // self.block, :, column]
        return (bytes_ >> (4 * is_high.to(torch.uint8)).unsqueeze(1)) & 15


@cache
def int4_layout() -> Int4Layout:
    """The layout torch uses on this CPU; RuntimeError when it is none of those known."""
    in_features = 32
    values = torch.arange(BLOCK_ROWS * in_features).mul_(40503).bitwise_right_shift_(7).bitwise_and_(15)
    values = values.view(BLOCK_ROWS, in_features)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 1)
    columns = torch.empty(in_features, BLOCK_ROWS, dtype=torch.int8)
    for layout in (Int4Layout(64, False), Int4Layout(32, False), Int4Layout(64, True), Int4Layout(32, True)):
        layout.write_columns(packed, columns)
        if torch.equal(columns.T.long() + 8, values):
            return layout
    raise RuntimeError(
        "torch packs int4 weights in a layout unknown to this version of Ridgeline; choose weights=int8."
    )
