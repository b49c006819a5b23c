"""Integer weights: int8 with one scale per output row, int4 with a scale and a minimum per 32, 64 or 128 weights.

Both are plain round-to-nearest. int8 is symmetric (Jacob 2018, without zero point); int4 is asymmetric, the
arithmetic of GGUF's Q4_1: weight = minimum + value * scale with value in 0..15. A source that already lies on such a
grid (Q4_1, Q4_0, the sub-blocks of Q4_K) is recognised and its own grid is kept, so repacking adds nothing.
Everything runs in slices of rows: besides the result, memory holds a few MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

INT4_GROUP = 32
INT4_GROUPS = {"int4": 32, "int4_g64": 64, "int4_g128": 128}  # scheme -> weights that share a scale and a minimum
INT4_LEVELS = 15  # steps between the smallest and the largest value of a group
INT8_LARGEST = 127

_SLICE_ELEMENTS = 1 << 20  # 4 MB in fp32: small beside a matrix, large beside the cost of a call
_SAMPLE_GROUPS = 512
ON_GRID = 1e-3  # a weight this close to a grid point, in steps, lies on it (fp16 sources round by less)


class Int8Weight(NamedTuple):
    """weight[o, i] = values[o, i] * scales[o].

    values: int8 [out, in], -127..127. scales: fp32 [out], already rounded to what bf16 holds (torch's packed product wants
    bf16 scales), so that the values absorb that rounding.
    """

    values: Tensor
    scales: Tensor


class Int4Weight(NamedTuple):
    """weight[o, i] = minimums[o, g] + values[o, i] * scales[o, g], g = i // group.

    values: uint8 [out, padded_in], 0..15, padded_in = in rounded up to whole groups (the padding is meaningless).
    scales, minimums: fp32 [out, padded_in / group].
    """

    values: Tensor
    scales: Tensor
    minimums: Tensor


class Grids(NamedTuple):
    """Grids of at most 16 points that weights of some rows lie on, fp32 [rows] each.

    steps: from the smallest weight to the largest, 0 where the row lies on no grid; else the smallest is at ``minimum`` and
    the points are ``step`` apart.
    """

    minimum: Tensor
    step: Tensor
    steps: Tensor


def quantize_int8(weight: Tensor) -> Int8Weight:
    """weight [out, in], any float dtype. Error per weight: at most 0.75 of a step, a step being max|row| / 127
    (half a step from rounding, a quarter at the ends when the scale was rounded down to bf16).

    ValueError when the weight holds NaN or infinity.
    """
    out_features, in_features = weight.shape
    values = torch.empty(out_features, in_features, dtype=torch.int8)
    scales = torch.empty(out_features)
    for rows in row_slices(out_features, in_features):
        part = weight[rows].float()
        largest = part.abs().amax(dim=1)
        _require_finite(largest)
        scale = _positive((largest / INT8_LARGEST).bfloat16().float())
        scales[rows] = scale
        values[rows] = (part / scale.unsqueeze(1)).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
    return Int8Weight(values, scales)


def dequantize_int8(quantized: Int8Weight) -> Tensor:
    """fp32 [out, in]."""
    return quantized.values * quantized.scales.unsqueeze(1)


def quantize_int4(weight: Tensor, group: int = INT4_GROUP) -> Int4Weight:
    """weight [out, in], any float dtype. Error per weight: at most half a step, a step being
    (max - min of the group) / 15; next to nothing when the group already lies on a grid of 16 points.

    in not divisible by ``group`` is padded. ValueError when the weight holds NaN or infinity.
    """
    out_features, in_features = weight.shape
    num_groups = -(-in_features // group)
    values = torch.empty(out_features, num_groups * group, dtype=torch.uint8)
    scales = torch.empty(out_features, num_groups)
    minimums = torch.empty(out_features, num_groups)
    search = has_short_grids(weight, group)
    for rows in row_slices(out_features, in_features):
        part = _in_groups(weight[rows], group)
        minimum, largest = _extremes(part)
        span = largest - minimum
        _require_finite(span)
        steps = _grid_steps(part, minimum, span) if search else float(INT4_LEVELS)
        scale = _positive(span / steps)
        scaled = torch.sub(part, minimum).div_(scale).round_().clamp_(0, INT4_LEVELS)
        values[rows].unflatten(1, (num_groups, group)).copy_(scaled)
        scales[rows] = scale.squeeze(2)
        minimums[rows] = minimum.squeeze(2)
    return Int4Weight(values, scales, minimums)


def dequantize_int4(quantized: Int4Weight, in_features: int) -> Tensor:
    """fp32 [out, in_features]; the padding of the last group is dropped."""
    num_groups = quantized.scales.shape[1]
    grouped = quantized.values.unflatten(1, (num_groups, -1))
    weight = grouped * quantized.scales.unsqueeze(2) + quantized.minimums.unsqueeze(2)
    return weight.flatten(1)[:, :in_features]


def row_slices(out_features: int, in_features: int, multiple: int = 64) -> Iterator[slice]:
    """Slices that cover all rows, each about 4 MB of fp32 and (but for the last) a multiple of ``multiple`` rows."""
    rows = max(1, _SLICE_ELEMENTS // max(1, in_features) // multiple) * multiple
    for start in range(0, out_features, rows):
        yield slice(start, min(start + rows, out_features))


def _in_groups(rows: Tensor, group: int) -> Tensor:
    """[rows, in] -> fp32 [rows, groups, group]; a short last group repeats its last weight, which moves no extreme."""
    rows = rows.float()
    missing = -rows.shape[1] % group
    if missing:
        rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1)
    return rows.unflatten(1, (-1, group))


def _extremes(part: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each group, [rows, groups, 1] each.

    The wider half of the work is done between halves of the groups, which vectorizes; torch reduces a short last dimension
    one element at a time.
    """
    low = high = part
    while low.shape[2] > 4 and low.shape[2] % 2 == 0:
        half = low.shape[2] // 2
        low = torch.minimum(low[..., :half], low[..., half:])
        high = torch.maximum(high[..., :half], high[..., half:])
    return low.amin(dim=2, keepdim=True), high.amax(dim=2, keepdim=True)


def has_short_grids(weight: Tensor, group: int) -> bool:
    """Whether ``weight`` came from a 16-point grid whose ends some groups do not reach (Q4_0, Q4_K).

    Judged by a sample of rows spread over the matrix: trying every number of steps on every group is only worth it then.
    Ends that are all reached (Q4_1) need no search.
    """
    out_features, in_features = weight.shape
    num_rows = min(out_features, max(1, _SAMPLE_GROUPS * group // max(1, in_features)))
    sample = _in_groups(weight[torch.linspace(0, out_features - 1, num_rows).long()], group)
    minimum, largest = _extremes(sample)
    span = largest - minimum
    if _is_on_grid(sample, minimum, span, INT4_LEVELS).float().mean() > 0.99:
        return False
    on_grid = torch.zeros_like(span, dtype=torch.bool)
    for steps in range(INT4_LEVELS, 0, -1):
        on_grid |= _is_on_grid(sample, minimum, span, steps)
    return bool(on_grid.float().mean() > 0.9)


def find_grids(group: Tensor) -> Grids:
    """The grid of each row of ``group`` [rows, weights]."""
    part = group.float().unsqueeze(1)
    minimum, largest = _extremes(part)
    span = largest - minimum
    steps = _grid_steps(part, minimum, span)
    is_on_grid = (steps < INT4_LEVELS) | _is_on_grid(part, minimum, span, INT4_LEVELS)
    return Grids(minimum.flatten(), _positive(span / steps).flatten(), torch.where(is_on_grid, steps, 0.0).flatten())


def _grid_steps(part: Tensor, minimum: Tensor, span: Tensor) -> Tensor:
    """Steps between the ends of each group: the fewest that put all its weights on a grid, else 15. [rows, groups, 1]"""
    steps = torch.full_like(span, INT4_LEVELS)
    for count in range(INT4_LEVELS - 1, 0, -1):
        steps = torch.where(_is_on_grid(part, minimum, span, count), float(count), steps)
    return steps


def _is_on_grid(part: Tensor, minimum: Tensor, span: Tensor, steps: int) -> Tensor:
    """Per group: is every weight at minimum + whole number * span / steps. [rows, groups, 1]"""
    position = (part - minimum) * (steps / _positive(span))
    return ((position - position.round()).abs().amax(dim=2, keepdim=True) < ON_GRID) & (span > 0)


def _positive(scale: Tensor) -> Tensor:
    """Scales with 1 in the place of 0 (and of subnormal values, whose inverse overflows): those weights quantize to 0."""
    return torch.where(scale > torch.finfo(torch.float32).tiny, scale, 1.0)


def _require_finite(extremes: Tensor) -> None:
    if not bool(torch.isfinite(extremes).all()):
        raise ValueError("A weight matrix holds NaN or infinite values. The model file is damaged; download it again.")
