"""Rotary position embedding (RoFormer, Su 2021) and its context extensions: fp32 tables of cosines and sines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.spec import RopeSpec

_FIRST_POSITIONS = 1024  # positions a table starts with; it doubles when a longer context needs more


def inverse_frequencies(rope: RopeSpec, max_context: int) -> Tensor:
    """Radians per position for each rotated pair, fp32 [rotary_dim / 2].

    max_context decides longrope's factors: long when it exceeds ``original_max_position``, else short.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "plain":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case "longrope":
            is_long = max_context > rope.original_max_position
            return plain / _per_frequency(rope.long_factors if is_long else rope.short_factors, rope)
        case "factors":
            return plain / _per_frequency(rope.short_factors, rope)


def _per_frequency(factors: tuple[float, ...], rope: RopeSpec) -> Tensor:
    assert len(factors) == rope.rotary_dim // 2, (len(factors), rope.rotary_dim)
    return torch.tensor(factors, dtype=torch.float32)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # full rotations within the trained context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = blend.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    """YaRN (Peng 2023): interpolate slow dimensions, keep fast ones, ramp between ``beta_fast`` and ``beta_slow``."""

    def dimension_of(num_rotations: float) -> float:
        """The pair index that turns ``num_rotations`` times within the trained context."""
        period = rope.original_max_position / (num_rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = (high - low) or 0.001  # one step instead of a ramp when both ends coincide
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return ramp * plain / rope.factor + (1.0 - ramp) * plain


class RopeTable:
    """Cosines and sines of one RopeSpec for positions 0, 1, ...; grown when a longer context asks for them.

    The attention factor of yarn and longrope is folded into both, so that a rotation scales q and k alike.
    """

    def __init__(self, rope: RopeSpec, max_context: int, device: str = "cpu") -> None:
        self.rope = rope
        self._frequencies = inverse_frequencies(rope, max_context).to(device)
        self._table = self._compute(min(_FIRST_POSITIONS, max(max_context, 1)))

    @property
    def num_positions(self) -> int:
        return self._table.shape[1]

    @property
    def num_bytes(self) -> int:
        return self._table.nbytes

    def _compute(self, num_positions: int) -> Tensor:
        # The product stays in fp32, as transformers has it: half precision cannot tell position 4097 from 4096.
        positions = torch.arange(num_positions, dtype=torch.float32, device=self._frequencies.device)
        angles = positions[:, None] * self._frequencies
        return torch.stack((angles.cos(), angles.sin())) * self.rope.attention_factor

    def rows(self, positions: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [N, rotary_dim / 2] each, of ``positions`` [N], all of which are below ``context``."""
        cos, sin = self.covering(context).index_select(1, positions)
        return cos, sin

    def covering(self, context: int) -> Tensor:
        """The table, fp32 [2, positions, rotary_dim / 2]: cosines, then sines, of at least ``context`` positions."""
        if context > self.num_positions:
            self._table = self._compute(max(context, 2 * self.num_positions))
        return self._table
