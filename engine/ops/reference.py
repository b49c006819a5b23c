"""ReferenceOps: every operation of ``ops/interface.py`` in plain torch steps. The truth other backends are tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.interface import AttentionParams, Packed, Span
from engine.weights.quantize import (
    INT4_GROUPS,
    Int4Weight,
    Int8Weight,
    dequantize_int4,
    dequantize_int8,
    quantize_int4,
    quantize_int8,
)

if TYPE_CHECKING:
    from engine.model.decoder import DecoderWeights
    from engine.model.spec import ModelSpec
    from engine.weights.stored import StoredRows


class ReferenceOps:
    """Plain torch on any device; sums in fp32 whatever the activations' dtype."""

    name = "reference"
    can_keep_stored = False

    def with_attention(self, fused: bool) -> ReferenceOps:
        return self

    def active_paths(self) -> dict[str, str]:
        return {"attention": "torch reference attention"}

    def activation_dtype(self, scheme: str) -> torch.dtype:
        return torch.float32

    def product_dtype(self, scheme: str) -> str:
        return "fp32"

    def kv_dtype(self, scheme: str) -> torch.dtype:
        return torch.float32

    def compile_layers(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        """There are but the single operations."""

    def pack(self, weight: Tensor, bias: Tensor | None, scheme: str, sensitive: bool = False) -> Packed:
        """ValueError for a scheme that is none of "none", "int8" and the int4 ones."""
        return pack_reference(weight, bias, scheme)

    def for_logits(self, packed: Packed) -> Packed:
        return packed

    def pack_stored(
        self, stored: Sequence[StoredRows], bias: Tensor | None, scheme: str, sensitive: bool = False
    ) -> Packed:
        raise AssertionError("the reference keeps weights as plain numbers")

    def unpack(self, packed: Packed) -> Tensor:
        return unpack_reference(packed)

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
        out = functional.linear(x.float(), self.unpack(packed), packed.bias)
        if residual is not None:
            out = out + residual
        return out.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
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
        return rope_and_write_kv(qkv, cos, sin, q_norm, k_norm, eps, keys, values, slots)

    def paged_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], params: AttentionParams
    ) -> Tensor:
        return paged_attention(q, keys, values, spans, params)

    def gated_mlp_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        return gated_mlp_activation(gate_up, activation)

    def embed(self, packed: Packed, token_ids: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
        return scaled_rows(self.unpack(packed).index_select(0, token_ids), scale, out_dtype)

    def head(self, x: Tensor, packed: Packed, softcap: float | None) -> Tensor:
        logits = functional.linear(x.float(), self.unpack(packed), packed.bias)
        return soft_cap(logits, softcap)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times weight [D]; the statistic in fp32 (Zhang 2019)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D]: dimensions i and i + rotary_dim/2 turn as a pair by cos, sin [N, rotary_dim / 2]; the rest stays."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), dim=-1)


def rope_and_write_kv(
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
    """See ``Ops.rope_and_write_kv``."""
    num_kv_heads, head_dim = keys.shape[2:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    keys.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, k.to(keys.dtype))
    values.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, v.to(values.dtype))
    return q


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], params: AttentionParams) -> Tensor:
    """See ``Ops.paged_attention``; one span after the other."""
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    for span in spans:
        rows = slice(span.start, span.start + span.count)
        out[rows] = _attend(q[rows], keys, values, span, params).to(q.dtype)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, span: Span, params: AttentionParams) -> Tensor:
    """One span: q [count, H, D] -> fp32 [count, H * D].

    Only slots that some query of the span may see are read: what lies beyond the context or before the
    window may never have been written, and 0 x NaN would spread.
    """
    page_size, num_kv_heads, head_dim = keys.shape[1:]
    key_position = seen_positions(span, params).to(q.device)
    pages = torch.tensor(span.pages, device=q.device)
    slots = pages[key_position // page_size] * page_size + key_position % page_size
    k = keys.flatten(0, 1)[slots].float()  # [S, K, D]
    v = values.flatten(0, 1)[slots].float()
    grouped = q.float().view(span.count, num_kv_heads, -1, head_dim)  # query head h reads KV head h // group
    scores = torch.einsum("nkgd,skd->kgns", grouped, k) * params.scale
    scores = soft_cap(scores, params.softcap)
    shares = scores.masked_fill(hidden_keys(span, key_position, params), -torch.inf).softmax(-1)
    return torch.einsum("kgns,skd->nkgd", shares, v).reshape(span.count, -1)


def seen_positions(span: Span, params: AttentionParams) -> Tensor:
    """Positions that some row of ``span`` sees, ascending, int64 [S]: the sinks before the window, and the window."""
    if params.window is None:
        return torch.arange(span.context)
    first = max(0, span.context - span.count - params.window + 1)
    return torch.cat((torch.arange(min(params.sinks, first)), torch.arange(first, span.context)))


def hidden_keys(span: Span, key_position: Tensor, params: AttentionParams) -> Tensor:
    """Which keys each row of ``span`` must not see: bool [count, S] for keys at ``key_position`` [S]."""
    query_position = torch.arange(span.context - span.count, span.context, device=key_position.device)[:, None]
    hidden = key_position > query_position
    if params.window is not None:
        hidden |= (key_position <= query_position - params.window) & (key_position >= params.sinks)
    return hidden


def gated_mlp_activation(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [N, 2 * intermediate] -> activation(gate) * up, in fp32 inside (GLU variants, Shazeer 2020)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    match activation:
        case "silu":
            gate = functional.silu(gate)
        case "gelu_tanh":
            gate = functional.gelu(gate, approximate="tanh")
        case "gelu":
            gate = functional.gelu(gate)
        case _:
            raise ValueError(f"There is no activation {activation!r}; this model cannot run on the own decoder.")
    return (gate * up).to(gate_up.dtype)


def scaled_rows(rows: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    """Embedding rows in ``out_dtype``, times ``scale`` rounded to that dtype first, as transformers does for Gemma."""
    rows = rows.to(out_dtype)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=out_dtype).item()


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap) (Gemma 2); x itself without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def pack_reference(weight: Tensor, bias: Tensor | None, scheme: str) -> Packed:
    """``weight`` as its scheme's plain tensors; ValueError for an unknown scheme.

    data: "none" (fp32 weights,); "int8" (values, scales); the int4 ones (values one per byte, scales, minimums).
    """
    data: tuple[Tensor, ...]
    match scheme:
        case "none":
            data = (weight.float().contiguous(),)
        case "int8":
            data = quantize_int8(weight)
        case _ if scheme in INT4_GROUPS:
            data = quantize_int4(weight, INT4_GROUPS[scheme])
        case _:
            raise ValueError(f"There is no weight scheme {scheme!r}. Choose none, int8, {', '.join(INT4_GROUPS)}.")
    bias = None if bias is None else bias.float()
    num_bytes = sum(tensor.nbytes for tensor in data) + (0 if bias is None else bias.nbytes)
    out_features, in_features = weight.shape
    return Packed(scheme, out_features, in_features, tuple(data), bias, num_bytes, f"{scheme}: torch reference, fp32")


def unpack_reference(packed: Packed) -> Tensor:
    """The fp32 weights [out, in] that a reference ``Packed`` stands for."""
    match packed.scheme:
        case "int8":
            return dequantize_int8(Int8Weight(*packed.data))
        case scheme if scheme in INT4_GROUPS:
            return dequantize_int4(Int4Weight(*packed.data), packed.in_features)
        case _:
            return packed.data[0]
