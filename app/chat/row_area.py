"""A scroll area of rows, of which only those in sight are laid out.

A row is one Markdown block. QListView asks every row for its size again whenever one grows: 264 ms for the 13,500 rows of
a 1 MB conversation, where this area needs 2 ms for the whole frame (measured on two cores). Here offsets are summed from the first changed row (RowHeights), rows out
of sight have estimated heights, and what the reader looks at keeps its place when an estimate is corrected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from PySide6.QtCore import QElapsedTimer, QPointF, Qt, QTimer, Signal
from PySide6.QtGui import QColor, QHideEvent, QPainter, QPaintEvent, QResizeEvent, QTextDocument
from PySide6.QtWidgets import QAbstractScrollArea, QWidget

from app import theme as look
from app.chat.blocks import Row, Splice, Transcript
from app.chat.conversation import MessageView
from app.chat.documents import DocumentCache
from app.chat.row_heights import RowHeights
from app.chat.row_painter import Column, RowPainter, estimated_height, text_width
from app.store.records import MessageStats

FRAME_MILLISECONDS = 33
COST_SHARE = 8  # a frame that took c ms is followed by at least c * 8 ms of peace
LONGEST_PAUSE = 250  # ms; text that lags more than this feels stuck
FOLLOW_SLACK = 6  # pixels from the bottom that still count as "at the bottom"
BOTTOM_MARGIN = 24


class RowArea(QAbstractScrollArea):
    """Shows a Transcript. Follows the newest text while the reader is at the bottom, and only then.

    Signals:
        follow_changed: whether the view sticks to the newest text.
    """

    follow_changed = Signal(bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.verticalScrollBar().setSingleStep(42)
        self.viewport().setAutoFillBackground(False)
        self.transcript = Transcript()
        self.documents = DocumentCache()
        self.painter = RowPainter(self.documents)
        self._heights = RowHeights()
        self._column = Column(24, 680)
        self._is_following = True
        self._is_settling = False
        self._pending: dict[str, list[str]] = {}
        self._frame_cost = 0.0
        self._since_frame = QElapsedTimer()
        self._frame_timer = self._timer("frame", self._on_frame, single=True)
        look.notifier().theme_changed.connect(self._on_theme_changed)

    def _timer(self, name: str, do: object, single: bool) -> QTimer:
        timer = QTimer(self)
        timer.setObjectName(f"chat_view.{name}")
        timer.setSingleShot(single)
        timer.timeout.connect(do)
        return timer

    # ---- for subclasses

    def _on_spliced(self, splice: Splice) -> None:
        """Rows were replaced; positions kept from before must move along."""

    def _on_reset(self) -> None:
        """Another conversation is shown."""

    def _place_floating(self) -> None:
        """Rows moved: widgets above them follow."""

    def _selected(self, index: int) -> tuple[int, int] | None:
        """The selected document positions of a row."""
        return None

    def _shown_row(self, row: Row) -> Row:
        """The row as it is painted now."""
        return row

    def _paint_above(self, painter: QPainter, index: int, top: float) -> None:
        """Draw what lies above a row's text."""

    # ---- what is shown

    def set_messages(self, messages: Sequence[MessageView], keep_place: bool = False) -> None:
        """Show another conversation from its end, or (keep_place) another branch of this one where the reader is."""
        self._pending.clear()
        self._frame_timer.stop()
        self._on_reset()
        self.documents.clear()
        if keep_place and not self._is_following:
            self._apply(self.transcript.reset(messages))
            return
        self._set_following(True)
        self._apply(self.transcript.reset(messages))

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

    def show_message(self, message_id: str) -> None:
        """Bring the beginning of a message into sight (a search hit)."""
        if not self.transcript.has(message_id):
            return
        self._set_following(False)
        top = self._heights.top(self.transcript.rows_range(message_id).start)
        self.verticalScrollBar().setValue(int(top))

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
        self._on_spliced(splice)
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
        self._flush()

    # ---- where things are

    def _row_at(self, position: QPointF) -> int | None:
        y = position.y() + self.verticalScrollBar().value()
        if not 0 <= y < self._heights.total:
            return None
        return self._heights.row_at(y)

    def _document(self, index: int) -> QTextDocument | None:
        return self.painter.document(self.transcript.rows[index], self._column)

    def _bring_into_sight(self, rows: range) -> None:
        bar, page = self.verticalScrollBar(), self.viewport().height()
        top, bottom = self._heights.top(rows.start), self._heights.top(rows.stop)
        if bottom > bar.value() + page:
            bar.setValue(math.ceil(bottom) - page + BOTTOM_MARGIN)
        if top < bar.value():
            bar.setValue(int(top))
        self.viewport().update()

    # ---- painting

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        painter = QPainter(self.viewport())
        painter.fillRect(event.rect(), QColor(look.current().background))
        offset = self.verticalScrollBar().value()
        for index in self._visible_rows():
            top = self._heights.top(index) - offset
            if top > event.rect().bottom() or top + self._heights.height(index) < event.rect().top():
                continue
            row = self._shown_row(self.transcript.rows[index])
            self.painter.paint(painter, row, self._column, top, self._selected(index))
            self._paint_above(painter, index, top)
        painter.end()

    def _on_theme_changed(self, _theme: object) -> None:
        self.documents.clear()
        self.viewport().update()
