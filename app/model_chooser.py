"""Choosing a model: the popup behind the pill in the top bar, and what a load says on its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from PySide6.QtCore import QObject, QPoint, Qt, Signal
from PySide6.QtWidgets import (
    QFileDialog,
    QFrame,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app import theme as look
from app.library.starter import find_starter
from app.model_pill import ModelPill
from app.notice import Notice
from app.settings import SettingsStore
from app.starter_fetch import StarterFetch
from engine.events import (
    EngineError,
    ModelInfo,
    ModelLoaded,
    ModelLoadFailed,
    ModelLoading,
    OptionsApplied,
    OptionsRefused,
)

if TYPE_CHECKING:
    from app.bridge import EngineBridge

STARTER = "starter"
RECENT = "recent_models"  # in the settings file
MOST_RECENT = 5
_POPUP_WIDTH = 380


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


class ModelChooser(QObject):
    """Joins pill, popup and notice to the bridge, and knows which model is in use.

    Signals:
        state_changed: a model was loaded, a load began, went on, failed or was cancelled.

    Attributes:
        find_starter: where the starter lies, or None; tests replace it.
        info: the model in use; None before the first and after a failed load that cost us the one before.
    """

    state_changed = Signal()

    def __init__(
        self,
        bridge: EngineBridge,
        settings: SettingsStore,
        notice: Notice,
        list_models: Callable[[], Sequence[ListedModel]],
        parent: QWidget,
    ) -> None:
        super().__init__(parent)
        self._bridge, self._settings, self._notice = bridge, settings, notice
        self.info: ModelInfo | None = None
        self.stage = ""  # of the load that runs; empty when none does
        self._asked = ""
        self._options: Mapping[str, str] = {}
        self._last_error = ""
        self.find_starter: Callable[[], Path | None] = find_starter
        self.pill = ModelPill(parent)
        self.popup = ModelPopup(list_models, self._recent, parent)
        self.pill.clicked.connect(self.open)
        self.popup.chosen.connect(self.choose)
        self.popup.cancel_requested.connect(self.cancel)
        bridge.model_loading.connect(self._on_model_loading)
        bridge.model_loaded.connect(self._on_model_loaded)
        bridge.model_load_failed.connect(self._on_model_load_failed)
        bridge.options_applied.connect(self._on_options_applied)
        bridge.options_refused.connect(self._on_options_refused)
        for answer in (bridge.draft_changed, bridge.draft_refused, bridge.best_found, bridge.best_refused):
            answer.connect(self._on_work_ended)
        bridge.engine_failed.connect(self._on_engine_failed)
        self.fetch = StarterFetch(parent=self)
        self.fetch.progressed.connect(self._on_fetch_progressed)
        self.fetch.fetched.connect(self._on_fetched)
        self.fetch.failed.connect(self._on_fetch_failed)
        self._show()

    @property
    def is_loading(self) -> bool:
        return bool(self.stage)

    @property
    def is_ready(self) -> bool:
        """A chat can be answered now, or as soon as the load is done."""
        return self.info is not None or self.is_loading

    def open(self) -> None:
        self.popup.open_below(self.pill)

    def choose(self, source: str) -> None:
        """Load what the user picked; the starter is fetched first when it has to be."""
        if source == STARTER:
            self.get_starter()
        else:
            self.load(source)

    def load(self, source: str) -> None:
        """Load ``source`` with the switches and the draft model that the settings remember. Chats stay usable meanwhile."""
        self._notice.hide()
        self._asked = source
        settings = self._settings.settings
        self._bridge.load_model(source, settings.options, settings.drafts.get(source, ""))
        self._show_progress("Opening the model", 0.0)

    def cancel(self) -> None:
        """End the load, or the fetch before it."""
        if self.fetch.is_running:
            self.fetch.cancel()
        else:
            self._bridge.cancel_load()

    def get_starter(self) -> None:
        """Load the starter; fetch it first when it is not on this machine."""
        if self.find_starter() is not None:
            self.load(STARTER)
            return
        self._notice.hide()
        self.fetch.start()
        self._show_progress("Fetching the starter", 0.0)

    def _on_fetch_progressed(self, stage: str, fraction: float) -> None:
        if self.fetch.is_running:
            self._show_progress(stage, fraction)

    def _on_fetched(self) -> None:
        self.load(STARTER)

    def _on_fetch_failed(self, message: str) -> None:
        self.stage = ""
        if message:
            self._notice.say(message, "Try again", self.get_starter)
        self._show()

    def _show_progress(self, stage: str, fraction: float) -> None:
        self.stage = stage or "Loading"
        self.popup.show_loading(self.stage, fraction)
        self.pill.show_loading(self.stage, fraction)
        self.state_changed.emit()

    def _recent(self) -> Sequence[str]:
        recent = (self._settings.settings.model_extra or {}).get(RECENT)
        return [item for item in recent if isinstance(item, str)] if isinstance(recent, list) else []

    def _remember(self, source: str) -> None:
        recent = [source, *(item for item in self._recent() if item != source)][:MOST_RECENT]
        self._settings.update(model_source=source, **{RECENT: recent})

    def _on_model_loading(self, event: ModelLoading) -> None:
        if not self.stage and self.info is None:
            return  # the last words of a load that was cancelled
        self._show_progress(event.stage, event.fraction)

    def _on_model_loaded(self, event: ModelLoaded) -> None:
        self.info, self._options, self.stage = event.info, event.options, ""
        self._last_error = ""
        self._remember(event.info.source or self._asked)
        self._show()

    def _on_options_applied(self, event: OptionsApplied) -> None:
        self._options, self.stage = event.options, ""
        self.info = event.info or self.info
        self._show()

    def _on_options_refused(self, _event: OptionsRefused) -> None:
        self.stage = ""  # the weights were perhaps being read again; the panel says why it was refused
        self._show()

    def _on_work_ended(self, _event: object) -> None:
        self.stage = ""  # a draft model was loaded, or the best setting looked for; the panel says what came of it
        self._show()

    def _on_model_load_failed(self, event: ModelLoadFailed) -> None:
        self.stage = ""
        if not event.kept:
            self.info = None
        kept = f" {self.info.name} stays loaded." if self.info else ""
        is_missing_starter = event.source == STARTER and self.find_starter() is None
        if is_missing_starter:
            words = "The starter model is not on this machine yet. It is about 100 MB."
            self._notice.say(words, "Get the starter", self.get_starter)
        else:
            self._notice.say(event.message + kept, "Choose another model", self.open)
        self._show()

    def _on_engine_failed(self, event: EngineError) -> None:
        """Something that belongs to no single reply. The same words are not shown over and over."""
        if event.message != self._last_error:
            self._last_error = event.message
            self._notice.say(event.message)

    def _show(self) -> None:
        self.popup.show_idle()
        if self.info is None:
            self.pill.show_nothing()
        else:
            self.pill.show_model(self.info, self._options.get("weights", ""))
        self.state_changed.emit()


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


def size_words(num_bytes: int) -> str:
    """ "98 MB", "4.1 GB": decimal units, as disks are sold."""
    if num_bytes >= 1_000_000_000:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB"
