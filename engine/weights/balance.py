"""Outlier channels, evened out before weights are rounded.

A channel of activations meets a column of weights. Where one is many times larger than its like and the other makes up for
it, rounding harms: a large column coarsens the step of all weights that share its scale, and a small column that meets large
activations has the step's error multiplied. Their product is all that counts, so a factor can move from one to the other
without changing the model (SmoothQuant, Xiao 2023): the norm's multipliers or the rows that make the channel are divided by
it, the columns that read it are multiplied. Only outliers are touched, everything else stays as the file has it.

Factors are powers of two, which round nothing, but for weights of a file that is in 4 bits already: packing keeps the file's
grid exactly, as long as the columns of a group stand as they stood when the file was made. There the factor is the one that
puts the outlier's column on the grid of its neighbours, 1 when it lies there. What is divided and multiplied by such a factor
is rounded to fp32 once, by a ten-millionth at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.spec import ModelSpec
from engine.weights.grid import factor_onto_grid
from engine.weights.quantize import INT4_GROUPS

OUTLIER = 8.0  # times the median; below that rounding hardly notices
LEAST_DOUBLINGS = 2  # that a factor must make up for


class Half(NamedTuple):
    """Half a layer, fp32: a norm [hidden], the matrix ``first`` [rows, hidden] behind it with its bias, if any, and the matrix
    ``second`` [hidden, in] that reads what comes of its last rows: attention's values or the MLP's "up"."""

    norm: Tensor
    first: Tensor
    bias: Tensor | None
    second: Tensor


def balance_attention(spec: ModelSpec, scheme: str, half: Half) -> Half:
    """``half`` (norm, QKV, attention output) without outlier channels, as ``scheme`` packs it; the same function."""
    # A value channel is read by every query head of its group: their columns have one factor.
    channels = torch.arange(spec.q_size).view(spec.num_kv_heads, -1, spec.head_dim).transpose(1, 2).flatten(0, 1)
    return _balance_rows(scheme, _balance_norm(scheme, half), spec.q_size + spec.kv_size, channels)


def balance_mlp(spec: ModelSpec, scheme: str, half: Half) -> Half:
    """The same for an MLP: norm, gate and up, and the matrix behind them."""
    first_row = spec.intermediate_size
    return _balance_rows(scheme, _balance_norm(scheme, half), first_row, torch.arange(first_row).view(-1, 1))


def _balance_norm(scheme: str, half: Half) -> Half:
    channels = torch.arange(half.first.shape[1]).view(-1, 1)
    factors = _factors(scheme, half.norm.abs(), half.first, channels)
    return half if factors is None else half._replace(norm=half.norm / factors, first=half.first * factors)


def _balance_rows(scheme: str, half: Half, first_row: int, channels: Tensor) -> Half:
    """The rows of ``half.first`` from ``first_row`` on make one channel each; ``channels`` as for ``_factors``."""
    rows = half.first[first_row:]
    factors = _factors(scheme, (rows * half.norm).square().mean(1).sqrt(), half.second, channels)
    if factors is None:
        return half
    of_rows = torch.cat([torch.ones(first_row), factors])
    of_columns = torch.empty(half.second.shape[1])
    of_columns[channels.flatten()] = factors.repeat_interleave(channels.shape[1])
    return Half(
        half.norm,
        half.first / of_rows[:, None],
        None if half.bias is None else half.bias / of_rows,
        half.second * of_columns,
    )


def _factors(scheme: str, sizes: Tensor, weight: Tensor, channels: Tensor) -> Tensor | None:
    """What each channel's columns are to be multiplied with [n], 1 where nothing is to be done; None when that is everywhere.

    sizes: of each channel's activations [n]. channels: int64 [n, c], the columns of ``weight`` [rows, in] that read each.
    The factor goes halfway: an outlier's own ratio of the two sizes becomes the typical one when both have moved by it.
    """
    of_columns = weight.square().mean(0)[channels].mean(1).sqrt()
    is_large = (sizes > OUTLIER * sizes.median()) | (of_columns > OUTLIER * of_columns.median())
    if not is_large.any():
        return None
    ratio = (sizes / of_columns).sqrt()
    away = (ratio / ratio[ratio.isfinite()].median()).log2()
    is_outlier = is_large & away.isfinite() & (away.abs() >= LEAST_DOUBLINGS)
    factors = torch.where(is_outlier, torch.exp2(away.round()), 1.0)
    if scheme in INT4_GROUPS:
        _keep_grids(factors, weight, channels, is_outlier, INT4_GROUPS[scheme])
    return factors if (factors != 1).any() else None


def _keep_grids(factors: Tensor, weight: Tensor, channels: Tensor, is_outlier: Tensor, group: int) -> None:
    """Replace the factors of outliers by those that put their columns on the file's own grid, where that has one."""
    is_moved = torch.zeros(weight.shape[1], dtype=torch.bool)
    is_moved[channels[is_outlier].flatten()] = True
    for index in is_outlier.nonzero().flatten().tolist():
        factor = factor_onto_grid(weight, channels[index], is_moved, group)
        if factor is not None:
            factors[index] = factor
