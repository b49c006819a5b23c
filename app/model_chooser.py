"""The model: the pill in the top bar, the popup behind it, and the strip that says why a load failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from PySide6.QtCore import QPoint, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFontMetricsF, QGuiApplication, QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QFileDialog,
    QFrame,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QStyle,
    QStyleOptionButton,
    QStylePainter,
    QVBoxLayout,
    QWidget,
)

from app import theme as look
from engine.events import ModelInfo

STARTER = "starter"
_POPUP_WIDTH = 380
_SCHEMES = {"none": "full precision", "int8": "int8", "int4": "int4"}


class ListedModel(Protocol):
    """What the popup shows of a model on disk (app.library.catalog.LibraryModel has it)."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def problem(self) -> str: ...


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
        self.setToolTip("Choose a model (Ctrl+,)")
        self.updateGeometry()
        self.update()

    @property
    def words(self) -> str:
        return f"{self._name} {self._detail}".strip()

    def sizeHint(self) -> QSize:  # noqa: N802
        strong = QFontMetricsF(look.font(weight=look.QFont.Weight.Medium))
        width = strong.horizontalAdvance(self._name) + self._detail_width() + 30
        return QSize(int(min(width, 420)), 30)

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


class ModelPopup(QFrame):
    """What can be loaded: the starter, models on disk, recently used ones, a file, a folder. Shows a load's progress.

    Signals:
        chosen: a source for EngineBridge.load_model.
        cancel_requested: stop the load that runs.
    """

    chosen = Signal(str)
    cancel_requested = Signal()

    def __init__(
        self,
        list_models: Callable[[], Sequence[ListedModel]],
        recent: Callable[[], Sequence[str]],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent, Qt.WindowType.Popup | Qt.WindowType.FramelessWindowHint)
        self.setObjectName("popup")
        self.setAttribute(Qt.WidgetAttribute.WA_TranslucentBackground, False)
        self.setFixedWidth(_POPUP_WIDTH)
        self._list_models, self._recent = list_models, recent
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(8, 8, 8, 8)
        self._layout.setSpacing(2)
        self.progress = self._make_progress()
        self._rows: list[QWidget] = []

    def _make_progress(self) -> QWidget:
        box = QWidget(self)
        column = QVBoxLayout(box)
        column.setContentsMargins(10, 6, 10, 10)
        line = QHBoxLayout()
        self.stage = QLabel(box)
        self.cancel = QPushButton("Cancel", box)
        self.cancel.clicked.connect(self.cancel_requested)
        self.bar = QProgressBar(box)
        self.bar.setTextVisible(False)
        self.bar.setRange(0, 1000)
        line.addWidget(self.stage, 1)
        line.addWidget(self.cancel)
        column.addLayout(line)
        column.addWidget(self.bar)
        self._layout.addWidget(box)
        box.hide()
        return box

    def show_loading(self, stage: str, fraction: float) -> None:
        self.stage.setText(stage)
        self.bar.setValue(int(1000 * fraction))
        self.progress.show()
        self.adjustSize()

    def show_idle(self) -> None:
        self.progress.hide()
        self.adjustSize()

    def open_below(self, anchor: QWidget) -> None:
        """Fill the list anew and show it under ``anchor``."""
        self._fill()
        self.adjustSize()
        self.move(anchor.mapToGlobal(QPoint(0, anchor.height() + 6)))
        self.show()
        if self._rows:
            self._rows[0].setFocus()

    def _fill(self) -> None:
        for row in self._rows:
            self._layout.removeWidget(row)
            row.deleteLater()
        self._rows = []
        listed = list(self._list_models())
        names = {model.name for model in listed}
        if STARTER not in names:
            self._add_row("Starter model", "SmolLM2 135M Instruct, about 100 MB", STARTER)
        for model in listed:
            note = model.problem or f"{model.format}, {size_words(model.num_bytes)}"
            title = f"{model.title} (starter)" if model.name == STARTER else model.title
            self._add_row(title, note, model.name, is_usable=not model.problem)
        for source in self._recent():
            if source not in names and source != STARTER:
                self._add_row(source.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1], source, source)
        self._add_row("Open a GGUF file...", "", None, self.open_file)
        self._add_row("Open a safetensors folder...", "", None, self.open_folder)

    def _add_row(
        self,
        title: str,
        note: str,
        source: str | None,
        do: Callable[[], None] | None = None,
        is_usable: bool = True,
    ) -> None:
        row = QPushButton(self)
        row.setProperty("look", "row")
        row.setEnabled(is_usable)
        row.setAccessibleName(f"{title} {note}".strip())
        row.setToolTip(note)
        lines = QVBoxLayout(row)
        lines.setContentsMargins(10, 6, 10, 6)
        lines.setSpacing(1)
        lines.addWidget(_line(title, "", row))
        if note:
            lines.addWidget(_line(note, "muted", row))
        row.setMinimumHeight(lines.sizeHint().height())
        row.clicked.connect(do if do is not None else lambda: self._choose(source or ""))
        self._layout.addWidget(row)
        self._rows.append(row)

    def _choose(self, source: str) -> None:
        self.hide()
        self.chosen.emit(source)

    def open_file(self) -> None:
        self.hide()
        path, _ = QFileDialog.getOpenFileName(self.parentWidget(), "Open a GGUF file", "", "GGUF models (*.gguf)")
        if path:
            self.chosen.emit(path)

    def open_folder(self) -> None:
        self.hide()
        path = QFileDialog.getExistingDirectory(self.parentWidget(), "Open a safetensors folder")
        if path:
            self.chosen.emit(path)


def _line(text: str, kind: str, parent: QWidget) -> QLabel:
    label = QLabel(parent)
    label.setProperty("look", kind)
    if kind:
        label.setFont(look.font(12))
    label.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
    label.setText(label.fontMetrics().elidedText(text, Qt.TextElideMode.ElideMiddle, _POPUP_WIDTH - 44))
    return label


class Notice(QFrame):
    """A strip between the top bar and the chat: what went wrong and what to do. It pushes, it never covers."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("notice")
        self.words = QLabel(self)
        self.words.setProperty("look", "error")
        self.words.setWordWrap(True)
        self.words.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self.remedy = QPushButton(self)
        self.remedy.clicked.connect(self._on_remedy)
        self.copy = QPushButton("Copy", self)
        self.copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(self.words.text()))
        self.close_button = QPushButton("Close", self)
        self.close_button.clicked.connect(self.hide)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(16, 8, 16, 8)
        layout.addWidget(self.words, 1)
        for button in (self.remedy, self.copy, self.close_button):
            layout.addWidget(button)
        self._do: Callable[[], None] | None = None
        self.hide()

    def say(self, words: str, remedy: str = "", do: Callable[[], None] | None = None) -> None:
        """Show ``words``, with a button named ``remedy`` that calls ``do``."""
        self.words.setText(words)
        self._do = do
        self.remedy.setText(remedy)
        self.remedy.setVisible(bool(remedy))
        self.show()

    def _on_remedy(self) -> None:
        self.hide()
        if self._do is not None:
            self._do()


def size_words(num_bytes: int) -> str:
    """ "98 MB", "4.1 GB": decimal units, as disks are sold."""
    if num_bytes >= 1_000_000_000:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB"
