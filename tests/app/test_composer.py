"""The message box: keys, growth, input methods, the context meter, and a Stop that always works."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QInputMethodEvent, QKeyEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app import theme
from app.chat.composer import MOST_LINES, Composer


@pytest.fixture
def composer(qtbot: QtBot, qapp) -> Composer:
    theme.apply(qapp, "dark")
    made = Composer()
    qtbot.addWidget(made)
    made.resize(700, 120)
    made.show()
    made.edit.setFocus()
    return made


@pytest.fixture
def sent(composer: Composer) -> list[str]:
    texts: list[str] = []
    composer.send_requested.connect(texts.append)
    return texts


def preedit(composer: Composer, text: str, commit: str = "") -> None:
    event = QInputMethodEvent(text, [])
    event.setCommitString(commit)
    QApplication.sendEvent(composer.edit, event)


def test_enter_sends_and_shift_enter_begins_a_line(composer: Composer, sent: list[str]) -> None:
    QTest.keyClicks(composer.edit, "one")
    QTest.keyClick(composer.edit, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    QTest.keyClicks(composer.edit, "two")
    assert sent == []
    QTest.keyClick(composer.edit, Qt.Key.Key_Return)
    assert sent == ["one\ntwo"]
    assert composer.text == "one\ntwo"  # it stays until whoever sends it takes it
    assert composer.take_text() == "one\ntwo"
    assert composer.text == ""


@pytest.mark.parametrize("key", [Qt.Key.Key_Return, Qt.Key.Key_Enter])
def test_enter_does_not_send_while_an_input_method_composes(composer: Composer, sent: list[str], key: Qt.Key) -> None:
    """FIELD 49."""
    QTest.keyClicks(composer.edit, "hello ")
    preedit(composer, "にほn")
    QTest.keyClick(composer.edit, key)
    assert sent == []
    preedit(composer, "", commit="日本")
    assert composer.text == "hello 日本"
    QTest.keyClick(composer.edit, key)
    assert sent == ["hello 日本"]


def test_losing_the_focus_ends_composition(composer: Composer, sent: list[str]) -> None:
    preedit(composer, "に")
    composer.edit.clearFocus()
    assert not composer.edit.is_composing


def test_blank_text_is_not_sent(composer: Composer, sent: list[str]) -> None:
    QTest.keyClicks(composer.edit, "   ")
    QTest.keyClick(composer.edit, Qt.Key.Key_Return)
    assert sent == []
    assert not composer.button.isEnabled()


def test_it_grows_with_its_lines_up_to_a_limit(composer: Composer) -> None:
    heights = []
    for count in (1, 2, 5, MOST_LINES, MOST_LINES + 5, 100):
        composer.set_text("\n".join("line" for _ in range(count)))
        heights.append(composer.edit.height())
    assert heights == sorted(heights)
    assert heights[0] == composer.edit.height_for(1)
    assert heights[3] == heights[4] == heights[5] == composer.edit.height_for(MOST_LINES)
    composer.set_text("")
    assert composer.edit.height() == composer.edit.height_for(1)


def test_a_long_line_wraps_and_grows_too(composer: Composer) -> None:
    composer.set_text("word " * 60)
    assert composer.edit.height() > composer.edit.height_for(2)


def test_send_is_stop_while_generating_and_stop_always_works(composer: Composer, sent: list[str]) -> None:
    stops: list[bool] = []
    composer.stop_requested.connect(lambda: stops.append(True))
    composer.set_generating(True)
    assert (composer.button.text(), composer.button.isEnabled()) == ("Stop", True)
    composer.set_text("next question")
    QTest.keyClick(composer.edit, Qt.Key.Key_Return)
    assert sent == []
    assert composer.text == "next question"
    composer.button.click()
    assert stops == [True]
    composer.set_generating(False)
    assert composer.button.text() == "Send"
    composer.button.click()
    assert sent == ["next question"]


def test_the_meter_counts_in_words_and_fills(composer: Composer) -> None:
    composer.set_context(None, 8192)
    assert composer.meter.isHidden()
    composer.set_context(1402, 8192)
    assert composer.meter_label.text() == "1,402 of 8,192 tokens"
    assert composer.meter.value() == 171
    assert composer.meter.property("full") in (None, False)
    composer.set_context(8200, 8192)
    assert composer.meter.value() == composer.meter.maximum()
    assert composer.meter.property("full") is True
    assert composer.meter_label.text() == "8,200 of 8,192 tokens: more than fits"
    composer.set_context(0, 8192)
    assert composer.meter_label.text() == "0 of 8,192 tokens"


def test_the_meter_says_what_happens_at_the_limit(composer: Composer) -> None:
    composer.set_context(7500, 8192, "stop")
    assert composer.meter_label.text() == "7,500 of 8,192 tokens"
    assert "not sent" in composer.meter.toolTip()
    composer.set_context(7680, 8192, "drop_oldest")
    assert composer.meter_label.text() == "7,680 of 8,192 tokens"
    composer.set_context(7681, 8192, "drop_oldest")
    assert composer.meter_label.text() == "7,681 of 8,192 tokens: the oldest are left out"
    assert "From 7,680 tokens on the oldest messages are left out" in composer.meter_label.toolTip()
    composer.set_context(8000, 8192, "drop_oldest", max_tokens=100)
    assert composer.meter_label.text() == "8,000 of 8,192 tokens"


def test_editing_an_earlier_message_can_be_left(composer: Composer) -> None:
    composer.begin_edit("m1", "old words")
    assert composer.note.isVisible()
    assert composer.text == "old words"
    composer.cancel_edit()
    assert (composer.editing_id, composer.text) == ("", "")
    assert composer.note.isHidden()


@pytest.mark.parametrize("key", [Qt.Key.Key_K, Qt.Key.Key_E, Qt.Key.Key_B, Qt.Key.Key_J])
def test_window_shortcuts_win_over_editing_keys(composer: Composer, key: Qt.Key) -> None:
    assert not is_kept(composer, key)
    assert is_kept(composer, Qt.Key.Key_C)  # copying stays with the text


def is_kept(composer: Composer, key: Qt.Key) -> bool:
    """Whether the box claims Ctrl+key for itself when Qt asks, as it does before any shortcut runs."""
    event = QKeyEvent(QKeyEvent.Type.ShortcutOverride, key, Qt.KeyboardModifier.ControlModifier)
    event.ignore()
    QApplication.sendEvent(composer.edit, event)
    return event.isAccepted()


def test_the_draft_is_told_with_every_change(composer: Composer) -> None:
    drafts: list[str] = []
    composer.draft_changed.connect(drafts.append)
    QTest.keyClicks(composer.edit, "ab")
    assert drafts == ["a", "ab"]
