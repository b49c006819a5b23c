"""The factor that puts columns back on the grid of their neighbours is found from the weights alone."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from four_bits import as_stored_in_4_bits
from torch import Tensor

from engine.weights.grid import factor_onto_grid

GROUP = 32
COLUMNS = torch.tensor([5, 40, 77])  # one in each group


def weights(kind: Literal["q4_1", "q4_0"], seed: int = 1) -> Tensor:
    return as_stored_in_4_bits(torch.randn(300, 3 * GROUP, generator=torch.Generator().manual_seed(seed)), kind)


def found(weight: Tensor, columns: Tensor = COLUMNS, group: int = GROUP) -> float | None:
    is_moved = torch.zeros(weight.shape[1], dtype=torch.bool)
    is_moved[columns] = True
    return factor_onto_grid(weight, columns, is_moved, group)


@pytest.mark.parametrize("kind", ["q4_1", "q4_0"])
@pytest.mark.parametrize("factor", [50, 0.02, 3.7, 1000, 1e-3])
@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS[:1]])
def test_it_is_what_the_columns_were_divided_by(kind: Literal["q4_1", "q4_0"], factor: float, columns: Tensor) -> None:
    weight = weights(kind)
    weight[:, columns] /= factor
    assert found(weight, columns) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("kind", ["q4_1", "q4_0"])
def test_it_is_1_where_they_lie(kind: Literal["q4_1", "q4_0"]) -> None:
    assert found(weights(kind)) == 1


def test_a_few_rows_that_lie_elsewhere_do_not_hide_it() -> None:
    weight = weights("q4_1")
    weight[:, COLUMNS] /= 50
    weight[::20] = torch.randn(15, weight.shape[1])
    weight[3, COLUMNS] = 7.0
    assert found(weight) == pytest.approx(50, rel=1e-6)


def test_columns_with_different_factors_have_none_together() -> None:
    weight = weights("q4_1")
    weight[:, COLUMNS[0]] /= 50
    weight[:, COLUMNS[1:]] /= 49
    assert found(weight) is None
    assert found(weight, COLUMNS[:1]) == pytest.approx(50, rel=1e-6)


def test_there_is_none_without_a_grid() -> None:
    assert found(torch.randn(300, 3 * GROUP, generator=torch.Generator().manual_seed(2))) is None
    moved = weights("q4_1")
    moved[:, 5] = torch.randn(300, generator=torch.Generator().manual_seed(3))
    assert found(moved, COLUMNS[:1]) is None
    assert found(weights("q4_1"), COLUMNS[:1], group=2 * GROUP) is None


@pytest.mark.parametrize("num_neighbours", [0, 1, 2])
def test_few_neighbours_tell_nothing(num_neighbours: int) -> None:
    """Two numbers always lie on some grid, but not on one that the columns share."""
    assert found(weights("q4_1"), torch.arange(GROUP - num_neighbours)) is None


def test_a_factor_of_nearly_zero_is_none() -> None:
    """Rows whose grids all have a point at 0, or beside it by rounding, would all allow it."""
    weight = weights("q4_0") / 50
    weight[:, 5] = torch.randn(300, generator=torch.Generator().manual_seed(3))
    assert found(weight, COLUMNS[:1]) is None


def test_rows_without_weights_are_no_reason_to_divide_by_zero() -> None:
    weight = weights("q4_0")
    weight[:, COLUMNS] /= 50
    weight[:10] = 0
    assert found(weight) == pytest.approx(50, rel=1e-6)
    assert found(torch.zeros(300, 3 * GROUP)) is None
