"""The pill in the top bar: the model in use, or how far a load has come."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFontMetricsF, QPainter, QPaintEvent
from PySide6.QtWidgets import QPushButton, QStyle, QStyleOptionButton, QStylePainter, QWidget

from app import theme as look
from engine.events import ModelInfo

_SCHEMES = {
    "none": "full precision",
    "int8": "int8",
    "int4": "int4",
    "int4_g64": "int4 g64",
    "int4_g128": "int4 g128",
    "nf4": "NF4",
    "llm_int8": "LLM.int8",
    "as_stored": "as stored",
}
_WIDEST = 420  # px


class ModelPill(QPushButton):
    """ "SmolLM2 135M Instruct int4, CPU", or how far a load has come."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("look", "pill")
        self.setMinimumHeight(28)
        self._name, self._detail, self._fraction = "No model", "", -1.0
        self._describe()

    def show_model(self, info: ModelInfo, weights: str) -> None:
        device = "CPU" if info.device == "cpu" else info.device.upper()
        notes = [_SCHEMES.get(weights, weights), device] + (["through transformers"] if info.is_fallback else [])
        self._show(info.name, ", ".join(notes), -1.0)

    def show_nothing(self) -> None:
        self._show("Choose a model", "", -1.0)

    def show_loading(self, stage: str, fraction: float) -> None:
        self._show(stage, f"{fraction:.0%}", fraction)

    def _show(self, name: str, detail: str, fraction: float) -> None:
        if (name, detail, fraction) == (self._name, self._detail, self._fraction):
            return
        self._name, self._detail, self._fraction = name, detail, fraction
        self._describe()

    def _describe(self) -> None:
        self.setAccessibleName(f"Model: {self._name} {self._detail}".strip())
        self.setToolTip("Choose a model (Ctrl+M)")
        self.updateGeometry()
        self.update()

    @property
    def words(self) -> str:
        return f"{self._name} {self._detail}".strip()

    def sizeHint(self) -> QSize:  # noqa: N802
        strong = QFontMetricsF(look.font(weight=look.QFont.Weight.Medium))
        width = strong.horizontalAdvance(self._name) + self._detail_width() + 30
        return QSize(int(min(width, _WIDEST)), 30)

    def _detail_width(self) -> float:
        return QFontMetricsF(look.font()).horizontalAdvance(self._detail) + 6 if self._detail else 0.0

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        theme = look.current()
        painter = QStylePainter(self)
        option = QStyleOptionButton()
        self.initStyleOption(option)
        painter.drawControl(QStyle.ControlElement.CE_PushButton, option)
        box = QRectF(self.rect()).adjusted(14, 0, -14, 0)
        name_font = look.font(weight=look.QFont.Weight.Medium)
        room = box.width() - self._detail_width()
        name = QFontMetricsF(name_font).elidedText(self._name, Qt.TextElideMode.ElideMiddle, room)
        painter.setFont(name_font)
        painter.setPen(QColor(theme.text))
        painter.drawText(box, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, name)
        painter.setFont(look.font())
        painter.setPen(QColor(theme.muted))
        painter.drawText(box, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignRight, self._detail)
        if self._fraction >= 0:
            self._paint_progress(painter, theme)
        painter.end()

    def _paint_progress(self, painter: QPainter, theme: look.Theme) -> None:
        track = QRectF(14, self.height() - 4, self.width() - 28, 2)
        painter.fillRect(track, QColor(theme.line))
        track.setWidth(track.width() * max(0.0, min(1.0, self._fraction)))
        painter.fillRect(track, QColor(theme.accent))
