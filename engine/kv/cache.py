"""The KV cache's tensors. Allocated with zeros: a slot never written must not hold NaN (0 x NaN spreads)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.spec import ModelSpec


class KvCache:
    """Keys and values of every page, per layer: [num_pages, page_size, kv_heads, head_dim].

    Token-major inside a page, so that a run of neighbouring pages is one view of consecutive tokens.
    Page 0 is never handed out; padding reads and writes go there.
    """

    def __init__(
        self, spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype = dtype
        shape = (spec.num_layers, 2, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self._data]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._layers[index]

    @property
    def num_bytes(self) -> int:
        return self._data.numel() * self._data.element_size()

    @staticmethod
    def page_bytes(spec: ModelSpec, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page, K and V, all layers."""
        return spec.kv_bytes_per_token(dtype.itemsize) * page_size
