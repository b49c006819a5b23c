"""Where a row's parts lie inside the reading column, and how they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import (
    QAbstractTextDocumentLayout,
    QColor,
    QFontMetricsF,
    QPainter,
    QPainterPath,
    QPalette,
    QPen,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
)

from app import theme as look
from app.chat.blocks import Row, RowKind
from app.chat.documents import DocumentCache
from app.chat.markdown import Block, BlockKind
from app.theme import Theme

INDENT = 24
QUOTE_INDENT = 16
CODE_PAD_X, CODE_PAD_Y = 13, 11
BUBBLE_PAD_X, BUBBLE_PAD_Y = 14, 9
ERROR_PAD = 12
FOOTER_HEIGHT = 26
USER_FOOTER_HEIGHT = 22
RULE_HEIGHT = 9
BUBBLE_SHARE = 0.82  # of the column, at most
RADIUS = 10

_CHAR_WIDTH, _LINE_HEIGHT = 6.9, 21.0  # for estimates only


@dataclass(frozen=True, slots=True)
class Column:
    """The reading column inside the viewport, pixels."""

    left: float
    width: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A row measured: its frame and the document's corner, relative to the row's top and the viewport's left."""

    frame: QRectF  # bubble, code box or text
    origin: QPointF
    height: float  # with the gap above


class RowPainter:
    """Measures and draws rows with documents from ``documents``."""

    def __init__(self, documents: DocumentCache) -> None:
        self._documents = documents
        self.waiting_text: Callable[[], str] = lambda: "Waiting for the first token"

    def document(self, row: Row, column: Column) -> QTextDocument | None:
        """The row's laid-out document; None for rows without one."""
        if not row.is_selectable or (row.block is not None and row.block.kind is BlockKind.RULE):
            return None
        return self._documents.get(row, text_width(row, column))

    def place(self, row: Row, column: Column) -> Placed:
        document = self.document(row, column)
        if document is None:
            height = _plain_height(row)
            frame = QRectF(column.left, row.gap, column.width, height)
            return Placed(frame, frame.topLeft(), row.gap + height)
        pad_x, pad_top, pad_bottom = _padding(row)
        height = document.size().height() + pad_top + pad_bottom
        if row.kind is RowKind.USER:
            width = self._bubble_width(row, document, column)
            frame = QRectF(column.left + column.width - width, row.gap, width, height)
        else:
            left = column.left + _inset(row.block)
            frame = QRectF(left, row.gap, column.left + column.width - left, height)
        return Placed(frame, QPointF(frame.left() + pad_x, frame.top() + pad_top), row.gap + height)

    @staticmethod
    def _bubble_width(row: Row, document: QTextDocument, column: Column) -> float:
        block = row.block
        limit = column.width * BUBBLE_SHARE
        if block is not None and (block.continues or block.continued):
            return limit
        return min(limit, document.idealWidth() + 2 * BUBBLE_PAD_X + 1)

    def paint(self, painter: QPainter, row: Row, column: Column, top: float, selected: tuple[int, int] | None) -> None:
        """Draw ``row`` with its top at ``top``; ``selected`` are document positions."""
        theme = look.current()
        placed = self.place(row, column)
        painter.save()
        painter.translate(0, top)
        self._paint_ground(painter, row, placed, column, theme)
        document = self.document(row, column)
        if document is not None:
            if row.block is not None and row.block.marker:
                _draw_marker(painter, row.block, document, placed, theme)
            self._paint_document(painter, document, placed, selected, theme)
        painter.restore()

    def _paint_ground(self, painter: QPainter, row: Row, placed: Placed, column: Column, theme: Theme) -> None:
        block = row.block
        if row.kind is RowKind.USER and block is not None:
            _fill_part(painter, placed.frame, block, QColor(theme.user_bubble), None)
        elif row.kind is RowKind.ERROR:
            painter.fillRect(placed.frame, QColor(theme.error_ground))
            painter.fillRect(QRectF(placed.frame.left(), placed.frame.top(), 3, placed.frame.height()), theme.attention)
        elif row.kind is RowKind.WAITING:
            _draw_note(painter, self.waiting_text(), placed.frame, theme)
        elif row.kind is RowKind.FOOTER:
            _draw_footer(painter, row, placed.frame, theme)
        elif block is not None:
            _draw_marks(painter, block, row.gap, placed, column, theme)
            if block.kind is BlockKind.CODE:
                _fill_part(painter, placed.frame, block, QColor(theme.code_background), QColor(theme.line))
            elif block.kind is BlockKind.RULE:
                middle = placed.frame.center().y()
                painter.fillRect(QRectF(placed.frame.left(), middle, placed.frame.width(), 1), QColor(theme.line))

    @staticmethod
    def _paint_document(
        painter: QPainter, document: QTextDocument, placed: Placed, selected: tuple[int, int] | None, theme: Theme
    ) -> None:
        context = QAbstractTextDocumentLayout.PaintContext()
        palette = QPalette(context.palette)  # type: ignore[attr-defined]  # the stubs lack it
        palette.setColor(QPalette.ColorRole.Text, QColor(theme.text))
        context.palette = palette  # type: ignore[attr-defined]
        if selected is not None and selected[0] < selected[1]:
            cursor = QTextCursor(document)
            last = document.characterCount() - 1
            cursor.setPosition(min(selected[0], last))
            cursor.setPosition(min(selected[1], last), QTextCursor.MoveMode.KeepAnchor)
            mark = QTextCharFormat()
            mark.setBackground(QColor(theme.selection))
            mark.setForeground(QColor(theme.text))
            selection = QAbstractTextDocumentLayout.Selection()
            selection.cursor = cursor  # type: ignore[attr-defined]
            selection.format = mark  # type: ignore[attr-defined]
            context.selections = [selection]  # type: ignore[attr-defined]
        painter.translate(placed.origin)
        document.documentLayout().draw(painter, context)

    @staticmethod
    def has_copy_button(row: Row) -> bool:
        """Whether the row begins a code block."""
        block = row.block
        return block is not None and block.kind is BlockKind.CODE and not block.continues

    @staticmethod
    def copy_button(placed: Placed) -> QRectF:
        """Where "Copy" stands on a code block, relative to the row's top."""
        return QRectF(placed.frame.right() - 66, placed.frame.top() + 5, 58, 24)

    def paint_copy_button(self, painter: QPainter, rect: QRectF, label: str, is_hot: bool) -> None:
        theme = look.current()
        painter.setFont(look.font(12))
        width = QFontMetricsF(painter.font()).horizontalAdvance(label) + 14
        box = QRectF(rect.right() - width, rect.top(), width, rect.height())
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(theme.hover if is_hot else theme.code_background))
        painter.drawRoundedRect(box, 6, 6)
        painter.setPen(QColor(theme.text if is_hot else theme.muted))
        painter.drawText(box, Qt.AlignmentFlag.AlignCenter, label)


def text_width(row: Row, column: Column) -> float:
    """Width the row's document is laid out for."""
    if row.kind is RowKind.USER:
        return max(60.0, column.width * BUBBLE_SHARE - 2 * BUBBLE_PAD_X)
    pad_x = _padding(row)[0]
    right_pad = CODE_PAD_X if row.block is not None and row.block.kind is BlockKind.CODE else pad_x
    return max(60.0, column.width - _inset(row.block) - pad_x - right_pad)


def estimated_height(row: Row, column: Column) -> float:
    """A guess that costs nothing, for rows out of sight."""
    block = row.block
    if block is None or block.kind is BlockKind.RULE:
        return row.gap + _plain_height(row)
    per_line = max(8.0, text_width(row, column) / _CHAR_WIDTH)
    text = block.text or block.html.replace("<br/>", "\n")
    lines = sum(1 + int(len(line) / per_line) for line in text.split("\n"))
    if block.kind is BlockKind.TABLE:
        lines = max(1, 2 * block.html.count("<tr"))
    _, pad_top, pad_bottom = _padding(row)
    return row.gap + pad_top + pad_bottom + lines * _LINE_HEIGHT


def _plain_height(row: Row) -> float:
    """Height of a row without a document."""
    if row.kind is RowKind.BLOCK:
        return RULE_HEIGHT
    return USER_FOOTER_HEIGHT if row.kind is RowKind.FOOTER and row.role == "user" else FOOTER_HEIGHT


def _inset(block: Block | None) -> float:
    return 0.0 if block is None else block.quote * QUOTE_INDENT + block.indent * INDENT


def _padding(row: Row) -> tuple[float, float, float]:
    """Left and right, top, bottom. A part cut from a longer block has no padding at the cut."""
    block = row.block
    if row.kind is RowKind.ERROR:
        return ERROR_PAD + 3, ERROR_PAD - 2, ERROR_PAD - 7
    if block is None:
        return 0, 0, 0
    if row.kind is RowKind.USER:
        x, y = BUBBLE_PAD_X, BUBBLE_PAD_Y
    elif block.kind is BlockKind.CODE:
        x, y = CODE_PAD_X, CODE_PAD_Y
    else:
        return 0, 0, 0
    return x, 0 if block.continues else y, 0 if block.continued else y


def _fill_part(painter: QPainter, frame: QRectF, block: Block, ground: QColor, line: QColor | None) -> None:
    """A rounded box, or the first, middle or last slice of one: the rest of it lies outside the clip."""
    painter.save()
    painter.setClipRect(frame.adjusted(-1, -1 if not block.continues else 0, 1, 1 if not block.continued else 0))
    above = 3 * RADIUS if block.continues else 0
    below = 3 * RADIUS if block.continued else 0
    box = frame.adjusted(0.5, 0.5 - above, -0.5, below - 0.5)
    path = QPainterPath()
    path.addRoundedRect(box, RADIUS, RADIUS)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.fillPath(path, ground)
    if line is not None:
        painter.setPen(QPen(line, 1))
        painter.drawPath(path)
    painter.restore()


def _draw_marks(painter: QPainter, block: Block, gap: int, placed: Placed, column: Column, theme: Theme) -> None:
    """Quote bars, left of the text."""
    for depth in range(block.quote):
        bar = QRectF(column.left + depth * QUOTE_INDENT, placed.frame.top() - gap / 2, 3, placed.height - gap / 2)
        painter.fillRect(bar, QColor(theme.line))


def _draw_marker(painter: QPainter, block: Block, document: QTextDocument, placed: Placed, theme: Theme) -> None:
    """The list marker, on the baseline of the first line."""
    layout = document.firstBlock().layout()
    line = layout.lineAt(0)
    baseline = placed.origin.y() + layout.position().y() + line.y() + line.ascent()
    painter.setFont(look.font())
    painter.setPen(QColor(theme.muted))
    width = QFontMetricsF(painter.font()).horizontalAdvance(block.marker)
    painter.drawText(QPointF(placed.frame.left() - 8 - width, baseline), block.marker)


def _draw_note(painter: QPainter, text: str, frame: QRectF, theme: Theme) -> None:
    painter.setFont(look.font())
    painter.setPen(QColor(theme.muted))
    painter.drawText(frame, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, text)


def _draw_footer(painter: QPainter, row: Row, frame: QRectF, theme: Theme) -> None:
    painter.setFont(look.font(12))
    painter.setPen(QColor(theme.muted))
    metrics = QFontMetricsF(painter.font())
    room = frame.width() - (metrics.horizontalAdvance(row.branch) + 24 if row.branch else 0)
    words = metrics.elidedText(row.text, Qt.TextElideMode.ElideRight, room)
    painter.drawText(frame, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, words)
    if row.branch:
        box = frame.adjusted(0, 0, -8, 0)
        painter.drawText(box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, row.branch)
