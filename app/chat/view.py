"""The chat view: a scroll area of rows, of which only those in sight are laid out.

A row is one Markdown block. QListView asks every row for its size again whenever one grows, which at 30 frames a second
and thousands of rows is more than the frame has; here offsets are summed from the first changed row (RowHeights),
rows out of sight have estimated heights, and what the reader looks at keeps its place when an estimate is corrected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from PySide6.QtCore import QElapsedTimer, QEvent, QPoint, QPointF, QRectF, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QColor,
    QContextMenuEvent,
    QGuiApplication,
    QHideEvent,
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QTextCursor,
    QTextDocument,
)
from PySide6.QtWidgets import QAbstractScrollArea, QPushButton, QWidget

from app import theme as look
from app.chat import documents as docs
from app.chat.blocks import Row, RowKind, Splice, Transcript
from app.chat.conversation import MessageView
from app.chat.links import LinkOpener
from app.chat.message_actions import MessageActions
from app.chat.message_menu import message_menu
from app.chat.row_heights import RowHeights
from app.chat.row_painter import Column, RowPainter, estimated_height, text_width
from app.chat.selection import END, Point, Selection, text_of
from app.store.records import MessageStats

FRAME_MILLISECONDS = 33
COST_SHARE = 8  # a frame that took c ms is followed by at least c * 8 ms of peace
LONGEST_PAUSE = 250  # ms; text that lags more than this feels stuck
FOLLOW_SLACK = 6  # pixels from the bottom that still count as "at the bottom"
BOTTOM_MARGIN = 24
DRAG_SCROLL_MILLISECONDS = 30


class ChatView(QAbstractScrollArea):
    """Shows one conversation's active branch.

    Signals:
        regenerate_requested, edit_requested, retry_requested: message_id.
        branch_requested: message_id, index of the alternative.
        follow_changed: whether the view sticks to the newest text.
    """

    regenerate_requested = Signal(str)
    edit_requested = Signal(str)
    retry_requested = Signal(str)
    branch_requested = Signal(str, int)
    follow_changed = Signal(bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("transcript")
        self.setAccessibleName("Conversation")
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.verticalScrollBar().setSingleStep(42)
        self.viewport().setMouseTracking(True)
        self.viewport().setAutoFillBackground(False)
        self.transcript = Transcript()
        self.documents = docs.DocumentCache()
        self.painter = RowPainter(self.documents)
        self.links = LinkOpener(self)
        self._heights = RowHeights()
        self._column = Column(24, 680)
        self._selection: Selection | None = None
        self._is_following = True
        self._is_settling = False
        self._is_dragging = False
        self._pressed_link = ""
        self._press_at = QPointF()
        self._hover = QPointF(-1, -1)
        self._chosen = ""  # message chosen with the keyboard
        self._copied: Row | None = None
        self._pending: dict[str, list[str]] = {}
        self._frame_cost = 0.0
        self._since_frame = QElapsedTimer()
        self._frame_timer = self._timer("frame", self._on_frame, single=True)
        self._drag_timer = self._timer("drag", self._on_drag_scroll, single=False)
        self._copied_timer = self._timer("copied", self._on_copied_seen, single=True)
        self.actions_bar = self._make_actions_bar()
        self.jump_button = QPushButton("Jump to latest", self.viewport())
        self.jump_button.setProperty("look", "pill")
        self.jump_button.clicked.connect(self.jump_to_latest)
        self.jump_button.hide()
        look.notifier().theme_changed.connect(self._on_theme_changed)

    def _timer(self, name: str, do: object, single: bool) -> QTimer:
        timer = QTimer(self)
        timer.setObjectName(f"chat_view.{name}")
        timer.setSingleShot(single)
        timer.timeout.connect(do)
        return timer

    def _make_actions_bar(self) -> MessageActions:
        bar = MessageActions(self.viewport())
        bar.copy_asked.connect(self.copy_message)
        bar.regenerate_asked.connect(self.regenerate_requested)
        bar.edit_asked.connect(self.edit_requested)
        bar.branch_asked.connect(self.branch_requested)
        return bar

    # ---- what is shown

    def set_messages(self, messages: Sequence[MessageView], keep_place: bool = False) -> None:
        """Show another conversation from its end, or (keep_place) another branch of this one where the reader is."""
        self._pending.clear()
        self._frame_timer.stop()
        self._selection, self._chosen = None, ""
        self.documents.clear()
        if keep_place and not self._is_following:
            self._apply(self.transcript.reset(messages))
            return
        self._set_following(True)
        self._apply(self.transcript.reset(messages))

    def show_message(self, message_id: str) -> None:
        """Bring the beginning of a message into sight (a search hit)."""
        if not self.transcript.has(message_id):
            return
        self._set_following(False)
        top = self._heights.top(self.transcript.rows_range(message_id).start)
        self.verticalScrollBar().setValue(int(top))

    def append_message(self, message: MessageView) -> None:
        """A new message: what the user just sent is always brought into sight."""
        self._flush()
        if message.role == "user":
            self._set_following(True)
        self._apply(self.transcript.append(message))

    def grow_message(self, message_id: str, added: str) -> None:
        """Text streamed into a reply; shown with the next frame, at most 30 a second."""
        if not added or not self.transcript.has(message_id):
            return
        self._pending.setdefault(message_id, []).append(added)
        if self._frame_timer.isActive():
            return
        pause = min(LONGEST_PAUSE, max(FRAME_MILLISECONDS, COST_SHARE * self._frame_cost))
        waited = self._since_frame.elapsed() if self._since_frame.isValid() else pause
        if waited >= pause:
            self._on_frame()
        else:
            self._frame_timer.start(math.ceil(pause - waited))

    def change_message(self, message: MessageView) -> None:
        """A message finished, failed or gained an alternative."""
        self._flush()
        if self.transcript.has(message.message_id):
            self._apply(self.transcript.change(message))
            if self.actions_bar.message_id == message.message_id and self.actions_bar.isVisible():
                self.actions_bar.show_for(message)
                self._place_actions()

    def set_stats(self, message_id: str, stats: MessageStats) -> None:
        """Figures so far of a reply that is still growing."""
        if self.transcript.has(message_id):
            self._apply(self.transcript.set_stats(message_id, stats))

    def set_column(self, left: float, width: float) -> None:
        """Where the reading column lies in the viewport, pixels."""
        column = Column(left, width)
        if column == self._column:
            return
        is_wider = column.width != self._column.width
        self._column = column
        if is_wider:
            self._estimate_all()
        self._refresh()

    @property
    def column(self) -> Column:
        return self._column

    @property
    def is_following(self) -> bool:
        return self._is_following

    def jump_to_latest(self) -> None:
        self._set_following(True)
        self._refresh()

    def _on_frame(self) -> None:
        clock = QElapsedTimer()
        clock.start()
        self._flush()
        self._frame_cost = clock.nsecsElapsed() / 1e6
        self._since_frame.start()

    def _flush(self) -> None:
        """Put waiting text into the transcript."""
        self._frame_timer.stop()
        pending, self._pending = self._pending, {}
        for message_id, pieces in pending.items():
            if self.transcript.has(message_id):
                first = self.transcript.rows_range(message_id).start
                old = self.transcript.rows[first:]
                splice = self.transcript.grow(message_id, "".join(pieces))
                self._keep_growing_document(old, first, splice)
                self._apply(splice)

    def _keep_growing_document(self, old: list[Row], first: int, splice: Splice) -> None:
        at = splice.start - first
        if splice.removed and splice.inserted and at < len(old):
            new = self.transcript.rows[splice.start]
            self.documents.grow(old[at], new, text_width(new, self._column))

    def _apply(self, splice: Splice) -> None:
        rows = self.transcript.rows[splice.start : splice.start + splice.inserted]
        self._heights.splice(splice.start, splice.removed, [estimated_height(row, self._column) for row in rows])
        if self._selection is not None:
            self._selection = self._selection.after(splice)
        value = self.verticalScrollBar().value()
        self._settle()
        if self.verticalScrollBar().value() == value and splice.start < len(self._heights):
            top = int(self._heights.top(splice.start)) - value
            self.viewport().update(0, max(0, top), self.viewport().width(), self.viewport().height() - max(0, top))
        else:
            self.viewport().update()
        self._place_floating()

    def _estimate_all(self) -> None:
        rows = self.transcript.rows
        self._heights.splice(0, len(self._heights), [estimated_height(row, self._column) for row in rows])

    # ---- scrolling

    def _settle(self) -> None:
        """Lay out the rows in sight and correct the scroll range, keeping in place what the reader looks at."""
        if self._is_settling:
            return
        self._is_settling = True
        bar = self.verticalScrollBar()
        for _ in range(12):  # each pass measures at least one new row, and few fit the screen
            self._set_range()
            if self._is_following:
                bar.setValue(bar.maximum())
            if not self._measure_visible():
                break
        self._set_range()
        if self._is_following:
            bar.setValue(bar.maximum())
        self._is_settling = False

    def _set_range(self) -> None:
        bar, page = self.verticalScrollBar(), self.viewport().height()
        bar.setPageStep(page)
        bar.setRange(0, max(0, math.ceil(self._heights.total) + BOTTOM_MARGIN - page))

    def _measure_visible(self) -> bool:
        """Measure rows in sight that are only estimated; returns whether any was."""
        bar, heights = self.verticalScrollBar(), self._heights
        rows = self._visible_rows()
        fresh = [row for row in rows if not heights.is_measured(row)]
        if not fresh:
            return False
        known = [row for row in rows if heights.is_measured(row)]
        anchor = known[0] if known else rows[0]
        before = heights.top(anchor)
        for row in fresh:
            heights.set_measured(row, math.ceil(self.painter.place(self.transcript.rows[row], self._column).height))
        moved = heights.top(anchor) - before
        if moved:
            self._set_range()
            bar.setValue(bar.value() + round(moved))
        return True

    def _visible_rows(self) -> range:
        if not len(self._heights):
            return range(0)
        top = self.verticalScrollBar().value()
        return range(self._heights.row_at(top), self._heights.row_at(top + self.viewport().height()) + 1)

    def _refresh(self) -> None:
        self._settle()
        self._place_floating()
        self.viewport().update()

    def scrollContentsBy(self, dx: int, dy: int) -> None:  # noqa: N802
        """Called by Qt when the scroll bar moved; only the reader's own moves change whether we follow."""
        if self._is_settling:
            return
        bar = self.verticalScrollBar()
        self._set_following(bar.value() >= bar.maximum() - FOLLOW_SLACK)
        self._refresh()

    def _set_following(self, is_following: bool) -> None:
        if is_following != self._is_following:
            self._is_following = is_following
            self.follow_changed.emit(is_following)

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        super().resizeEvent(event)
        self._refresh()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        super().hideEvent(event)
        self._drag_timer.stop()
        self._flush()
        self._copied_timer.stop()

    # ---- painting

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        painter = QPainter(self.viewport())
        painter.fillRect(event.rect(), QColor(look.current().background))
        offset = self.verticalScrollBar().value()
        for index in self._visible_rows():
            top = self._heights.top(index) - offset
            if top > event.rect().bottom() or top + self._heights.height(index) < event.rect().top():
                continue
            row = self.transcript.rows[index]
            selected = self._selection.span(index) if self._selection is not None else None
            shown = self._without_branch(row)
            self.painter.paint(painter, shown, self._column, top, selected)
            self._paint_copy(painter, row, top)
            if self._chosen and row.message_id == self._chosen and self.hasFocus():
                mark = QRectF(self._column.left - 12, top + row.gap, 2, self._heights.height(index) - row.gap)
                painter.fillRect(mark, QColor(look.current().accent))
        painter.end()

    def _without_branch(self, row: Row) -> Row:
        """The toolbar has its own "2 of 3"; the painted one would show through."""
        bar = self.actions_bar
        if row.kind is RowKind.FOOTER and row.branch and bar.isVisible() and bar.message_id == row.message_id:
            return Row(row.message_id, row.role, row.kind, row.gap, text=row.text)
        return row

    def _paint_copy(self, painter: QPainter, row: Row, top: float) -> None:
        rect = self._copy_rect(row, top)
        if rect is not None:
            label = "Copied" if self._copied is row else "Copy"
            self.painter.paint_copy_button(painter, rect, label, rect.contains(self._hover))

    def _copy_rect(self, row: Row, top: float) -> QRectF | None:
        if not self.painter.has_copy_button(row):
            return None
        return self.painter.copy_button(self.painter.place(row, self._column)).translated(0, top)

    def _on_theme_changed(self, _theme: object) -> None:
        self.documents.clear()
        self.viewport().update()

    # ---- what floats above the rows

    def _place_floating(self) -> None:
        self._place_actions()
        bar = self.verticalScrollBar()
        is_away = not self._is_following and bar.value() < bar.maximum() - 2 * FOLLOW_SLACK
        self.jump_button.setVisible(is_away)
        if is_away:
            size: QSize = self.jump_button.sizeHint()
            left = self._column.left + (self._column.width - size.width()) / 2
            self.jump_button.setGeometry(
                int(left), self.viewport().height() - size.height() - 12, size.width(), size.height()
            )

    def _show_actions_for(self, message_id: str) -> None:
        if not message_id:
            self.actions_bar.hide()
        elif message_id != self.actions_bar.message_id or not self.actions_bar.isVisible():
            self.actions_bar.show_for(self.transcript.message_of(message_id))
            self._place_actions()
            self.viewport().update()

    def _place_actions(self) -> None:
        bar = self.actions_bar
        if bar.isHidden():
            return
        if not self.transcript.has(bar.message_id):
            bar.hide()
            return
        footer = self.transcript.rows_range(bar.message_id).stop - 1
        top = self._heights.top(footer) - self.verticalScrollBar().value()
        size = bar.sizeHint()
        right = self._column.left + self._column.width
        bar.setGeometry(int(right - size.width()), int(top) + 2, size.width(), size.height())

    # ---- mouse

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        if event.button() is not Qt.MouseButton.LeftButton:
            return
        self._press_at = event.position()
        code_row = self._copy_button_at(event.position())
        if code_row is not None:
            self.copy_code(code_row)
            return
        self._pressed_link = self._link_at(event.position())
        point = self._point_at(event.position())
        if point is None:
            return
        is_extending = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier) and self._selection is not None
        anchor = self._selection.anchor if is_extending and self._selection else point
        self._selection = Selection(anchor, point)
        self._is_dragging = True
        self.viewport().update()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        self._hover = event.position()
        if self._is_dragging:
            self._drag_to(event.position())
            return
        self._update_hover()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        self._drag_timer.stop()
        was_dragging, self._is_dragging = self._is_dragging, False
        if not was_dragging:
            return
        moved = (event.position() - self._press_at).manhattanLength()
        if self._pressed_link and moved < 4:
            self._follow_link(self._pressed_link, event.position())
        self._pressed_link = ""
        if self._selection is not None and self._selection.is_empty:
            self._selection = None

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Select the word under the pointer."""
        point = self._point_at(event.position())
        document = self._document(point.row) if point else None
        if point is None or document is None:
            return
        cursor = QTextCursor(document)
        cursor.setPosition(point.position)
        cursor.select(QTextCursor.SelectionType.WordUnderCursor)
        self._selection = Selection(Point(point.row, cursor.selectionStart()), Point(point.row, cursor.selectionEnd()))
        self.viewport().update()

    def leaveEvent(self, event: QEvent) -> None:  # noqa: N802
        self._hover = QPointF(-1, -1)
        if not self._chosen:
            self.actions_bar.hide()
        self.viewport().update()

    def _update_hover(self) -> None:
        index = self._row_at(self._hover)
        if index is not None:
            self._show_actions_for(self.transcript.rows[index].message_id)
        link = self._link_at(self._hover)
        is_hand = bool(link) or self._copy_button_at(self._hover) is not None
        is_text = index is not None and self.transcript.rows[index].is_selectable
        shape = Qt.CursorShape
        self.viewport().setCursor(
            shape.PointingHandCursor if is_hand else shape.IBeamCursor if is_text else shape.ArrowCursor
        )
        self.viewport().setToolTip(link if not link.startswith(docs.ACTION_SCHEME) else "")
        if is_hand or self._copied is not None:
            self.viewport().update()

    def _drag_to(self, position: QPointF) -> None:
        is_outside = position.y() < 0 or position.y() > self.viewport().height()
        if is_outside and not self._drag_timer.isActive():
            self._drag_timer.start(DRAG_SCROLL_MILLISECONDS)
        elif not is_outside:
            self._drag_timer.stop()
        point = self._point_at(position)
        if point is not None and self._selection is not None:
            self._selection = Selection(self._selection.anchor, point)
            self.viewport().update()

    def _on_drag_scroll(self) -> None:
        y = self._hover.y()
        beyond = y if y < 0 else y - self.viewport().height()
        bar = self.verticalScrollBar()
        bar.setValue(bar.value() + int(max(-60, min(60, beyond))))
        self._drag_to(self._hover)

    def _row_at(self, position: QPointF) -> int | None:
        y = position.y() + self.verticalScrollBar().value()
        if not 0 <= y < self._heights.total:
            return None
        return self._heights.row_at(y)

    def _document(self, index: int) -> QTextDocument | None:
        return self.painter.document(self.transcript.rows[index], self._column)

    def _point_at(self, position: QPointF) -> Point | None:
        """The nearest text position; between rows, the nearest row's."""
        y = position.y() + self.verticalScrollBar().value()
        index = self._heights.row_at(max(0.0, y))
        while index > 0 and not self.transcript.rows[index].is_selectable:
            index -= 1
            y = math.inf
        document = self._document(index) if index >= 0 else None
        if document is None:
            return Point(index, 0) if index >= 0 else None
        placed = self.painter.place(self.transcript.rows[index], self._column)
        if y == math.inf:
            return Point(index, document.characterCount() - 1)
        local = QPointF(position.x(), y - self._heights.top(index)) - placed.origin
        hit = document.documentLayout().hitTest(local, Qt.HitTestAccuracy.FuzzyHit)
        return Point(index, max(0, hit))

    def _link_at(self, position: QPointF) -> str:
        index = self._row_at(position)
        document = self._document(index) if index is not None else None
        if index is None or document is None:
            return ""
        placed = self.painter.place(self.transcript.rows[index], self._column)
        top = self._heights.top(index) - self.verticalScrollBar().value()
        return document.documentLayout().anchorAt(position - QPointF(0, top) - placed.origin)

    def _copy_button_at(self, position: QPointF) -> int | None:
        index = self._row_at(position)
        if index is None:
            return None
        rect = self._copy_rect(self.transcript.rows[index], self._heights.top(index) - self.verticalScrollBar().value())
        return index if rect is not None and rect.contains(position) else None

    def _follow_link(self, link: str, position: QPointF) -> None:
        if not link.startswith(docs.ACTION_SCHEME):
            self.links.ask_and_open(link)
            return
        index = self._row_at(position)
        if index is None:
            return
        row = self.transcript.rows[index]
        if link == docs.ACTION_SCHEME + "retry":
            self.retry_requested.emit(row.message_id)
        else:
            QGuiApplication.clipboard().setText(row.text)

    # ---- copying

    def selected_text(self) -> str:
        if self._selection is None:
            return ""
        return text_of(self.transcript.rows, self._selection, self._plain)

    def _plain(self, row: Row, start: int, end: int) -> str:
        document = docs.build(row, look.current())
        return docs.plain_text(document, start, None if end == END else end)

    def copy(self) -> None:
        """Put the selected text on the clipboard; nothing selected changes nothing."""
        text = self.selected_text()
        if text:
            QGuiApplication.clipboard().setText(text)

    def copy_message(self, message_id: str) -> None:
        self._flush()
        QGuiApplication.clipboard().setText(self.transcript.text_of(message_id))

    def copy_code(self, index: int) -> None:
        """Copy the whole code block that begins at row ``index``."""
        rows = self.transcript.rows
        pieces: list[str] = []
        for row in rows[index:]:
            if row.block is None or (pieces and not row.block.continues):
                break
            pieces.append(row.block.text)
        QGuiApplication.clipboard().setText("\n".join(pieces))
        self._copied = rows[index]
        self._copied_timer.start(1500)
        self.viewport().update()

    def _on_copied_seen(self) -> None:
        self._copied = None
        self.viewport().update()

    def select_all(self) -> None:
        if self.transcript.rows:
            self._selection = Selection(Point(0, 0), Point(len(self.transcript.rows) - 1, END))
            self.viewport().update()

    # ---- keyboard

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        bar, key = self.verticalScrollBar(), event.key()
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        elif event.matches(QKeySequence.StandardKey.SelectAll):
            self.select_all()
        elif event.modifiers() & Qt.KeyboardModifier.AltModifier and key in (Qt.Key.Key_Up, Qt.Key.Key_Down):
            self.choose_message(-1 if key == Qt.Key.Key_Up else 1)
        elif key == Qt.Key.Key_Home:
            bar.setValue(0)
        elif key == Qt.Key.Key_End:
            self.jump_to_latest()
        else:
            super().keyPressEvent(event)

    def choose_message(self, by: int) -> None:
        """Move the keyboard's choice to another message: its actions appear, Tab goes to them."""
        ids = self.transcript.message_ids
        if not ids:
            return
        at = ids.index(self._chosen) + by if self._chosen in ids else len(ids) - 1
        self._chosen = ids[max(0, min(at, len(ids) - 1))]
        self.setAccessibleDescription(self.transcript.text_of(self._chosen))
        self._show_actions_for(self._chosen)
        self._bring_into_sight(self.transcript.rows_range(self._chosen))

    def _bring_into_sight(self, rows: range) -> None:
        bar, page = self.verticalScrollBar(), self.viewport().height()
        top, bottom = self._heights.top(rows.start), self._heights.top(rows.stop)
        if bottom > bar.value() + page:
            bar.setValue(math.ceil(bottom) - page + BOTTOM_MARGIN)
        if top < bar.value():
            bar.setValue(int(top))
        self.viewport().update()

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:  # noqa: N802
        is_key = event.reason() is QContextMenuEvent.Reason.Keyboard
        index = None if is_key else self._row_at(QPointF(event.pos()))
        message_id = self._chosen if index is None else self.transcript.rows[index].message_id
        where = QPoint(int(self._column.left) + 20, 40) if is_key else event.pos()
        menu = message_menu(self, message_id, index)
        menu.popup(self.viewport().mapToGlobal(where))
