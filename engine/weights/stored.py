"""A matrix as a GGUF file stores it: stretches of rows, each in one of ggml's block formats."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# What a kernel can compute on without rounding anything anew: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K.
KEPT_TYPES = frozenset((2, 3, 6, 7, 8, 12, 13, 14))
# Scheme -> the types that lie in its form as they are; rounding them to it a second time would only lose.
TYPES_OF_SCHEME = {"as_stored": KEPT_TYPES, "int4": frozenset((2, 3, 12)), "int8": frozenset((8,))}


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Some rows of a matrix with ``in_features`` columns.

    blocks: uint8 [rows, bytes of a row], contiguous. type_name: of ``ggml_type``, e.g. "Q4_1".
    """

    ggml_type: int
    type_name: str
    in_features: int
    blocks: Tensor

    @property
    def num_rows(self) -> int:
        return self.blocks.shape[0]
