"""CpuOps: the fast backend for CPUs, made of torch's own kernels (no compiler needed)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.ops import reference
from engine.ops.cpu import products
from engine.ops.cpu.attention import PagedAttention
from engine.ops.cpu.pointwise import gated_mlp_activation, rms_norm, rope_and_write_kv
from engine.ops.interface import AttentionParams, Packed, Span


class CpuOps:
    """``Ops`` on torch's packed and dense products and its fused attention.

    fused: False runs norms, rotation, activation and attention as the reference's plain steps (the ``fused_ops`` switch);
    the products stay the same.
    """

    name = "cpu"

    def __init__(self, fused: bool = True) -> None:
        self.fused = fused
        self._products = products.Products()
        self._attention = PagedAttention()

    def activation_dtype(self, scheme: str) -> torch.dtype:
        """fp32 with full weights; bf16 with packed ones, since torch's packed products are slow with anything else."""
        return torch.float32 if scheme == "none" else torch.bfloat16

    def active_paths(self) -> dict[str, str]:
        """The paths the latest step took: products with quantized weights, attention."""
        return {
            "products": self._products.active_path,
            "attention": self._attention.last_path if self.fused else "torch reference attention",
        }

    def pack(self, weight: Tensor, bias: Tensor | None, scheme: str) -> Packed:
        return products.pack(weight, bias, scheme)

    def unpack(self, packed: Packed) -> Tensor:
        return products.unpack(packed)

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
        out = self._products.linear(x, packed)
        return out if residual is None else out.add_(residual)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not self.fused:
            return reference.rms_norm(x, weight, eps)
        return rms_norm(x, weight, eps)

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> Tensor:
        run = rope_and_write_kv if self.fused else reference.rope_and_write_kv
        return run(qkv, cos, sin, q_norm, k_norm, eps, keys, values, slots)

    def paged_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], params: AttentionParams
    ) -> Tensor:
        # torch's fused attention knows no score cap (Gemma 2): those layers run as plain steps.
        if not self.fused or params.softcap is not None:
            return reference.paged_attention(q, keys, values, spans, params)
        return self._attention(q, keys, values, spans, params)

    def gated_mlp_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        if not self.fused:
            return reference.gated_mlp_activation(gate_up, activation)
        return gated_mlp_activation(gate_up, activation)

    def embed(self, packed: Packed, token_ids: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
        return reference.scaled_rows(products.embedding_rows(packed, token_ids), scale, out_dtype)

    def head(self, x: Tensor, packed: Packed, softcap: float | None) -> Tensor:
        return reference.soft_cap(self._products.linear(x, packed).float(), softcap)
