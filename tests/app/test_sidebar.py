"""The left column: groups, ages, search, rename, delete with undo, keyboard, both themes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from PySide6.QtCore import QItemSelectionModel, QModelIndex, QPoint, Qt
from PySide6.QtGui import QColor, QImage
from PySide6.QtWidgets import QApplication, QLineEdit
from pytestqt.qtbot import QtBot

from app import theme
from app.chat.chat_list import Row, RowRole, chat_rows
from app.chat.conversation import ChatSummary
from app.chat.sidebar import WIDTH, Sidebar
from app.chat.when import age_text, group_of
from tests.app.desk import Desk

NOW = datetime(2026, 11, 30, 15, 0)  # a Monday


@pytest.fixture
def desk(tmp_path: Path, qapp: QApplication) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    desk.load()
    yield desk
    desk.close()


@pytest.fixture
def bar(desk: Desk, qtbot: QtBot) -> Sidebar:
    bar = Sidebar(desk.controller)
    qtbot.addWidget(bar)
    bar.resize(WIDTH, 600)
    bar.show()
    return bar


def asked(desk: Desk, *texts: str, run: bool = True) -> list[str]:
    chats = []
    for text in texts:
        chats.append(desk.controller.new_chat())
        desk.controller.send(chats[-1], text)
    if run:
        desk.run()
    return chats


def rows(bar: Sidebar) -> list[Row]:
    return [bar._model.index(i).data(RowRole) for i in range(bar._model.rowCount())]


def titles(bar: Sidebar) -> list[str]:
    return [row.title for row in rows(bar)]


def click(bar: Sidebar, qtbot: QtBot, index: QModelIndex) -> None:
    qtbot.mouseClick(bar._list.viewport(), Qt.MouseButton.LeftButton, pos=bar._list.visualRect(index).center())


@pytest.mark.parametrize(
    ("ago", "group", "age"),
    [
        (timedelta(seconds=-90), "Today", "now"),
        (timedelta(seconds=59), "Today", "now"),
        (timedelta(seconds=130), "Today", "2 min"),
        (timedelta(minutes=59, seconds=59), "Today", "59 min"),
        (timedelta(hours=14, minutes=59), "Today", "14 h"),
        (timedelta(hours=15, minutes=1), "Yesterday", "Sun"),
        (timedelta(days=2), "Previous 7 days", "Sat"),
        (timedelta(days=7), "Previous 7 days", "23 Nov"),
        (timedelta(days=8), "Older", "22 Nov"),
        (timedelta(days=400), "Older", "Oct 2025"),
    ],
)
def test_ages(ago: timedelta, group: str, age: str) -> None:
    assert (group_of(NOW - ago, NOW), age_text(NOW - ago, NOW)) == (group, age)


def test_just_after_midnight_minutes_win_over_the_weekday() -> None:
    now = datetime(2026, 11, 30, 0, 5)
    then = datetime(2026, 11, 29, 23, 50)
    assert (group_of(then, now), age_text(then, now)) == ("Yesterday", "15 min")


def test_each_group_has_one_heading_and_only_if_it_has_chats() -> None:
    ages = (timedelta(0), timedelta(hours=1), timedelta(days=3), timedelta(days=90))
    chats = [ChatSummary(str(i), f"T{i}", (NOW - ago).timestamp(), i == 1, i) for i, ago in enumerate(ages)]
    shown = [(row.title, row.note) for row in chat_rows(chats, NOW)]
    assert shown == [
        ("Today", ""), ("T0", "now"), ("T1", "generating"),
        ("Previous 7 days", ""), ("T2", "Fri"), ("Older", ""), ("T3", "1 Sep"),
    ]  # fmt: skip


def test_a_chat_is_listed_with_its_first_message_and_marked_while_generating(desk: Desk, bar: Sidebar) -> None:
    assert titles(bar) == []
    assert bar._empty.isVisible()
    asked(desk, "Why ice floats", run=False)
    assert titles(bar) == ["Today", "Why ice floats"]
    assert rows(bar)[1].note == "generating"
    assert not bar._empty.isVisible()
    desk.run()
    assert (rows(bar)[1].note, rows(bar)[1].is_generating) == ("now", False)


def test_clicking_a_chat_chooses_it_and_a_heading_does_nothing(desk: Desk, bar: Sidebar, qtbot: QtBot) -> None:
    first, second = asked(desk, "First", "Second")
    chosen: list[str] = []
    bar.chat_chosen.connect(chosen.append)
    click(bar, qtbot, bar._model.index(0))
    assert chosen == []
    click(bar, qtbot, bar._model.index_of(first))
    click(bar, qtbot, bar._model.index_of(second))
    assert chosen == [first, second]


def test_the_keyboard_passes_over_headings(desk: Desk, bar: Sidebar, qtbot: QtBot) -> None:
    first, second = asked(desk, "First", "Second")
    record = desk.controller._chats[first]
    desk.controller._chats.put(type(record)(first, "First", 1.0, time.time() - 86_400 * 40))
    bar.refresh()
    assert titles(bar) == ["Today", "Second", "Older", "First"]
    chosen: list[str] = []
    bar.chat_chosen.connect(chosen.append)
    bar._list.setFocus()
    bar._list.setCurrentIndex(bar._model.index_of(second))
    qtbot.keyClick(bar._list, Qt.Key.Key_Down)
    qtbot.keyClick(bar._list, Qt.Key.Key_Return)
    assert chosen == [first]


def test_new_chat_button(bar: Sidebar, qtbot: QtBot) -> None:
    with qtbot.waitSignal(bar.new_chat_requested):
        qtbot.mouseClick(bar._new_button, Qt.MouseButton.LeftButton)


def test_search_shows_hits_and_a_hit_shows_its_branch(desk: Desk, bar: Sidebar, qtbot: QtBot) -> None:
    chat, _ = asked(desk, "Where is the needle", "Something else")
    desk.controller.edit(chat, desk.controller.messages(chat)[0].message_id, "Where is the haystack")
    desk.run()
    bar.focus_search()
    qtbot.keyClicks(bar._search, "needle")
    qtbot.waitUntil(lambda: titles(bar)[:1] == ["Chats"])
    assert titles(bar) == ["Chats", "Where is the needle", "Messages", "Where is the needle"]
    assert "needle" in rows(bar)[3].snippet
    messages: list[tuple[str, str]] = []
    bar.message_chosen.connect(lambda *args: messages.append(args))
    click(bar, qtbot, bar._model.index(3))
    assert desk.controller.messages(chat)[0].text == "Where is the needle"
    assert messages == [(chat, desk.controller.messages(chat)[0].message_id)]
    qtbot.keyClick(bar._search, Qt.Key.Key_Escape)
    qtbot.waitUntil(lambda: titles(bar)[:1] == ["Today"])


def test_search_without_hits_says_so(desk: Desk, bar: Sidebar) -> None:
    asked(desk, "First")
    bar._search.setText("zzz")
    bar.refresh()
    assert titles(bar) == ["Nothing found"]


def test_down_from_the_search_field_goes_to_the_first_hit(desk: Desk, bar: Sidebar, qtbot: QtBot) -> None:
    first, _ = asked(desk, "alpha", "beta")
    chosen: list[str] = []
    bar.chat_chosen.connect(chosen.append)
    bar._search.setText("alpha")
    qtbot.keyClick(bar._search, Qt.Key.Key_Down)
    qtbot.keyClick(bar._list, Qt.Key.Key_Return)
    assert chosen == [first]


def test_rename_in_place_survives_a_refresh(desk: Desk, bar: Sidebar, qtbot: QtBot) -> None:
    [chat] = asked(desk, "Old name")
    bar._list.setFocus()
    bar._list.setCurrentIndex(bar._model.index_of(chat))
    qtbot.keyClick(bar._list, Qt.Key.Key_F2)
    editor = bar._list.findChild(QLineEdit)
    assert editor is not None
    assert editor.text() == "Old name"
    asked(desk, "Another chat", run=False)  # moves the rows; the field must stay
    assert bar._list.findChild(QLineEdit) is editor
    editor.setText("New name")
    qtbot.keyClick(editor, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: desk.controller.title(chat) == "New name")
    qtbot.waitUntil(lambda: titles(bar) == ["Today", "Another chat", "New name"])


def test_delete_offers_the_way_back(desk: Desk, bar: Sidebar, qtbot: QtBot) -> None:
    first, second = asked(desk, "First", "Second")
    bar._list.setFocus()
    bar._list.setCurrentIndex(bar._model.index_of(first))
    qtbot.keyClick(bar._list, Qt.Key.Key_Delete)
    assert titles(bar) == ["Today", "Second"]
    assert bar._undo_bar.isVisible()
    chosen: list[str] = []
    bar.chat_chosen.connect(chosen.append)
    qtbot.mouseClick(bar._undo_bar._button, Qt.MouseButton.LeftButton)
    assert set(titles(bar)) == {"Today", "First", "Second"}
    assert chosen == [first]
    assert not bar._undo_bar.isVisible()
    assert second in {row.chat_id for row in rows(bar)}


def test_the_context_menu_belongs_to_chats(desk: Desk, bar: Sidebar) -> None:
    [chat] = asked(desk, "First")
    assert bar._menu_for(bar._model.index(0)) is None
    menu = bar._menu_for(bar._model.index_of(chat))
    assert menu is not None
    assert [action.text() for action in menu.actions()] == ["Rename", "Delete"]
    menu.actions()[1].trigger()
    assert titles(bar) == []
    menu.deleteLater()


def test_a_chat_can_be_deleted_from_a_message_found_in_it(desk: Desk, bar: Sidebar) -> None:
    asked(desk, "A needle")
    bar._search.setText("needle")
    bar.refresh()
    menu = bar._menu_for(bar._model.index(3))
    assert menu is not None
    assert [action.text() for action in menu.actions()] == ["Delete chat"]
    menu.actions()[0].trigger()
    assert desk.controller.chats() == []
    assert titles(bar) == ["Nothing found"]
    menu.deleteLater()


def test_a_change_without_a_new_order_only_repaints(desk: Desk, bar: Sidebar) -> None:
    first, second = asked(desk, "First", "Second")
    resets: list[object] = []
    bar._model.modelReset.connect(lambda: resets.append(1))
    desk.controller.rename(second, "Renamed")
    assert titles(bar) == ["Today", "Renamed", "First"]
    assert resets == []
    desk.controller.send(first, "Again")
    assert titles(bar) == ["Today", "First", "Renamed"]
    assert len(resets) == 1


def test_the_keyboards_place_survives_a_new_order(desk: Desk, bar: Sidebar) -> None:
    first, second, third = asked(desk, "First", "Second", "Third")
    bar._list.setFocus()
    bar._list.selectionModel().setCurrentIndex(
        bar._model.index_of(second), QItemSelectionModel.SelectionFlag.ClearAndSelect
    )
    desk.controller.send(first, "Again")
    current = bar._model.row(bar._list.currentIndex())
    assert current is not None
    assert current.chat_id == second
    assert third in {row.chat_id for row in rows(bar)}


def colours_in(image: QImage, area_left: int, area_right: int) -> set[str]:
    return {
        image.pixelColor(x, y).name().upper()
        for x in range(area_left, area_right)
        for y in range(90, min(400, image.height()))
    }


@pytest.mark.parametrize("mode", ["dark", "light"])
def test_it_looks_after_the_theme(desk: Desk, bar: Sidebar, qapp: QApplication, mode: theme.Mode) -> None:
    colours = theme.apply(qapp, mode)
    done, running = asked(desk, "Done already")[0], asked(desk, "Running", run=False)[0]
    bar.set_open_chat(done)
    image = bar.grab().toImage()
    assert image.pixelColor(3, 580).name().upper() == colours.panel
    dot = colours.chats[desk.controller.colour_index(running)]
    assert dot in colours_in(image, 10, 30)
    assert colours.raised in colours_in(image, 40, 200)
    at = bar._list.visualRect(bar._model.index_of(done)).translated(bar._list.pos()).topLeft() + QPoint(60, 6)
    assert image.pixelColor(at).name().upper() == QColor(colours.raised).name().upper()
    desk.run()
    assert dot not in colours_in(bar.grab().toImage(), 10, 30)


def test_a_long_title_is_elided_before_its_age(desk: Desk, bar: Sidebar) -> None:
    asked(desk, "A very long title that cannot possibly fit into this narrow column at all")
    image = bar.grab().toImage()
    rect = bar._list.visualRect(bar._model.index(1)).translated(bar._list.pos())
    ground = image.pixelColor(rect.left() + 60, rect.top() + 4)
    note = bar._list.fontMetrics().horizontalAdvance("now")
    gap = [
        image.pixelColor(x, y) == ground
        for x in range(rect.right() - 18 - note - 6, rect.right() - 18 - note - 2)
        for y in range(rect.top() + 4, rect.bottom() - 4)
    ]
    assert all(gap)


def test_a_thousand_chats_are_listed_quickly(desk: Desk, bar: Sidebar) -> None:
    chats = [ChatSummary(str(i), f"Chat {i}", time.time() - i * 3600, False, i % 6) for i in range(1000)]
    started = time.perf_counter()
    for _ in range(5):
        bar._model.show_rows(chat_rows(chats, datetime.now()))
        bar.grab()
    assert (time.perf_counter() - started) / 5 < 0.25
