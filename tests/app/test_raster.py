"""Drawing plots into an array of pixels."""

from __future__ import annotations

import numpy as np
import pytest

from app.tuning.raster import Raster, blend, pixel, ramp

RED, BLUE = 0xFFFF0000, 0xFF0000FF


def drawn(raster: Raster, colour: int) -> list[list[int]]:
    """For each column the rows that have ``colour``."""
    return [np.flatnonzero(raster.pixels[:, x] == colour).tolist() for x in range(raster.width)]


def test_fill_covers_each_column_from_top_to_bottom():
    raster = Raster(3, 6)
    raster.fill(np.array([1.0, 3.4, 5.0]), np.array([4.0, 6.0, 5.0]), RED)
    assert drawn(raster, RED) == [[1, 2, 3], [3, 4, 5], []]


def test_fill_leaves_gaps_and_stays_inside():
    raster = Raster(4, 5)
    raster.fill(np.array([np.nan, -50.0, 2.0, 1e9]), np.array([5.0, 2.0, np.nan, 2e9]), RED)
    assert drawn(raster, RED) == [[], [0, 1], [], []]
    raster.fill(np.full(4, np.nan), np.full(4, np.nan), BLUE)
    assert drawn(raster, BLUE) == [[], [], [], []]


def test_line_joins_neighbours_and_breaks_at_gaps():
    raster = Raster(5, 10)
    raster.line(np.array([2.0, 7.0, np.nan, 7.0, 7.0]), 2.0, ramp("#FF0000", "#000000"))
    columns = drawn(raster, RED)
    assert columns[0] == [1, 2]
    assert columns[1] == [1, 2, 3, 4, 5, 6, 7]
    assert columns[2] == []
    assert columns[3] == columns[4] == [6, 7]


def test_line_of_nothing_draws_nothing_and_one_beyond_the_edge_is_cut():
    raster = Raster(3, 4)
    raster.line(np.full(3, np.nan), 2.0, ramp("#FF0000", "#000000"))
    raster.line(np.full(3, 50.0), 2.0, ramp("#FF0000", "#000000"))
    assert not raster.pixels.any()


def test_clear_brings_the_background_back():
    raster = Raster(2, 2)
    raster.background[:] = BLUE
    raster.fill(np.zeros(2), np.full(2, 2.0), RED)
    raster.clear()
    assert (raster.pixels == BLUE).all()


@pytest.mark.parametrize(("share", "mixed"), [(0.0, "#000000"), (1.0, "#FF8000"), (0.5, "#804000")])
def test_blend(share, mixed):
    assert blend("#FF8000", "#000000", share) == mixed


def test_ramp_ends_in_its_colours():
    colours = ramp("#FF0000", "#0000FF")
    assert (colours[0], colours[-1]) == (BLUE, RED)
    assert pixel("#010203") == 0xFF010203
