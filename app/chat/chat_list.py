"""The rows of the chat list: what they are (ChatListModel) and how they look (ChatRowDelegate)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontMetrics, QPainter, QPen
from PySide6.QtWidgets import QLineEdit, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app import theme
from app.chat.conversation import ChatSummary
from app.chat.when import age_text, group_of
from app.store import SearchHit

Index = QModelIndex | QPersistentModelIndex

RowRole = int(Qt.ItemDataRole.UserRole)

_CHAT_HEIGHT = 38  # px, as all sizes here; a row's own ground is 2 less
_HIT_HEIGHT = 56
_HEADING_HEIGHT = 32
_SIDE = 10
_TITLE_LEFT = 23
_DOT = 7
_RADIUS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """A heading (no chat_id), a chat, or a search hit (with a snippet or a message_id)."""

    title: str
    chat_id: str = ""
    message_id: str | None = None
    note: str = ""  # on the right: the age, or "generating"
    snippet: str = ""
    is_generating: bool = False
    colour_index: int = 0

    @property
    def key(self) -> tuple[str, str | None, str]:
        return (self.chat_id, self.message_id, self.title if not self.chat_id else "")


def chat_rows(chats: Sequence[ChatSummary], now: datetime) -> list[Row]:
    """Chats, the most recently used first, each group under its heading."""
    rows: list[Row] = []
    heading = ""
    for chat in chats:
        then = datetime.fromtimestamp(chat.updated_at)
        group = group_of(then, now)
        if group != heading:
            heading = group
            rows.append(Row(group))
        rows.append(
            Row(
                chat.title,
                chat.chat_id,
                note="generating" if chat.is_generating else age_text(then, now),
                is_generating=chat.is_generating,
                colour_index=chat.colour_index,
            )
        )
    return rows


def hit_rows(hits: Sequence[SearchHit]) -> list[Row]:
    """Search hits: chats by title, then messages, each under a heading."""
    if not hits:
        return [Row("Nothing found")]
    titles = [Row(hit.title or "New chat", hit.chat_id) for hit in hits if hit.message_id is None]
    messages = [
        Row(hit.title or "New chat", hit.chat_id, hit.message_id, snippet=hit.snippet)
        for hit in hits
        if hit.message_id is not None
    ]
    rows = [Row("Chats"), *titles] if titles else []
    return rows + ([Row("Messages"), *messages] if messages else [])


class ChatListModel(QAbstractListModel):
    """Rows as they are shown. A change that keeps the order only repaints, so that nothing jumps."""

    renamed = Signal(str, str)  # chat_id, new title

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._rows: list[Row] = []

    def show_rows(self, rows: list[Row]) -> None:
        if [row.key for row in rows] == [row.key for row in self._rows]:
            changed = [i for i, (old, new) in enumerate(zip(self._rows, rows, strict=True)) if old != new]
            self._rows = rows
            for i in changed:
                self.dataChanged.emit(self.index(i), self.index(i))
            return
        self.beginResetModel()
        self._rows = rows
        self.endResetModel()

    def row(self, index: Index) -> Row | None:
        return self._rows[index.row()] if index.isValid() and index.row() < len(self._rows) else None

    def index_of(self, chat_id: str, message_id: str | None = None) -> QModelIndex:
        """The row of a chat (or of a message found in it); an invalid index when it is not shown."""
        for i, row in enumerate(self._rows):
            if chat_id and (row.chat_id, row.message_id) == (chat_id, message_id):
                return self.index(i)
        return QModelIndex()

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008, N802
        return 0 if parent.isValid() else len(self._rows)

    def data(self, index: Index, role: int = int(Qt.ItemDataRole.DisplayRole)) -> Any:
        row = self.row(index)
        if row is None:
            return None
        if role == RowRole:
            return row
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.EditRole):
            return row.title
        if role == Qt.ItemDataRole.ToolTipRole:
            return row.title if row.chat_id else None
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return ", ".join(part for part in (row.title, row.note, row.snippet) if part)
        return None

    def setData(self, index: Index, value: Any, role: int = int(Qt.ItemDataRole.EditRole)) -> bool:  # noqa: N802
        row = self.row(index)
        if row is None or not row.chat_id or role != Qt.ItemDataRole.EditRole:
            return False
        title = str(value).strip()
        if title and title != row.title:
            self.renamed.emit(row.chat_id, title)
        return True

    def flags(self, index: Index) -> Qt.ItemFlag:
        row = self.row(index)
        if row is None or not row.chat_id:
            return Qt.ItemFlag.NoItemFlags  # a heading is passed over by the keyboard
        flags = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        return flags if row.snippet else flags | Qt.ItemFlag.ItemIsEditable


class ChatRowDelegate(QStyledItemDelegate):
    """Paints a row in the theme's colours. ``is_open`` tells which chat the window shows."""

    def __init__(self, is_open: Callable[[str], bool], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._is_open = is_open

    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:  # noqa: N802
        row: Row = index.data(RowRole)
        height = _CHAT_HEIGHT if row.chat_id else _HEADING_HEIGHT
        return QSize(100, _HIT_HEIGHT if row.snippet else height)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        row: Row = index.data(RowRole)
        area: QRect = option.rect  # type: ignore[attr-defined]  # PySide's stubs leave the field out
        state: QStyle.StateFlag = option.state  # type: ignore[attr-defined]
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if row.chat_id:
            _paint_ground(painter, area, self._is_open(row.chat_id) and not row.snippet, state)
            _paint_row(painter, area, row)
        else:
            _paint_heading(painter, area, row.title)
        painter.restore()

    def createEditor(self, parent: QWidget, option: QStyleOptionViewItem, index: Index) -> QWidget:  # noqa: N802
        editor = QLineEdit(parent)
        editor.setMaxLength(200)
        editor.setAccessibleName("New name of the chat")
        return editor

    def updateEditorGeometry(self, editor: QWidget, option: QStyleOptionViewItem, index: Index) -> None:  # noqa: N802
        area: QRect = option.rect  # type: ignore[attr-defined]
        editor.setGeometry(area.adjusted(_SIDE, 1, -_SIDE, -1))


def _paint_ground(painter: QPainter, area: QRect, is_open: bool, state: QStyle.StateFlag) -> None:
    colours = theme.current()
    ground = area.toRectF().adjusted(_SIDE + 0.5, 1.5, -_SIDE - 0.5, -1.5)
    has_focus = bool(state & QStyle.StateFlag.State_HasFocus)
    if is_open:
        painter.setPen(QPen(QColor(colours.line), 1))
        painter.setBrush(QColor(colours.raised))
        painter.drawRoundedRect(ground, _RADIUS, _RADIUS)
    elif state & QStyle.StateFlag.State_MouseOver:
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(colours.hover))
        painter.drawRoundedRect(ground, _RADIUS, _RADIUS)
    if has_focus and state & QStyle.StateFlag.State_KeyboardFocusChange:
        painter.setPen(QPen(QColor(colours.accent), 1))
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawRoundedRect(ground, _RADIUS, _RADIUS)


def _paint_row(painter: QPainter, area: QRect, row: Row) -> None:
    colours = theme.current()
    line = QRect(
        area.left() + _SIDE, area.top(), area.width() - 2 * _SIDE, _CHAT_HEIGHT if row.snippet else area.height()
    )
    if row.is_generating:
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(colours.chats[row.colour_index % len(colours.chats)]))
        top = line.center().y() - _DOT // 2
        painter.drawEllipse(line.left() + 8, top, _DOT, _DOT)
    note_width = _write(painter, line.adjusted(0, 0, -8, 0), row.note, theme.font(11.5), colours.muted, on_right=True)
    right = 8 + (note_width + 8 if row.note else 0)
    _write(painter, line.adjusted(_TITLE_LEFT, 0, -right, 0), row.title, theme.font(), colours.text)
    if row.snippet:
        below = QRect(line.left() + _TITLE_LEFT, line.top() + 27, line.width() - _TITLE_LEFT - 8, 22)
        _write(painter, below, row.snippet, theme.font(11.5), colours.muted)


def _paint_heading(painter: QPainter, area: QRect, text: str) -> None:
    line = area.adjusted(_SIDE + 8, 8, -_SIDE, 0)
    _write(painter, line, text, theme.font(12, QFont.Weight.Medium), theme.current().muted)


def _write(painter: QPainter, area: QRect, text: str, font: QFont, colour: str, on_right: bool = False) -> int:
    """One elided line, centred in height; returns its width."""
    painter.setFont(font)
    painter.setPen(QColor(colour))
    metrics = QFontMetrics(font)
    shown = metrics.elidedText(text, Qt.TextElideMode.ElideRight, area.width())
    side = Qt.AlignmentFlag.AlignRight if on_right else Qt.AlignmentFlag.AlignLeft
    painter.drawText(area, side | Qt.AlignmentFlag.AlignVCenter | Qt.TextFlag.TextSingleLine, shown)
    return metrics.horizontalAdvance(shown)
