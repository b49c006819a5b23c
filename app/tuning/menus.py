"""ChoiceMenu: the panel's menus of choices. Each line has a title and beside it what the choice does, or why it cannot be made.

A plain QMenu writes each line in one row, however long; here words that are too long for the screen go on in the next.
"""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QPointF, QRect, QSize, Qt
from PySide6.QtGui import QAction, QColor, QFontMetrics, QPainter, QPaintEvent, QPalette, QPen
from PySide6.QtWidgets import QMenu, QWidget, QWidgetAction

from app import theme

WIDEST = 680  # pixels, of a menu; wider lines are hard to follow
SCREEN_MARGIN = 24  # pixels that a menu leaves of the screen
_LEFT, _MARK, _GAP, _RIGHT, _ABOVE = 12, 18, 18, 22, 6  # pixels, as the style sheet pads the lines of other menus
_ROUND = 5
_WRAPPED = Qt.TextFlag.TextWordWrap.value | Qt.AlignmentFlag.AlignLeft.value | Qt.AlignmentFlag.AlignTop.value


class ChoiceMenu(QMenu):
    """A menu of choices, gone once it is closed."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setToolTipsVisible(True)
        self._lines: list[_Line] = []

    def add_choice(self, title: str, words: str, chosen: Callable[[], object]) -> QAction:
        """A line with ``title`` and ``words``; ``chosen`` is called when it is picked."""
        action = QWidgetAction(self)
        line = _Line(self, action)
        action.setDefaultWidget(line)
        show_choice(action, title, words)
        action.triggered.connect(lambda _=False: chosen())
        self._lines.append(line)
        self.addAction(action)
        return action

    def columns(self) -> tuple[int, int]:
        """Pixels of the titles' and the words' column: as much as the longest takes, and both fit the screen."""
        titles, words = zip(*(line.natural_widths() for line in self._lines), strict=True)
        room = min(WIDEST, self.screen().availableGeometry().width() - SCREEN_MARGIN) - _LEFT - _MARK - _GAP - _RIGHT
        title = min(max(titles), room // 2)
        return title, min(max(words), room - title)


class _Line(QWidget):
    """Paints one choice. The menu has the mouse and the keys; which line is the active one is its to say."""

    def __init__(self, menu: ChoiceMenu, action: QAction) -> None:
        super().__init__(menu)
        self._menu, self._action = menu, action
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)

    def natural_widths(self) -> tuple[int, int]:
        """Pixels of the title and of the words, each in one row."""
        metrics = QFontMetrics(self._menu.font())
        title, words = (metrics.size(0, text).width() + 1 for text in self._texts())
        return title, words

    def sizeHint(self) -> QSize:  # noqa: N802
        title, words = self._menu.columns()
        height = max(rect.height() for rect in self._rects(title, words))
        return QSize(_LEFT + _MARK + title + _GAP + words + _RIGHT, height + 2 * _ABOVE)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        colours = theme.current()
        if self._menu.activeAction() is self._action and self._action.isEnabled():
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(QColor(colours.hover))
            painter.drawRoundedRect(self.rect(), _ROUND, _ROUND)
        is_usable = self._action.isEnabled()
        painter.setFont(self._menu.font())
        painter.setPen(self.palette().color(QPalette.ColorRole.Text) if is_usable else QColor(colours.muted))
        rects = self._rects(*self._menu.columns())
        for text, rect in zip(self._texts(), rects, strict=True):
            painter.drawText(rect, _WRAPPED, text)
        if self._action.isChecked():
            self._draw_mark(painter)
        painter.end()

    def _draw_mark(self, painter: QPainter) -> None:
        """A tick beside the first row."""
        pen = QPen(painter.pen())
        pen.setWidthF(1.6)
        pen.setCapStyle(Qt.PenCapStyle.RoundCap)
        pen.setJoinStyle(Qt.PenJoinStyle.RoundJoin)
        painter.setPen(pen)
        middle = _ABOVE + QFontMetrics(self._menu.font()).height() / 2
        painter.drawPolyline([QPointF(8, middle), QPointF(11, middle + 3.5), QPointF(17, middle - 4)])

    def _texts(self) -> tuple[str, str]:
        title, _, words = self._action.text().partition("\t")
        return title, words

    def _rects(self, title: int, words: int) -> tuple[QRect, QRect]:
        """Where the two texts go in columns of these widths."""
        metrics = QFontMetrics(self._menu.font())
        left, right = _LEFT + _MARK, _LEFT + _MARK + title + _GAP
        first, second = (
            metrics.boundingRect(QRect(0, 0, width, 1 << 14), _WRAPPED, text).height()
            for width, text in zip((title, words), self._texts(), strict=True)
        )
        return QRect(left, _ABOVE, title, first), QRect(right, _ABOVE, words, second)


def show_choice(action: QAction, title: str, words: str) -> None:
    """Write ``title`` and ``words`` on ``action``; the words are its tooltip too."""
    action.setText(f"{title}\t{words}")
    action.setToolTip(words)
