"""Norms, rotation and activation in as few torch calls as possible: at one row each call is mostly its own overhead."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 32
_MAX_ROTATIONS = 4  # a model has one or two tables


class _NormWeight(NamedTuple):
    """A norm's multipliers [D] as the fast paths want them; ``source`` is held so that its id stays its own.

    exact: in the activations' dtype, or None when that would round them. times_root: fp32, times the square root of D.
    """

    source: Tensor
    wide: Tensor
    exact: Tensor | None
    times_root: Tensor


class Norms:
    """RMS norm (Zhang 2019) with the statistic in fp32. Prepares each weight once and keeps it."""

    def __init__(self) -> None:
        self._weights: dict[tuple[int, torch.dtype], _NormWeight] = {}
        self._zeros: dict[tuple[int, torch.dtype], Tensor] = {}
        self._epsilons: dict[tuple[int, float], Tensor] = {}

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D] over its root mean square, times weight [D]."""
        size = weight.shape[0]
        num_rows = x.numel() // size
        prepared = self._weights.get((id(weight), x.dtype)) or self._prepare(weight, x.dtype)
        if num_rows == 1:
            # The statistic is a number, and one call does the rest.
            norm = torch.linalg.vector_norm(x, dtype=torch.float32).item()
            inverse = 1.0 / math.sqrt(norm * norm / size + eps)
            if prepared.exact is not None:
                return torch.addcmul(self._zero(size, x.dtype), x, prepared.exact, value=inverse)
            return torch.addcmul(self._zero(size, torch.float32), x, prepared.wide, value=inverse).to(x.dtype)
        if num_rows > _FEW_ROWS and prepared.exact is not None:
            return F.rms_norm(x, (size,), prepared.exact, eps)
        root = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        root.hypot_(self._epsilon(size, eps))  # sqrt(sum of squares + D * eps)
        return torch.div(x, root).mul_(prepared.times_root).to(x.dtype)

    def _prepare(self, weight: Tensor, dtype: torch.dtype) -> _NormWeight:
        wide = weight.float()
        narrow = weight.to(dtype)
        exact = narrow if torch.equal(narrow.float(), wide) else None
        prepared = _NormWeight(weight, wide, exact, wide * math.sqrt(weight.shape[0]))
        self._weights[(id(weight), dtype)] = prepared
        return prepared

    def _zero(self, size: int, dtype: torch.dtype) -> Tensor:
        zero = self._zeros.get((size, dtype))
        if zero is None:
            zero = self._zeros[(size, dtype)] = torch.zeros(size, dtype=dtype)
        return zero

    def _epsilon(self, size: int, eps: float) -> Tensor:
        epsilon = self._epsilons.get((size, eps))
        if epsilon is None:
            epsilon = self._epsilons[(size, eps)] = torch.tensor(math.sqrt(size * eps))
        return epsilon


class _Rotation(NamedTuple):
    """One step's angles. ``source`` is the cos tensor they came from, held so that its id stays its own.

    cos: [N, 1, 1, half]; signed_sin: [N, 1, 2, half], minus then plus; both in the activations' dtype.
    """

    source: Tensor
    cos: Tensor
    signed_sin: Tensor


class Rotations:
    """Rotary embedding (RoFormer, Su 2021). Shapes each step's cosines and sines once for all layers."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, torch.dtype], _Rotation] = {}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, heads, D]: dimensions i and i + rotary_dim / 2 turn as a pair by cos, sin (fp32 [N, rotary_dim / 2]).

        The tables are fp32; the products are taken in x's dtype, as x itself is rounded to it.
        """
        half = cos.shape[1]
        rotation = self._prepared.get((id(cos), x.dtype)) or self._prepare(cos, sin, x.dtype)
        if 2 * half == x.shape[2]:
            pairs = x.unflatten(2, (2, half))
            return torch.mul(pairs, rotation.cos).addcmul_(pairs.flip(2), rotation.signed_sin).flatten(2)
        pairs = x[..., : 2 * half].unflatten(2, (2, half))
        turned = torch.mul(pairs, rotation.cos).addcmul_(pairs.flip(2), rotation.signed_sin).flatten(2)
        return torch.cat((turned, x[..., 2 * half :]), dim=2)

    def _prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> _Rotation:
        while len(self._prepared) >= _MAX_ROTATIONS:
            self._prepared.pop(next(iter(self._prepared)))
        signed = torch.stack((-sin, sin), dim=1).unsqueeze(1).to(dtype)
        rotation = _Rotation(cos, cos[:, None, None, :].to(dtype), signed)
        self._prepared[(id(cos), dtype)] = rotation
        return rotation


def gated_mlp_activation(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [N, 2 * intermediate] -> activation(gate) * up (GLU variants, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    if activation not in ("gelu", "gelu_tanh"):
        raise ValueError(f"There is no activation {activation!r}; this model cannot run on the own decoder.")
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)
