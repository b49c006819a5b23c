"""The page map: whose page is which colour, and only changed cells are painted."""

from __future__ import annotations

import pytest
from PySide6.QtGui import QColor

from app import theme
from app.tuning.pace import Meter
from app.tuning.page_map import MAX_HEIGHT, PageGrid, PageMapView
from app.tuning.plots import page_colour
from engine.events import PageMap

BLUE, PINK = "#56B4E9", "#CC79A7"


@pytest.fixture
def view(qtbot):
    view = PageMapView(lambda request: {1: BLUE, 2: PINK}[request], lambda request: f"chat {request}", Meter())
    qtbot.addWidget(view)
    view.resize(332, 80)
    view.show()
    qtbot.waitExposed(view)
    return view


def owners(*values: int, total: int = 300) -> tuple[int, ...]:
    return (-2, *values, *([0] * (total - len(values))))


def colours_of_cell(view: PageMapView, page: int) -> set[str]:
    x, y = view._grid.place(page - 1)
    image = view._pixmap.toImage()
    size, ratio = view._grid.cell - 1, view._pixmap.devicePixelRatio()
    return {
        QColor(image.pixel(round((x + dx) * ratio), round((y + dy) * ratio))).name().upper()
        for dx in range(size)
        for dy in range(size)
    }


def test_cells_have_their_owners_colours(view):
    view.show_map(PageMap(owners(1, 2, -1, 0)))
    assert colours_of_cell(view, 1) == {BLUE}
    assert colours_of_cell(view, 2) == {PINK}
    assert colours_of_cell(view, 3) == {page_colour("cached").upper()}
    assert colours_of_cell(view, 4) == {page_colour("free").upper()}


def test_a_shared_page_carries_both_owners_colours(view):
    view.show_map(PageMap(owners(-3, 1), sharers={1: (1, 2)}))
    assert colours_of_cell(view, 1) == {BLUE, PINK}


def test_a_shared_page_of_unknown_owners_is_marked_too(view):
    view.show_map(PageMap(owners(-3, 1)))
    assert len(colours_of_cell(view, 1)) == 2
    assert theme.current().text.upper() in colours_of_cell(view, 1)


def test_stranded_pages_are_hatched(view):
    view.show_map(PageMap(owners(1, 1), stranded=frozenset({2})))
    assert colours_of_cell(view, 1) == {BLUE}
    assert len(colours_of_cell(view, 2)) > 1


def test_only_changed_cells_are_painted(view):
    view.show_map(PageMap(owners(1, 1, 1)))
    assert view.num_painted == 300
    view.show_map(PageMap(owners(1, 1, 1, 1)))
    assert view.num_painted == 1
    assert colours_of_cell(view, 4) == {BLUE}
    view.show_map(PageMap(owners(1, 1, 1, 1)))
    assert view.num_painted == 0
    view.show_map(PageMap(owners(1, -1, 1, 1), stranded=frozenset({4})))
    assert view.num_painted == 2


def test_a_new_size_or_theme_paints_all_again(view, qapp):
    view.show_map(PageMap(owners(1)))
    view.resize(400, 80)
    assert view.num_painted == 300
    view.restyle()
    assert view.num_painted == 300


def test_tooltips_say_who(view):
    view.show_map(PageMap(owners(1, -3, -1, 0, 2, -3), frozenset({5}), {2: (1, 2)}))
    assert view.words_for(1) == "Page 1: held by chat 1"
    assert view.words_for(2) == "Page 2: shared by chat 1 and chat 2"
    assert view.words_for(3).startswith("Page 3: cached")
    assert view.words_for(4) == "Page 4: free"
    assert view.words_for(5) == "Page 5: held by chat 2, reserved but still empty"
    assert view.words_for(6) == "Page 6: shared by several chats"


def test_nothing_to_show(view):
    view.show_map(None)
    view.show_map(PageMap(()))
    view.show_map(PageMap((-2,)))
    assert view.num_painted == 0


@pytest.mark.parametrize("num_pages", [1, 40, 358, 1000, 5000, 100_000])
@pytest.mark.parametrize("width", [280, 332, 520])
def test_any_pool_fits_the_map(num_pages, width):
    grid = PageGrid(num_pages, width)
    assert grid.height <= MAX_HEIGHT
    assert grid.columns * grid.cell <= width + 1
    assert grid.num_cells * grid.pages_per_cell >= num_pages
    last_x, last_y = grid.place(grid.num_cells - 1)
    assert grid.index_at(last_x, last_y) == grid.num_cells - 1
    assert grid.index_at(width + 50, 0) is None


def test_grouped_pages_show_the_busiest(view):
    total = 20_000
    view.show_map(PageMap(owners(0, 0, 2, total=total)))
    assert view._grid.pages_per_cell > 2
    assert colours_of_cell(view, 1) == {PINK}
