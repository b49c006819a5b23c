"""Models with a channel 50 times the rest, the same function as before: what made it is undone where it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.model.spec import ModelSpec
from engine.weights.source import WeightSource
from engine.weights.stored import StoredRows

SIZE = 50.0
Change = Callable[[ModelSpec, str, Tensor], Tensor]  # spec, the tensor's name without its layer, the tensor (a copy)


class Changed:
    """``source`` with every tensor of every layer passed through ``change``."""

    def __init__(self, source: WeightSource, change: Change) -> None:
        self._source, self._change = source, change
        self.spec = source.spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def names(self) -> frozenset[str]:
        return self._source.names()

    def read_stored(self, name: str, types: frozenset[int]) -> tuple[StoredRows, ...] | None:
        """What is changed is no longer as it was stored."""
        return None if name.startswith("layers.") else self._source.read_stored(name, types)

    def read(self, name: str) -> Tensor:
        tensor = self._source.read(name)
        if not name.startswith("layers."):
            return tensor
        return self._change(self.spec, name.rpartition(".")[2], tensor.float().clone())


def large_activation(spec: ModelSpec, name: str, tensor: Tensor) -> Tensor:
    """A channel of both norms puts out 50 times as much, and its columns are as much smaller."""
    return _hidden_channel(spec, name, tensor, SIZE)


def large_weight(spec: ModelSpec, name: str, tensor: Tensor) -> Tensor:
    """A column of QKV and of gate and up is 50 times as large, and the norm's channel as much smaller."""
    return _hidden_channel(spec, name, tensor, 1 / SIZE)


def _hidden_channel(spec: ModelSpec, name: str, tensor: Tensor, factor: float) -> Tensor:
    channel = spec.hidden_size // 5
    if name in ("attn_norm", "mlp_norm"):
        tensor[channel] *= factor
    if name in ("qkv", "gate_up"):
        tensor[:, channel] /= factor
    return tensor


def large_value(spec: ModelSpec, name: str, tensor: Tensor) -> Tensor:
    """A value channel of each KV head is 50 times as large."""
    channel = spec.head_dim // 4
    if name == "qkv":
        tensor[spec.q_size + spec.kv_size :].view(spec.num_kv_heads, spec.head_dim, -1)[:, channel] *= SIZE
    if name == "qkv_bias":
        tensor[spec.q_size + spec.kv_size :].view(spec.num_kv_heads, spec.head_dim)[:, channel] *= SIZE
    if name == "attn_out":
        tensor.view(tensor.shape[0], spec.num_heads, spec.head_dim)[:, :, channel] /= SIZE
    return tensor


def large_key(spec: ModelSpec, name: str, tensor: Tensor) -> Tensor:
    """A pair of key channels, which rotation mixes, is 50 times as large, and the queries' as much smaller."""
    if name in ("qkv", "qkv_bias"):
        half = spec.head_dim // 2
        heads = tensor[: spec.q_size + spec.kv_size].view(spec.num_heads + spec.num_kv_heads, spec.head_dim, -1)
        for channel in (half // 3, half // 3 + half):
            heads[: spec.num_heads, channel] /= SIZE
            heads[spec.num_heads :, channel] *= SIZE
    return tensor


def large_mlp(spec: ModelSpec, name: str, tensor: Tensor) -> Tensor:
    """A channel between the MLP's matrices is 50 times as large."""
    channel = spec.intermediate_size // 7
    if name in ("gate_up", "gate_up_bias"):
        tensor[spec.intermediate_size + channel] *= SIZE
    if name == "mlp_out":
        tensor[:, channel] /= SIZE
    return tensor


def off_grid(spec: ModelSpec, name: str, tensor: Tensor) -> Tensor:
    """Each channel of both norms by a factor of its own near 1: weights that lie on no grid, whatever the file has."""
    factors = torch.empty(spec.hidden_size).uniform_(0.8, 1.25, generator=torch.Generator().manual_seed(7))
    if name in ("attn_norm", "mlp_norm"):
        return tensor * factors
    return tensor / factors if name in ("qkv", "gate_up") else tensor


OUTLIERS: tuple[Change, ...] = (large_activation, large_weight, large_value, large_key, large_mlp)
