"""Norms, rotation and activation in as few torch calls as possible: at one row each call is mostly its own overhead."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times weight [D]; the statistic in fp32 (Zhang 2019)."""
    size = x.shape[-1]
    if x.numel() == size:
        # One row: the statistic is a number, and one call does the rest.
        norm = torch.linalg.vector_norm(x, dtype=torch.float32).item()
        return torch.mul(x, (norm * norm / size + eps) ** -0.5).mul_(weight)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = norm.square_().mul_(1.0 / size).add_(eps).rsqrt_()
    return torch.mul(x, inverse).mul_(weight).to(x.dtype)


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
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(qk[:, :num_q_heads], q_norm, eps), rms_norm(qk[:, num_q_heads:], k_norm, eps)
        qk = torch.cat((q, k), dim=1)
    if cos is not None and sin is not None:
        qk = _rotate(qk, cos, sin)
    keys.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, qk[:, num_q_heads:].to(keys.dtype))
    values.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, v.to(values.dtype))
    return qk[:, :num_q_heads]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D]: dimensions i and i + rotary_dim / 2 turn as a pair by cos, sin (fp32 [N, rotary_dim / 2])."""
    half = cos.shape[-1]
    turning = x[..., : 2 * half].unflatten(-1, (2, half))
    signed = torch.stack((-sin, sin), dim=1).unsqueeze(1)
    turned = torch.mul(turning, cos[:, None, None, :]).addcmul_(turning.flip(2), signed).to(x.dtype).flatten(2)
    return turned if x.shape[-1] == 2 * half else torch.cat((turned, x[..., 2 * half :]), dim=-1)


def gated_mlp_activation(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [N, 2 * intermediate] -> activation(gate) * up (GLU variants, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    if activation not in ("gelu", "gelu_tanh"):
        raise ValueError(f"There is no activation {activation!r}; this model cannot run on the own decoder.")
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)
