"""CpuOps: the fast backend for CPUs: the C kernels where they could be built, else torch's own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.ops import reference
from engine.ops.cpu import bitsandbytes_products, native, packing
from engine.ops.cpu.attention import PagedAttention
from engine.ops.cpu.dense_dtype import dense_dtype, dtype_name
from engine.ops.cpu.native import kernels
from engine.ops.cpu.native import stored as native_stored
from engine.ops.cpu.native.layers import NativeLayers
from engine.ops.cpu.native.linear import NativePacked, for_logits
from engine.ops.cpu.pointwise import Norms, Rotations, gated_mlp_activation
from engine.ops.cpu.products import Products
from engine.ops.cpu.sinks import SinkAttention
from engine.ops.interface import AttentionParams, Packed, Span

if TYPE_CHECKING:
    from engine.model.decoder import DecoderWeights
    from engine.model.spec import ModelSpec
    from engine.weights.stored import StoredRows

NUM_REFINED = 32  # logits per row that the head computes exactly


class CpuOps:
    """``Ops`` on the C kernels where there are any, and torch's packed products and fused attention elsewhere.

    Between products the C kernels take fp32; other activations run on torch.

    fused: False runs norms, rotation and activation as the reference's plain steps (the ``fused_ops`` switch), and attention too
    (see ``with_attention``); the products stay the same.
    use_native: False keeps the C kernels out; None asks whether they are there.
    """

    name = "cpu"

    def __init__(self, fused: bool = True, use_native: bool | None = None) -> None:
        self.fused = fused
        self.fused_attention = fused
        self.use_native = native.is_available() if use_native is None else use_native
        if self.use_native:
            native.set_threads(torch.get_num_threads())
        self._products = Products()
        self._attention = PagedAttention()
        self._native_attention = kernels.PagedAttention()
        self._sink_attention = SinkAttention()
        self._norm = Norms()
        self._head_path = ""
        self._rotate = Rotations()

    def with_attention(self, fused: bool) -> CpuOps:
        if fused == self.fused_attention:
            return self
        other = copy.copy(self)
        other.fused_attention = fused
        return other

    def activation_dtype(self, scheme: str) -> torch.dtype:
        """fp32, but bf16 for torch's packed products, which are slow with anything else."""
        is_torch_packed = scheme != "none" and scheme not in bitsandbytes_products.SCHEMES
        return torch.bfloat16 if is_torch_packed and not self.use_native else torch.float32

    def product_dtype(self, scheme: str) -> str:
        """int8 in the C kernels and LLM.int8, whose activations are rounded to it; else the dtype they have in the product."""
        if scheme == "none":
            return "fp32"
        if scheme == "nf4":
            return dtype_name(dense_dtype())
        if scheme == "llm_int8":
            return "int8"
        return "int8" if self.use_native else "bf16"

    def kv_dtype(self, scheme: str) -> torch.dtype:
        """bf16 beside packed weights: half the bytes, and no rounding that such weights would notice. fp32 beside dense products,
        whose keys and values torch writes as they are."""
        is_dense = scheme == "none" or scheme in bitsandbytes_products.SCHEMES
        return torch.float32 if is_dense else torch.bfloat16

    def active_paths(self) -> dict[str, str]:
        """The paths the latest step took: the layers' products, the head's, attention."""
        return {
            "products": self._products.active_path,
            "head": self._head_path,
            "attention": self._attention.last_path if self.fused_attention else "torch reference attention",
        }

    def compile_layers(self, spec: ModelSpec, weights: DecoderWeights) -> NativeLayers | None:
        if self.fused and self.fused_attention and self.use_native and NativeLayers.can_run(spec, weights):
            return NativeLayers(spec, weights)
        return None

    def _is_native(self, x: Tensor) -> bool:
        """Whether a C kernel takes these activations."""
        return self.use_native and self.fused and x.dtype == torch.float32

    def pack(self, weight: Tensor, bias: Tensor | None, scheme: str, sensitive: bool = False) -> Packed:
        return packing.pack(weight, bias, scheme, self.use_native, sensitive)

    def for_logits(self, packed: Packed) -> Packed:
        return for_logits(packed) if isinstance(packed, NativePacked) else packed

    @property
    def can_keep_stored(self) -> bool:
        return self.use_native

    def pack_stored(
        self, stored: Sequence[StoredRows], bias: Tensor | None, scheme: str, sensitive: bool = False
    ) -> Packed:
        assert self.can_keep_stored
        return native_stored.pack(stored, bias, scheme, sensitive)

    def unpack(self, packed: Packed) -> Tensor:
        return packing.unpack(packed)

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
        return self._products.linear(x, packed, residual)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._is_native(x):
            return kernels.rms_norm(x.contiguous(), weight, eps)
        if not self.fused:
            return reference.rms_norm(x, weight, eps)
        return self._norm(x, weight, eps)

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
        if self._is_native(qkv) and keys.shape[3] <= kernels.LARGEST_HEAD_DIM:
            return kernels.rope_and_write_kv(qkv, cos, sin, q_norm, k_norm, eps, keys, values, slots)
        if not self.fused:
            return reference.rope_and_write_kv(qkv, cos, sin, q_norm, k_norm, eps, keys, values, slots)
        num_kv_heads, head_dim = keys.shape[2:]
        num_rows, kv_size = qkv.shape[0], num_kv_heads * head_dim
        heads = qkv.view(num_rows, -1, head_dim)
        num_q_heads = heads.shape[1] - 2 * num_kv_heads
        turned = heads[:, :-num_kv_heads]
        if q_norm is not None and k_norm is not None:
            q, k = turned.split((num_q_heads, num_kv_heads), dim=1)
            turned = torch.cat((self._norm(q, q_norm, eps), self._norm(k, k_norm, eps)), dim=1)
        if cos is not None and sin is not None:
            turned = self._rotate(turned, cos, sin)
        q, k = turned.split((num_q_heads, num_kv_heads), dim=1)
        keys.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, k)
        values.view(-1, kv_size).index_copy_(0, slots, qkv[:, -kv_size:])
        return q

    def paged_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], params: AttentionParams
    ) -> Tensor:
        if self.use_native and self.fused_attention and q.dtype == torch.float32:
            self._attention.last_path = kernels.attention_path()
            return self._native_attention(q.contiguous(), keys, values, spans, params, sink_tokens=params.sinks)
        # torch's fused attention knows no score cap (Gemma 2): those layers run as plain steps.
        if not self.fused_attention or params.softcap is not None:
            self._attention.last_path = "torch reference attention (scores are capped)"
            return reference.paged_attention(q, keys, values, spans, params)
        if params.sinks:
            self._attention.last_path = self._sink_attention.path
            return self._sink_attention(q, keys, values, spans, params)
        return self._attention(q, keys, values, spans, params)

    def gated_mlp_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        if self._is_native(gate_up):
            return kernels.gated_mlp_activation(gate_up, activation)
        if not self.fused:
            return reference.gated_mlp_activation(gate_up, activation)
        return gated_mlp_activation(gate_up, activation)

    def embed(self, packed: Packed, token_ids: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
        return reference.scaled_rows(packing.embedding_rows(packed, token_ids), scale, out_dtype)

    def head(self, x: Tensor, packed: Packed, softcap: float | None) -> Tensor:
        layers_path = self._products.active_path
        logits = self._products.linear(x, packed).float()
        self._head_path, self._products.active_path = self._products.active_path, layers_path
        if packed.scheme != "none" and not isinstance(packed, NativePacked):  # those answer in fp32
            _refine_likeliest(logits, x, packed)
        return reference.soft_cap(logits, softcap)


def _refine_likeliest(logits: Tensor, x: Tensor, packed: Packed) -> None:
    """Compute the largest logits of each row again in fp32, in place.

    The packed products answer in bf16, which cannot tell 16.00 from 16.06: it would decide between close candidates by
    rounding. Which tokens are candidates it tells well enough; their few rows of the head are cheap to multiply exactly.
    logits: fp32 [R, vocab]; x: [R, hidden].
    """
    likeliest = logits.topk(min(NUM_REFINED, logits.shape[1]), dim=1, sorted=False).indices
    rows = packing.embedding_rows(packed, likeliest.flatten()).view(*likeliest.shape, -1)
    exact = torch.bmm(rows, x.float().unsqueeze(2)).squeeze(2)
    if packed.bias is not None:
        exact += packed.bias[likeliest].float()
    logits.scatter_(1, likeliest, exact)
