"""The baseline: SmolLM2 as one would write it by hand in eager torch. Contiguous KV, batch 1, no pages, no scheduler.

Linear layers are torch's packed int4 product with bf16 activations, all else is the obvious torch call.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.weights.quantize import INT4_GROUP, quantize_int4
from engine.weights.source import open_source


class PlainInt4Linear:
    """weight [out, in] in int4 groups of 32; call it with bf16 [N, in]."""

    def __init__(self, weight: Tensor) -> None:
        quantized = quantize_int4(weight)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantized.values.int(), 1)
        offset = quantized.minimums + 8 * quantized.scales
        self.scales = torch.stack((quantized.scales.T, offset.T), dim=2).bfloat16().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, INT4_GROUP, self.scales)


class PlainLayer:
    def __init__(self, read: object, index: int) -> None:
        def tensor(name: str) -> Tensor:
            return read(f"layers.{index}.{name}")  # type: ignore[operator, no-any-return]

        self.attn_norm = tensor("attn_norm").bfloat16()
        self.mlp_norm = tensor("mlp_norm").bfloat16()
        self.qkv = PlainInt4Linear(tensor("qkv"))
        self.attn_out = PlainInt4Linear(tensor("attn_out"))
        self.gate_up = PlainInt4Linear(tensor("gate_up"))
        self.mlp_out = PlainInt4Linear(tensor("mlp_out"))


class PlainLoop:
    """A SmolLM2 GGUF with a KV cache of ``max_tokens``. ``forward`` appends tokens and returns the last one's logits."""

    def __init__(self, path: Path, max_tokens: int = 2048) -> None:
        source = open_source(path)
        self.spec = spec = source.spec
        self.layers = [PlainLayer(source.read, index) for index in range(spec.num_layers)]
        table = source.read("embed")
        self.embedding = table.bfloat16()
        self.head = PlainInt4Linear(table)
        self.final_norm = source.read("final_norm").bfloat16()
        rope = spec.ropes[0]
        frequencies = rope.theta ** (-torch.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
        angles = torch.outer(torch.arange(max_tokens), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        shape = (spec.num_layers, 2, 1, spec.num_kv_heads, max_tokens, spec.head_dim)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16)
        self.length = 0

    @torch.inference_mode()
    def forward(self, token_ids: list[int]) -> Tensor:
        """fp32 logits [vocab] after ``token_ids``; several tokens only into an empty cache."""
        assert self.length == 0 or len(token_ids) == 1
        spec, end = self.spec, self.length + len(token_ids)
        here = slice(self.length, end)
        cos, sin = self.cos[here], self.sin[here]
        x = self.embedding[torch.tensor(token_ids)]
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            qkv = layer.qkv(F.rms_norm(x, (spec.hidden_size,), layer.attn_norm, spec.norm_eps))
            q, k, v = qkv.split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
            q, k, v = (part.view(1, len(token_ids), -1, spec.head_dim).transpose(1, 2) for part in (q, k, v))
            keys[:, :, here] = rotate(k, cos, sin)
            values[:, :, here] = v
            attended = F.scaled_dot_product_attention(
                rotate(q, cos, sin),
                keys[:, :, :end],
                values[:, :, :end],
                is_causal=len(token_ids) > 1,
                enable_gqa=True,
            )
            x = x + layer.attn_out(attended.transpose(1, 2).reshape(len(token_ids), -1))
            gate_up = layer.gate_up(F.rms_norm(x, (spec.hidden_size,), layer.mlp_norm, spec.norm_eps))
            gate, up = gate_up.chunk(2, dim=-1)
            x = x + layer.mlp_out(F.silu(gate) * up)
        self.length = end
        return self.head(F.rms_norm(x[-1:], (spec.hidden_size,), self.final_norm, spec.norm_eps))[0].float()

    def rewind(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        self.length = length


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
