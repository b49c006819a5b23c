"""The small parts of the dock: a big number, a line of facts, a legend, a plot's heading, the advice card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetricsF, QPainter, QPainterPath, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QVBoxLayout, QWidget

from app import theme
from app.tuning.numbers import NONE
from app.tuning.pace import Meter

SMALL, NUMBER = 11.0, 21.0  # px
TINY, TITLE = 10.0, 12.0
WRAPPED = int(Qt.TextFlag.TextWordWrap)


@lru_cache(maxsize=16)
def font(pixels: float, weight: QFont.Weight = QFont.Weight.Normal) -> QFont:
    """The interface font, made once for each size: a widget asks for it at every painting."""
    return theme.font(pixels, weight)


class Painted(QWidget):
    """Paints all of itself, the dock's ground included: nothing behind it need be painted again with it."""

    def __init__(self, meter: Meter, height: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._meter = meter
        self.setFixedHeight(height)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)

    def draw(self, painter: QPainter, colours: theme.Theme) -> None:
        """Draw the content on the ground."""
        raise NotImplementedError

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        with self._meter:
            colours = theme.current()
            painter = QPainter(self)
            painter.fillRect(self.rect(), QColor(colours.panel))
            self.draw(painter, colours)
            painter.end()


class BigNumber(Painted):
    """A figure, its unit small and muted after it, and what it is below. Painted again only when it changed."""

    def __init__(self, caption: str, meter: Meter, parent: QWidget | None = None) -> None:
        super().__init__(meter, 46, parent)
        self.number, self.unit, self.caption, self.is_past = NONE, "", caption, True
        self.setMinimumWidth(math.ceil(QFontMetricsF(font(SMALL)).horizontalAdvance(caption)) + 2)

    def show_figure(self, number: str, unit: str, is_past: bool) -> None:
        if (number, unit, is_past) == (self.number, self.unit, self.is_past):
            return
        self.number, self.unit, self.is_past = number, unit, is_past
        self.setAccessibleName(f"{self.caption}: {number} {unit}".strip())
        self.update()

    def draw(self, painter: QPainter, colours: theme.Theme) -> None:
        big = font(NUMBER, QFont.Weight.DemiBold)
        painter.setFont(big)
        painter.setPen(QColor(colours.muted if self.is_past else colours.text))
        baseline = 4 + QFontMetricsF(big).ascent() * 0.86
        painter.drawText(QPointF(0, baseline), self.number)
        x = QFontMetricsF(big).horizontalAdvance(self.number) + 3
        painter.setFont(font(SMALL))
        painter.setPen(QColor(colours.muted))
        if self.number != NONE:
            painter.drawText(QPointF(x, baseline), self.unit)
        painter.drawText(QPointF(0, self.height() - 6), self.caption)

    def sizeHint(self) -> QSize:  # noqa: N802
        return QSize(76, 46)


class FactLine(Painted):
    """A muted name at the left and its figures at the right, elided when they do not fit."""

    def __init__(self, name: str, meter: Meter, parent: QWidget | None = None) -> None:
        super().__init__(meter, 19, parent)
        self.name, self.value = name, NONE

    def show_value(self, value: str) -> None:
        if value != self.value:
            self.value = value
            self.setAccessibleName(f"{self.name}: {value}")
            self.update()

    def draw(self, painter: QPainter, colours: theme.Theme) -> None:
        painter.setFont(font(SMALL))
        metrics = QFontMetricsF(painter.font())
        painter.setPen(QColor(colours.muted))
        box = QRectF(self.rect())
        centre = Qt.AlignmentFlag.AlignVCenter
        painter.drawText(box, centre | Qt.AlignmentFlag.AlignLeft, self.name)
        box.setLeft(metrics.horizontalAdvance(self.name) + 12)
        painter.setPen(QColor(colours.text))
        value = metrics.elidedText(self.value, Qt.TextElideMode.ElideRight, box.width())
        painter.drawText(box, centre | Qt.AlignmentFlag.AlignRight, value)


class PlotHeading(Painted):
    """A plot's title, and at the right its legend (colour, word) or a note."""

    def __init__(
        self, title: str, meter: Meter, legend: Sequence[tuple[str, str]] = (), parent: QWidget | None = None
    ) -> None:
        super().__init__(meter, 22, parent)
        self.title, self.note = title, ""
        self.legend = list(legend)  # (colour as #RRGGBB, word)

    def show_note(self, note: str) -> None:
        if note != self.note:
            self.note = note
            self.update()

    def show_legend(self, legend: Sequence[tuple[str, str]]) -> None:
        if list(legend) != self.legend:
            self.legend = list(legend)
            self.update()

    def draw(self, painter: QPainter, colours: theme.Theme) -> None:
        painter.setFont(font(TITLE, QFont.Weight.DemiBold))
        painter.setPen(QColor(colours.text))
        box = QRectF(self.rect())
        centre = Qt.AlignmentFlag.AlignVCenter
        painter.drawText(box, centre | Qt.AlignmentFlag.AlignLeft, self.title)
        title_width = QFontMetricsF(painter.font()).horizontalAdvance(self.title)
        painter.setFont(font(SMALL))
        painter.setPen(QColor(colours.muted))
        if self.note:
            painter.drawText(box, centre | Qt.AlignmentFlag.AlignRight, self.note)
        else:
            self._draw_legend(painter, box, title_width)

    def _draw_legend(self, painter: QPainter, box: QRectF, title_width: float) -> None:
        """From the right; in a narrow dock the words are smaller and closer, so that the title stays free."""
        words = "".join(word for _, word in self.legend)
        gap = 12.0
        if title_width + painter.fontMetrics().horizontalAdvance(words) + len(self.legend) * (12 + gap) > box.width():
            painter.setFont(font(TINY))
            gap = 7.0
        metrics, right = QFontMetricsF(painter.font()), box.right()
        for colour, word in reversed(self.legend):
            right -= metrics.horizontalAdvance(word)
            painter.drawText(QRectF(right, 0, box.width(), box.height()), Qt.AlignmentFlag.AlignVCenter, word)
            right -= 12
            painter.fillRect(QRectF(right, box.center().y() - 4, 8, 8), QColor(colour))
            right -= gap


class TimeAxis(Painted):
    """The time axis the plots above it share."""

    LABELS = ((0.0, "60 s ago"), (0.25, "45"), (0.5, "30"), (0.75, "15"), (1.0, "now"))

    def __init__(self, meter: Meter, parent: QWidget | None = None) -> None:
        super().__init__(meter, 15, parent)
        self._last = "now"

    def show_last(self, words: str) -> None:
        """What stands at the right end: "now", or when the last step was."""
        if words != self._last:
            self._last = words
            self.update()

    def draw(self, painter: QPainter, colours: theme.Theme) -> None:
        painter.setFont(font(TINY))
        painter.setPen(QColor(colours.muted))
        metrics = QFontMetricsF(painter.font())
        for share, label in self.LABELS:
            words = self._last if share == 1.0 else label
            width = metrics.horizontalAdvance(words)
            x = min(max(0.0, share * self.width() - width / 2), self.width() - width)
            painter.drawText(QPointF(x, metrics.ascent() + 1), words)


class Paragraph(Painted):
    """Words that wrap. Unlike a QLabel, new text lays nothing out again unless it needs another number of lines."""

    def __init__(
        self, meter: Meter, pixels: float = SMALL, is_muted: bool = True, parent: QWidget | None = None
    ) -> None:
        super().__init__(meter, round(pixels * 1.4), parent)
        self._pixels, self._is_muted, self._text = pixels, is_muted, ""
        self._fit()

    def text(self) -> str:
        return self._text

    def show_text(self, text: str) -> None:
        if text == self._text:
            return
        self._text = text
        self.setAccessibleName(text)
        self._fit()
        self.update()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._fit()

    def height_of(self, text: str) -> int:
        box = QRectF(0, 0, max(40, self.width()), 10_000)
        metrics = QFontMetricsF(font(self._pixels))
        return math.ceil(max(metrics.height(), metrics.boundingRect(box, WRAPPED, text).height()))

    def _fit(self) -> None:
        height = self.height_of(self._text)
        if height != self.height():
            self.setFixedHeight(height)

    def draw(self, painter: QPainter, colours: theme.Theme) -> None:
        painter.setFont(font(self._pixels))
        painter.setPen(QColor(colours.muted if self._is_muted else colours.text))
        painter.drawText(QRectF(self.rect()), WRAPPED, self._text)


class AdviceCard(Painted):
    """Plain sentences about the moment, with an accent edge. It grows for long ones and keeps that height, so that the
    plots below do not jump when a sentence comes or goes."""

    EDGE, PADDING, SMALLEST = 3, 11, 64  # px

    def __init__(self, meter: Meter, parent: QWidget | None = None) -> None:
        super().__init__(meter, self.SMALLEST, parent)
        self._text = ""

    @property
    def text(self) -> str:
        return self._text

    def show_text(self, text: str) -> None:
        if text == self._text:
            return
        self._text = text
        self.setAccessibleName(text)
        self._fit(shrink=False)
        self.update()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._fit(shrink=True)

    def _words_box(self) -> QRectF:
        return QRectF(self.rect()).adjusted(self.EDGE + self.PADDING, self.PADDING, -self.PADDING, -self.PADDING)

    def _fit(self, shrink: bool) -> None:
        box = QRectF(0, 0, max(40.0, self._words_box().width()), 10_000)
        words = QFontMetricsF(font(TITLE + 0.5)).boundingRect(box, WRAPPED, self._text).height()
        height = max(self.SMALLEST, math.ceil(words) + 2 * self.PADDING)
        if height > self.height() or (shrink and height != self.height()):
            self.setFixedHeight(height)

    def draw(self, painter: QPainter, colours: theme.Theme) -> None:
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        card = QPainterPath()
        card.addRoundedRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5), 7, 7)
        painter.fillPath(card, QColor(colours.raised))
        painter.save()
        painter.setClipPath(card)
        painter.fillRect(QRectF(0, 0, self.EDGE, self.height()), QColor(colours.accent))
        painter.restore()
        painter.setPen(QColor(colours.line))
        painter.drawPath(card)
        painter.setFont(font(TITLE + 0.5))
        painter.setPen(QColor(colours.text))
        painter.drawText(self._words_box(), WRAPPED | int(Qt.AlignmentFlag.AlignVCenter), self._text)


def stack(*widgets: QWidget, spacing: int = 0) -> QVBoxLayout:
    """The widgets below one another, without margins."""
    layout = QVBoxLayout()
    layout.setContentsMargins(0, 0, 0, 0)
    layout.setSpacing(spacing)
    for widget in widgets:
        layout.addWidget(widget)
    return layout
