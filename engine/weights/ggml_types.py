"""The ggml storage types: names, block sizes, and turning blocks back into numbers. Imports no torch.

gguf.quants (the ggml project's own Python package) holds the arithmetic of every type it can decode.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Block(NamedTuple):
    """A ggml type packs ``elements`` consecutive weights of a row into ``bytes`` bytes."""

    name: str
    elements: int
    bytes: int


@cache
def block_of(ggml_type: int) -> Block | None:
    """The block of a type by its number in the file; None for a number nobody knows."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if ggml_type not in {int(known) for known in GGML_QUANT_SIZES}:
        return None
    known = GGMLQuantizationType(ggml_type)
    elements, num_bytes = GGML_QUANT_SIZES[known]
    return Block(known.name, elements, num_bytes)


@cache
def can_dequantize(ggml_type: int) -> bool:
    """Whether ``dequantize_rows`` knows this type (found out with one block of zeros)."""
    block = block_of(ggml_type)
    if block is None:
        return False
    try:
        dequantize_rows(np.zeros((1, block.bytes), dtype=np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def dequantize_rows(rows: NDArray[np.uint8], ggml_type: int) -> NDArray[np.float32]:
    """Blocks [rows, row_bytes] -> weights fp32 [rows, row_elements]; NotImplementedError for a type without a decoder."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a damaged scale may overflow; the caller checks that results are finite
        values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType(ggml_type))
    return values


@cache
def file_type_name(file_type: int) -> str | None:
    """general.file_type as people say it: 15 -> "Q4_K_M"; None when unknown."""
    from gguf.constants import LlamaFileType

    if file_type not in {int(known) for known in LlamaFileType}:
        return None
    name = LlamaFileType(file_type).name
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
