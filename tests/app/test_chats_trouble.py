"""A damaged or unwritable chats file, seen from the window: it comes up, says what is wrong, and offers the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app import application
from app.store import ChatStore, ConversationRecord, MessageRecord
from tests.app.window_parts import Parts, make_window

Open = Callable[[], Parts]


@pytest.fixture
def chats_file(tmp_path: Path) -> Path:
    """A file with two chats."""
    path = tmp_path / "chats.db"
    store = ChatStore(path)
    for name in ("a", "b"):
        chat = ConversationRecord(name, f"Chat {name}", 1.0, 1.0)
        store.add_message(chat, MessageRecord(f"m{name}", None, "user", "text " * 2000, "done", 1.0))
    store.close()
    return path


@pytest.fixture
def open_window(tmp_path: Path, qtbot: QtBot) -> Iterator[Open]:
    opened: list[Parts] = []

    def make() -> Parts:
        parts = make_window(tmp_path)
        opened.append(parts)
        qtbot.addWidget(parts.window)
        application._say_troubles(parts.window, parts.controller, parts.settings)
        parts.window.show()
        parts.load()
        return parts

    yield make
    for parts in opened:
        parts.window.close()


def test_a_damaged_file_is_told_and_repaired_with_one_button(chats_file: Path, open_window: Open, qtbot: QtBot) -> None:
    content = chats_file.read_bytes()
    chats_file.write_bytes(content[: len(content) - 3 * 4096])
    parts = open_window()
    notice = parts.window.panel.trouble
    assert notice.isVisible()
    assert "damaged" in notice.words.text()
    assert parts.window.panel.isVisible()
    parts.window.panel.send("Hello")
    [refused] = parts.controller.messages(parts.window.panel.chat_id)
    assert refused.state == "failed"
    assert "damaged" in refused.error
    assert notice.remedy.text() == "Repair"
    qtbot.mouseClick(notice.remedy, Qt.MouseButton.LeftButton)
    assert notice.words.text().startswith("Repaired.")
    parts.controller.regenerate(parts.window.panel.chat_id, refused.message_id)
    parts.run()
    assert [view.state for view in parts.controller.messages(parts.window.panel.chat_id)] == ["done", "done"]


def test_a_newer_file_is_told_without_a_repair_button(
    chats_file: Path, open_window: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.chat_store.VERSION", 0)  # as if a newer version had written it
    parts = open_window()
    assert "newer Ridgeline" in parts.window.panel.trouble.words.text()
    assert parts.window.panel.trouble.remedy.isHidden()
    assert {row.title for row in parts.controller.chats()} == {"Chat a", "Chat b"}


def test_a_good_file_says_nothing(chats_file: Path, open_window: Open) -> None:
    assert open_window().window.notice.isHidden()
