"""The chat view: a RowArea that a person reads, selects, copies from and acts on, by mouse and by keyboard."""

from __future__ import annotations

import math

from PySide6.QtCore import QEvent, QPoint, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QContextMenuEvent,
    QGuiApplication,
    QHideEvent,
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QPainter,
    QTextCursor,
)
from PySide6.QtWidgets import QPushButton, QWidget

from app import theme as look
from app.chat import documents as docs
from app.chat.blocks import Row, RowKind, Splice
from app.chat.conversation import MessageView
from app.chat.links import LinkOpener
from app.chat.message_actions import MessageActions
from app.chat.message_menu import message_menu
from app.chat.row_area import FOLLOW_SLACK, RowArea
from app.chat.selection import END, Point, Selection, text_of

DRAG_SCROLL_MILLISECONDS = 30
COPIED_MILLISECONDS = 1500


class ChatView(RowArea):
    """Shows one conversation's active branch.

    Signals:
        regenerate_requested, edit_requested, retry_requested: message_id.
        branch_requested: message_id, index of the alternative.
    """

    regenerate_requested = Signal(str)
    edit_requested = Signal(str)
    retry_requested = Signal(str)
    branch_requested = Signal(str, int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("transcript")
        self.setAccessibleName("Conversation")
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.viewport().setMouseTracking(True)
        self.links = LinkOpener(self)
        self._selection: Selection | None = None
        self._is_dragging = False
        self._pressed_link = ""
        self._press_at = QPointF()
        self._hover = QPointF(-1, -1)
        self._chosen = ""  # message chosen with the keyboard
        self._copied: Row | None = None
        self._drag_timer = self._timer("drag", self._on_drag_scroll, single=False)
        self._copied_timer = self._timer("copied", self._on_copied_seen, single=True)
        self.actions_bar = self._make_actions_bar()
        self.jump_button = QPushButton("Jump to latest", self.viewport())
        self.jump_button.setProperty("look", "pill")
        self.jump_button.clicked.connect(self.jump_to_latest)
        self.jump_button.hide()

    def _make_actions_bar(self) -> MessageActions:
        bar = MessageActions(self.viewport())
        bar.copy_asked.connect(self.copy_message)
        bar.regenerate_asked.connect(self.regenerate_requested)
        bar.edit_asked.connect(self.edit_requested)
        bar.branch_asked.connect(self.branch_requested)
        return bar

    def change_message(self, message: MessageView) -> None:
        super().change_message(message)
        bar = self.actions_bar
        if bar.message_id == message.message_id and bar.isVisible():
            bar.show_for(message)
            self._place_actions()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        super().hideEvent(event)
        self._drag_timer.stop()
        self._copied_timer.stop()

    # ---- what RowArea asks

    def _on_spliced(self, splice: Splice) -> None:
        if self._selection is not None:
            self._selection = self._selection.after(splice)

    def _on_reset(self) -> None:
        self._selection, self._chosen = None, ""

    def _selected(self, index: int) -> tuple[int, int] | None:
        return self._selection.span(index) if self._selection is not None else None

    def _paint_above(self, painter: QPainter, index: int, top: float) -> None:
        row = self.transcript.rows[index]
        self._paint_copy(painter, row, top)
        if self._chosen and row.message_id == self._chosen and self.hasFocus():
            gap = row.gap if index == self.transcript.rows_range(self._chosen).start else 0
            mark = QRectF(self._column.left - 12, top + gap, 2, self._heights.height(index) - gap)
            painter.fillRect(mark, QColor(look.current().accent))

    def _shown_row(self, row: Row) -> Row:
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
        self._copied_timer.start(COPIED_MILLISECONDS)
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

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:  # noqa: N802
        is_key = event.reason() is QContextMenuEvent.Reason.Keyboard
        index = None if is_key else self._row_at(QPointF(event.pos()))
        message_id = self._chosen if index is None else self.transcript.rows[index].message_id
        where = QPoint(int(self._column.left) + 20, 40) if is_key else event.pos()
        menu = message_menu(self, message_id, index)
        menu.popup(self.viewport().mapToGlobal(where))
