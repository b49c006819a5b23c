"""How many bytes a token's keys and values take, by the switches that decide it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.model.spec import ModelSpec

SCALE_BYTES = 2  # fp16; a scale per head and token, under int4 a minimum beside it
NUM_SINKS = 4  # first tokens that a user's window never drops (StreamingLLM, Xiao 2023)

DENSE_LAYERS = 2  # first layers, whose attention is spread too evenly to leave pages out (sparse attention)


def reason_against(kv_dtype: str, head_dim: int) -> str | None:
    """Why no head of this size can be kept as ``kv_dtype``; None when it can."""
    if kv_dtype == "int4" and head_dim % 4:
        return f"int4 needs heads whose size is a multiple of 4; here it is {head_dim}. Choose int8."
    return None


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One token's keys and values in one model.

    kv_dtype: the switch: "native" (element_bytes each), "int8" or "int4".
    num_heads: heads stored per layer: the KV heads, or all query heads when sharing (GQA) is off.
    """

    kv_dtype: str
    num_layers: int
    num_heads: int
    head_dim: int
    element_bytes: int

    @staticmethod
    def of(spec: ModelSpec, options: Mapping[str, str], element_bytes: int) -> KvLayout:
        """The layout for the ``kv_dtype`` and ``gqa`` switches; those not given are at "native" and "on"."""
        heads = spec.num_heads if options.get("gqa") == "off" else spec.num_kv_heads
        return KvLayout(options.get("kv_dtype", "native"), spec.num_layers, heads, spec.head_dim, element_bytes)

    @property
    def key_bytes(self) -> int:
        """One head's key of one token, its scale included; under int4 keys have 6 bits (codec.py says why)."""
        return 6 * self.head_dim // 8 + 2 * SCALE_BYTES if self.kv_dtype == "int4" else self.value_bytes

    @property
    def value_bytes(self) -> int:
        """One head's value of one token, its scale included."""
        match self.kv_dtype:
            case "int8":
                return self.head_dim + SCALE_BYTES
            case "int4":
                return self.head_dim // 2 + 2 * SCALE_BYTES
            case _:
                return self.head_dim * self.element_bytes

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return self.num_heads * (self.key_bytes + self.value_bytes)

    @property
    def page_bound_bytes(self) -> int:
        """Least and largest key of one page in one layer, fp32 (sparse attention keeps and reads them)."""
        return 2 * 4 * self.num_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all layers."""
        return self.num_layers * self.layer_token_bytes

    def page_bytes(self, page_size: int, with_bounds: bool = False) -> int:
        """K and V of one page of ``page_size`` tokens, all layers; with the key bounds that sparse attention keeps of it."""
        bounds = max(0, self.num_layers - DENSE_LAYERS) * self.page_bound_bytes if with_bounds else 0
        return self.token_bytes * page_size + bounds
