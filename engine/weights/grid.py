"""The factor that puts a column of weights back on the grid that its neighbours lie on.

A file of 4-bit weights has 16 points per row and group of columns. A column that was multiplied with something lies between
them, and all weights of its groups would be rounded anew; divided by the very same number it is one of them again. Nobody
tells that number, but every row allows few: its weight must become one of 16 points. The one that nearly all rows allow is it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.weights.quantize import INT4_LEVELS, ON_GRID, find_grids

_NEARLY_ALL = 0.9  # of the rows
_SAMPLE_ROWS = 128  # that factors are tried on; the best is tried on all
_TELLING_ROWS = 4  # whose points give the factors to try


class _Cells(NamedTuple):
    """Weights and, of the neighbours of each, the grid, as in ``Grids``; [rows, columns] each."""

    weights: Tensor
    minimum: Tensor
    step: Tensor
    steps: Tensor


def factor_onto_grid(weight: Tensor, columns: Tensor, is_moved: Tensor, group: int) -> float | None:
    """What puts ``columns`` of ``weight`` [rows, in], all multiplied with it, on the grid of their neighbours.

    1 when they lie there already, None when no factor does that in nearly all rows. columns: int64 [c]. is_moved: bool [in],
    columns that tell nothing of the grid of their group of ``group`` columns, ``columns`` among them.
    """
    rows = torch.linspace(0, len(weight) - 1, min(len(weight), _SAMPLE_ROWS)).long()
    sample = _cells(weight[rows], columns, is_moved, group)
    if sample is None:
        return None
    factors = torch.cat([torch.ones(1), _possible_factors(sample)])
    shares = _shares_on_grid(sample, factors)
    best = int(shares.argmax())
    if shares[best] <= _NEARLY_ALL:
        return None
    factor = factors[best : best + 1]
    cells = _cells(weight, columns, is_moved, group)
    assert cells is not None  # as many neighbours as the sample has
    return float(factor) if _shares_on_grid(cells, factor) > _NEARLY_ALL else None


def _cells(weight: Tensor, columns: Tensor, is_moved: Tensor, group: int) -> _Cells | None:
    """None when no neighbours are left to tell a grid."""
    grids = []
    for column in columns.tolist():
        its_group = slice(column // group * group, (column // group + 1) * group)
        neighbours = weight[:, its_group][:, ~is_moved[its_group]]
        if neighbours.shape[1] == 0:
            return None
        grids.append(find_grids(neighbours))
    return _Cells(weight[:, columns], *(torch.stack(parts, dim=1) for parts in zip(*grids, strict=True)))


def _possible_factors(cells: _Cells) -> Tensor:
    """Positive factors that put one of a few weights on its grid, [n].

    The larger a weight beside its neighbours, the less does their rounding to fp32 matter to the factor.
    """
    largest = torch.maximum(cells.minimum.abs(), (cells.minimum + cells.steps * cells.step).abs())
    tells = torch.where(cells.steps > 0, cells.weights.abs() / largest, 0.0).flatten()
    telling = tells.topk(min(_TELLING_ROWS, len(tells))).indices
    weights, minimum, step, steps = (part.flatten()[telling, None] for part in cells)
    at = torch.arange(-INT4_LEVELS, INT4_LEVELS + 1)
    points = minimum + at * step
    factors = points / weights
    # A point at 0 allows every row with such a point a factor of nearly 0.
    is_possible = _fits(at, steps) & (points.abs() > step / 2) & factors.isfinite() & (factors > 0)
    return factors[is_possible]


def _shares_on_grid(cells: _Cells, factors: Tensor) -> Tensor:
    """Of the rows, the share whose weights lie on the grid when multiplied with each factor [n], in the worst column. [n]"""
    position = (cells.weights * factors[:, None, None] - cells.minimum) / cells.step
    at = position.round()
    return (_fits(at, cells.steps) & ((position - at).abs() < ON_GRID)).float().mean(1).amin(1)


def _fits(at: Tensor, steps: Tensor) -> Tensor:
    """Whether a grid that its neighbours take up from 0 to ``steps`` (0: they lie on none) has a point at ``at`` too."""
    return (steps > 0) & (torch.maximum(at, steps) - at.clamp(max=0) <= INT4_LEVELS)
