"""The chat view with real widgets: only what is in sight is laid out, the reader is left in peace, text can be taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from app import theme
from app.chat.blocks import RowKind, Transcript
from app.chat.conversation import MessageView
from app.chat.row_heights import RowHeights
from app.chat.view import ChatView
from app.store.records import MessageStats

LONG = "\n\n".join(f"Paragraph number {i} says something about ice and water." for i in range(60))


def user(key: str, text: str, **more: object) -> MessageView:
    return MessageView(key, "user", text, "done", **more)  # type: ignore[arg-type]


def reply(key: str, text: str, state: str = "done", **more: object) -> MessageView:
    return MessageView(key, "assistant", text, state, **more)  # type: ignore[arg-type]


@pytest.fixture
def view(qtbot: QtBot, qapp) -> ChatView:
    theme.apply(qapp, "dark")
    made = ChatView()
    qtbot.addWidget(made)
    made.resize(800, 600)
    made.set_column(50, 680)
    made.show()
    return made


def settle_frame(view: ChatView) -> None:
    view._flush()


def place_of(view: ChatView, row: int) -> float:
    """Top of a row in the viewport."""
    return view._heights.top(row) - view.verticalScrollBar().value()


def drag(view: ChatView, start: QPointF, end: QPointF) -> None:
    target = view.viewport()
    QTest.mousePress(target, Qt.MouseButton.LeftButton, pos=start.toPoint())
    middle = (start + end) / 2
    QTest.mouseMove(target, middle.toPoint())
    QTest.mouseMove(target, end.toPoint())
    QTest.mouseRelease(target, Qt.MouseButton.LeftButton, pos=end.toPoint())


def row_point(view: ChatView, row: int, x: float, dy: float = 4.0) -> QPointF:
    placed = view.painter.place(view.transcript.rows[row], view.column)
    return QPointF(x, place_of(view, row) + placed.origin.y() + dy)


# ---- laying out


def test_streaming_lays_out_only_the_tail(view: ChatView) -> None:
    view.set_messages([user("u", "Hello"), reply("a", LONG + "\n\nTail", "streaming")])
    kept = list(view.transcript.rows[:50])
    before = view.documents.layouts
    for word in (" grows", " word", " by", " word"):
        view.grow_message("a", word)
        settle_frame(view)
    assert view.documents.layouts - before <= 2 * 4
    assert all(new is old for new, old in zip(view.transcript.rows[:50], kept, strict=True))
    assert view.transcript.rows[-2].block is not None
    assert view.transcript.rows[-2].block.html == "Tail grows word by word"


def test_a_growing_code_block_is_appended_to_and_coloured_when_it_closes(view: ChatView) -> None:
    view.set_messages([reply("a", "```python\nx = 1", "streaming")])
    document = view.painter.document(view.transcript.rows[0], view.column)
    view.grow_message("a", "\ny = 2")
    settle_frame(view)
    assert view.painter.document(view.transcript.rows[0], view.column) is document
    assert document is not None
    assert document.toPlainText() == "x = 1\ny = 2"
    view.grow_message("a", "\n```\n")
    settle_frame(view)
    coloured = view.painter.document(view.transcript.rows[0], view.column)
    assert coloured is not None
    colours = {fragment.charFormat().foreground().color().name().upper() for fragment in fragments(coloured)}
    assert theme.DARK.code_number in colours


def fragments(document):
    block = document.begin()
    while block.isValid():
        iterator = block.begin()
        while not iterator.atEnd():
            yield iterator.fragment()
            iterator += 1
        block = block.next()


def test_text_is_shown_at_most_thirty_times_a_second(view: ChatView, qtbot: QtBot) -> None:
    view.set_messages([reply("a", "Start", "streaming")])
    frames = []
    original = view._flush

    def counted() -> None:
        frames.append(1)
        original()

    view._flush = counted  # type: ignore[method-assign]
    for _ in range(300):
        view.grow_message("a", " word")
    assert len(frames) <= 2
    qtbot.waitUntil(lambda: view.transcript.text_of("a").count("word") == 300, timeout=2000)
    assert len(frames) <= 4


def test_a_megabyte_opens_and_scrolls_with_few_layouts(view: ChatView) -> None:
    exchange = "Explain.\n\n" + LONG + "\n\n```python\n" + "\n".join(f"value_{i} = {i}" for i in range(100)) + "\n```\n"
    messages = []
    while sum(len(m.text) for m in messages) < 1_000_000:
        n = len(messages)
        messages += [user(f"u{n}", "Next question?"), reply(f"a{n}", exchange)]
    view.set_messages(messages)
    assert len(view.transcript.rows) > 10_000
    opened = view.documents.layouts
    assert opened < 60
    bar = view.verticalScrollBar()
    for position in range(0, bar.maximum(), bar.maximum() // 50):
        bar.setValue(position)
    assert view.documents.layouts - opened < 50 * 60
    assert len(view.documents) <= 160


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_one_megabyte_in_one_message_is_cut_into_rows(view: ChatView, role: str) -> None:
    text = "```\n" + "some line of a log file\n" * 45_000 + "```"
    view.set_messages([replace(user("m", text), role=role)])  # type: ignore[arg-type]
    assert view.documents.layouts < 40
    assert len(view.transcript.rows) > 100


def test_closed_documents_are_rebuilt_in_the_new_colours(view: ChatView, qapp) -> None:
    view.set_messages([reply("a", "See [this](https://example.org).")])
    theme.apply(qapp, "light")
    document = view.painter.document(view.transcript.rows[0], view.column)
    assert document is not None
    colours = {f.charFormat().foreground().color().name().upper() for f in fragments(document)}
    theme.apply(qapp, "dark")
    assert theme.LIGHT.accent in colours


# ---- scrolling (FIELD 45)


def test_it_follows_the_newest_text_while_the_reader_is_at_the_bottom(view: ChatView) -> None:
    view.set_messages([reply("a", LONG, "streaming")])
    for _ in range(5):
        view.grow_message("a", "\n\nAnother paragraph.")
        settle_frame(view)
    assert view.verticalScrollBar().value() == view.verticalScrollBar().maximum()
    assert view.jump_button.isHidden()


def test_it_never_moves_the_reader_who_scrolled_up(view: ChatView) -> None:
    view.set_messages([reply("a", LONG, "streaming")])
    bar = view.verticalScrollBar()
    bar.setValue(bar.maximum() - 400)
    assert not view.is_following
    row = view._visible_rows().start + 1
    before = place_of(view, row)
    for _ in range(20):
        view.grow_message("a", "\n\nAnother paragraph that comes in below.")
        settle_frame(view)
    view.change_message(reply("a", view.transcript.text_of("a")))
    view.append_message(reply("b", "A second reply."))
    assert place_of(view, row) == before
    assert not view.jump_button.isHidden()
    view.jump_button.click()
    assert bar.value() == bar.maximum()
    assert view.is_following
    assert view.jump_button.isHidden()


def test_a_wheel_up_while_streaming_stops_following_and_the_end_key_resumes(view: ChatView) -> None:
    view.set_messages([reply("a", LONG, "streaming")])
    view.verticalScrollBar().triggerAction(view.verticalScrollBar().SliderAction.SliderSingleStepSub)
    assert not view.is_following
    QTest.keyClick(view, Qt.Key.Key_End)
    assert view.is_following


def test_sending_brings_the_own_message_into_sight(view: ChatView) -> None:
    view.set_messages([reply("a", LONG)])
    view.verticalScrollBar().setValue(0)
    view.append_message(user("u", "My question"))
    assert view.verticalScrollBar().value() == view.verticalScrollBar().maximum()


def test_measuring_rows_above_keeps_what_the_reader_sees(view: ChatView) -> None:
    wide = "\n\n".join("Word " * (5 + 37 * (i % 9)) for i in range(120))
    view.set_messages([reply("a", wide)])
    bar = view.verticalScrollBar()
    for _ in range(60):
        row = view._visible_rows().start + 1
        before, value = place_of(view, row), bar.value()
        bar.setValue(value - 37)
        assert place_of(view, row) == pytest.approx(before + 37, abs=1)


def test_another_branch_keeps_the_place_and_another_chat_opens_at_its_end(view: ChatView) -> None:
    view.set_messages([reply("a", LONG)])
    bar = view.verticalScrollBar()
    bar.setValue(100)
    view.set_messages([reply("b", LONG)], keep_place=True)
    assert bar.value() == 100
    view.set_messages([reply("c", LONG)])
    assert bar.value() == bar.maximum() > 0


# ---- selecting and copying


def test_a_drag_selects_over_messages_and_copies_them(view: ChatView) -> None:
    view.set_messages([user("u", "The question"), reply("a", "First part.\n\n- one\n- two\n\nLast part.")])
    first, last = 0, len(view.transcript.rows) - 2
    drag(view, QPointF(view.column.left, place_of(view, first) + 20), row_point(view, last, 760))
    QTest.keyClick(view, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    expected = "The question\n\nFirst part.\n\n• one\n• two\n\nLast part."
    assert QGuiApplication.clipboard().text() == expected


def test_a_selection_survives_streaming(view: ChatView) -> None:
    view.set_messages([user("u", "Hello"), reply("a", "First paragraph.\n\nSecond", "streaming")])
    drag(view, row_point(view, 2, view.column.left), row_point(view, 3, 760))
    selected = view.selected_text()
    assert selected == "First paragraph.\n\nSecond"
    view.grow_message("a", " grows.\n\nThird paragraph.\n\n```\ncode\n```\n")
    settle_frame(view)
    view.change_message(reply("a", view.transcript.text_of("a")))
    assert view.selected_text() == selected


def test_select_all_copies_code_tables_and_lists_as_written(view: ChatView) -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |"
    view.set_messages([reply("a", f"1. x\n2. y\n\n```python\nif x:\n    y\n```\n\n{table}")])
    view.select_all()
    assert view.selected_text() == f"1. x\n2. y\n\nif x:\n    y\n\n{table}"


def test_a_double_click_selects_a_word(view: ChatView) -> None:
    view.set_messages([reply("a", "Sensible words here")])
    where = row_point(view, 0, view.column.left + 12)
    QTest.mouseDClick(view.viewport(), Qt.MouseButton.LeftButton, pos=where.toPoint())
    assert view.selected_text() == "Sensible"


def test_copy_button_copies_the_whole_code_and_nothing_else(view: ChatView) -> None:
    code = "\n".join(f"line_{i} = {i}" for i in range(300))
    view.set_messages([reply("a", f"Text\n\n```python\n{code}\n```")])
    view.verticalScrollBar().setValue(0)
    row = view.transcript.rows[1]
    rect = view._copy_rect(row, place_of(view, 1))
    assert rect is not None
    QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=rect.center().toPoint())
    assert QGuiApplication.clipboard().text() == code


def test_copy_message_gives_the_source(view: ChatView) -> None:
    view.set_messages([reply("a", "Some **bold** text")])
    view.copy_message("a")
    assert QGuiApplication.clipboard().text() == "Some **bold** text"


# ---- links, errors, actions


def test_a_link_asks_before_it_opens(view: ChatView) -> None:
    asked, opened = [], []
    view.links.ask = lambda address, then: asked.append((address, then))
    view.links.open_url = lambda url: opened.append(url.toString()) or True
    view.set_messages([reply("a", "[here](https://example.org/page)")])
    QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=row_point(view, 0, view.column.left + 8).toPoint())
    assert [address for address, _ in asked] == ["https://example.org/page"]
    assert opened == []
    asked[0][1]()
    assert opened == ["https://example.org/page"]
    view.links.ask_and_open("file:///etc/passwd")
    assert len(asked) == 1


def test_an_error_stands_in_its_message_and_offers_another_try(view: ChatView, qtbot: QtBot) -> None:
    failed = reply("a", "Half an answer", "failed", error="The step failed: out of memory. Close other programs.")
    view.set_messages([user("u", "Hi"), failed, user("u2", "Next")])
    kinds = [row.kind for row in view.transcript.rows if row.message_id == "a"]
    assert kinds == [RowKind.BLOCK, RowKind.ERROR, RowKind.FOOTER]
    row = next(i for i, row in enumerate(view.transcript.rows) if row.kind is RowKind.ERROR)
    with qtbot.waitSignal(view.retry_requested) as caught:
        QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=action_point(view, row, "retry"))
    assert caught.args == ["a"]
    QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=action_point(view, row, "copy-error"))
    assert QGuiApplication.clipboard().text() == failed.error


def action_point(view: ChatView, row: int, action: str) -> QPoint:
    """In the middle of the link to ``action`` in the row's last line; where that is hangs on the fonts of the machine."""
    document = view.painter.document(view.transcript.rows[row], view.column)
    assert document is not None
    y = document.size().height() - 8
    layout = document.documentLayout()
    its = [x for x in range(int(document.size().width())) if layout.anchorAt(QPointF(x, y)).endswith(action)]
    placed = view.painter.place(view.transcript.rows[row], view.column)
    return QPointF(placed.origin.x() + its[len(its) // 2], place_of(view, row) + placed.origin.y() + y).toPoint()


def test_figures_stand_under_a_reply_and_only_what_is_known(view: ChatView) -> None:
    stats = MessageStats(tokens_per_second=118.2, first_token_seconds=0.213, new_tokens=142, prompt_tokens=10)
    view.set_messages([reply("a", "Text", stats=stats), reply("b", "", "stopped"), reply("c", "Growing", "streaming")])
    footers = [row.text for row in view.transcript.rows if row.kind is RowKind.FOOTER]
    assert footers == ["118 tokens/s   first token 0.21 s   142 tokens", "stopped", ""]
    view.set_stats("c", MessageStats(new_tokens=3, prompt_tokens=10))
    assert view.transcript.rows[-1].text == "3 tokens"


def test_hovering_a_message_shows_its_actions_and_branches(view: ChatView, qtbot: QtBot) -> None:
    view.set_messages([user("u", "Question", branch_index=1, branch_count=3), reply("a", "Answer")])
    assert view.transcript.rows[1].branch == "2 of 3"
    QTest.mouseMove(view.viewport(), row_point(view, 0, 700).toPoint())
    bar = view.actions_bar
    assert bar.isVisible()
    assert bar.branch.text() == "2 of 3"
    assert bar.edit.isVisible()
    assert not bar.regenerate.isVisible()
    with qtbot.waitSignal(view.branch_requested) as caught:
        bar.previous.click()
    assert caught.args == ["u", 0]
    QTest.mouseMove(view.viewport(), row_point(view, 2, 200).toPoint())
    with qtbot.waitSignal(view.regenerate_requested) as again:
        bar.regenerate.click()
    assert again.args == ["a"]


def test_the_keyboard_reaches_messages_and_their_actions(view: ChatView) -> None:
    view.set_messages([user("u", "Question"), reply("a", "Answer")])
    view.setFocus()
    QTest.keyClick(view, Qt.Key.Key_Up, Qt.KeyboardModifier.AltModifier)
    assert view.actions_bar.message_id == "a"
    QTest.keyClick(view, Qt.Key.Key_Up, Qt.KeyboardModifier.AltModifier)
    assert view.actions_bar.message_id == "u"
    assert view.accessibleDescription() == "Question"
    assert view.actions_bar.copy.focusPolicy() & Qt.FocusPolicy.TabFocus


# ---- rows and heights without a screen


def test_a_reply_without_text_says_that_it_waits() -> None:
    transcript = Transcript()
    transcript.reset([reply("a", "", "streaming")])
    assert [row.kind for row in transcript.rows] == [RowKind.WAITING, RowKind.FOOTER]
    transcript.grow("a", "Word")
    assert [row.kind for row in transcript.rows] == [RowKind.BLOCK, RowKind.FOOTER]


def test_heights_add_up_after_any_change() -> None:
    heights = RowHeights()
    heights.splice(0, 0, [10, 20, 30])
    assert (heights.total, heights.row_at(0), heights.row_at(29.9), heights.row_at(30), heights.row_at(999)) == (
        60,
        0,
        1,
        2,
        2,
    )
    assert heights.set_measured(1, 25)
    assert not heights.set_measured(1, 25)
    heights.splice(1, 1, [1, 2, 3])
    assert [heights.top(i) for i in range(6)] == [0, 10, 11, 13, 16, 46]
    assert not heights.is_measured(1)
    assert RowHeights().row_at(5) == -1
