"""The panel's menus of choices: every word can be read, and mouse and keys pick as in any other menu."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QColor, QImage

from app import theme
from app.tuning import menus
from app.tuning.menus import ChoiceMenu

pytestmark = pytest.mark.qt_log_ignore("This plugin does not support", extend=True)  # raising and grabbing, offscreen

REASON = "Sparse attention (8 pages) needs KV cache (on): without a KV cache there are no pages to choose"


@pytest.fixture
def opened(qtbot):
    """Opens a menu with these lines, (title, words, usable), the first of them checked; it ends with the test."""
    made = []

    def open_menu(*choices):
        menu = ChoiceMenu()
        menu.picked = []
        for title, words, is_usable in choices:
            action = menu.add_choice(title, words, lambda title=title: menu.picked.append(title))
            action.setCheckable(True)
            action.setChecked(not made and action is menu.actions()[0])
            action.setEnabled(is_usable)
        menu.popup(QPoint(0, 0))
        qtbot.waitExposed(menu)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose, False)
        made.append(menu)
        return menu

    yield open_menu
    for menu in made:
        menu.close()
        menu.deleteLater()


def picture(menu) -> QImage:
    return menu.grab().toImage()


@pytest.mark.parametrize("widest", [menus.WIDEST, 420, 300])
@pytest.mark.parametrize("is_usable", [True, False])
def test_the_end_of_long_words_is_seen_however_narrow_the_menu(opened, monkeypatch, widest, is_usable):
    monkeypatch.setattr(menus, "WIDEST", widest)
    one, two, short = (
        opened(("off", "each token reads all it sees", True), ("8 pages", words, is_usable))
        for words in (f"{REASON} from.", f"{REASON} fram.", "grey")
    )
    assert one.width() <= widest + 2 * 6  # its frame and padding
    assert one.height() > short.height()  # it took more than one row
    assert picture(one).size() == picture(two).size()
    assert picture(one) != picture(two)  # the last word was drawn


def test_a_menu_fits_the_screen_and_is_no_wider_than_its_words(opened):
    menu = opened(("8 pages", f"{REASON} from. " * 5, True))
    assert menu.width() <= menu.screen().availableGeometry().width()
    assert opened(("off", "nothing", True)).width() < 200


def test_the_titles_stand_above_each_other_and_long_ones_are_whole_too(opened, monkeypatch):
    monkeypatch.setattr(menus, "WIDEST", 400)
    name = "a-model-with-a-name-that-somebody-made-up-of-many-words "
    one, two = (opened((name * 2 + end, "words", True), ("b", "words", True)) for end in ("xxx", "xxo"))
    assert one.columns() == two.columns()
    assert picture(one) != picture(two)


def test_a_click_picks_what_can_be_used_and_nothing_else(opened, qtbot):
    menu = opened(("off", "a", True), ("8 pages", REASON, False), ("16 pages", "b", True))
    _, grey, last = menu.actions()
    qtbot.mouseClick(menu, Qt.MouseButton.LeftButton, pos=menu.actionGeometry(grey).center())
    assert menu.picked == []
    qtbot.mouseMove(menu, menu.actionGeometry(last).center())
    qtbot.mouseClick(menu, Qt.MouseButton.LeftButton, pos=menu.actionGeometry(last).center())
    assert menu.picked == ["16 pages"]
    assert not menu.isVisible()


def test_keys_move_over_what_is_grey_and_pick(opened, qtbot):
    menu = opened(("off", "a", True), ("8 pages", REASON, False), ("16 pages", "b", True))
    for _ in range(2):
        qtbot.keyClick(menu, Qt.Key.Key_Down)
    assert menu.activeAction() is menu.actions()[2]
    qtbot.keyClick(menu, Qt.Key.Key_Return)
    assert menu.picked == ["16 pages"]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_active_line_has_the_ground_of_one_and_the_others_have_not(opened, qapp, mode):
    before = theme.notifier().mode
    theme.apply(qapp, mode)
    menu = opened(("off", "a", True), ("on", "b", True))
    hover = QColor(theme.current().hover).rgb()

    def grounds():
        image = picture(menu)
        return [image.pixel(menu.actionGeometry(each).topRight() + QPoint(-8, 8)) == hover for each in menu.actions()]

    assert grounds() == [False, False]
    menu.setActiveAction(menu.actions()[1])
    assert grounds() == [False, True]
    menu.setActiveAction(menu.actions()[0])
    assert grounds() == [True, False]
    theme.apply(qapp, before)


def test_the_checked_line_has_a_tick(opened):
    with_tick, without = opened(("off", "a", True)), opened(("off", "a", True))
    assert with_tick.actions()[0].isChecked()
    assert not without.actions()[0].isChecked()
    assert picture(with_tick) != picture(without)
