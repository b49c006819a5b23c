"""PresetRow: named settings of all switches, and the search for the fastest one here.

Choosing a preset asks the engine once for everything that differs.
"""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QHBoxLayout, QLabel, QMenu, QPushButton, QSizePolicy, QVBoxLayout, QWidget

from app.bridge import EngineBridge
from app.paths import find_paths
from app.tuning.menus import ChoiceMenu
from app.tuning.switch_board import NO_MODEL, SwitchBoard
from engine.events import BestFound, BestRefused, EngineError, ModelLoading
from engine.presets import Preset, keep_best, presets, stored_best

OWN = "own"  # the switches are as no preset has them
SEARCH = "Find the best here"
SEARCH_NOTE = "some twenty seconds of measuring, with no reply running"


class PresetRow(QWidget):
    """Title and a pill with the preset that is in force; a click opens the menu of presets. Below, what became of a choice.

    Attributes:
        status: what a preset had to leave out, how the search goes, what it found.
    """

    def __init__(self, board: SwitchBoard, bridge: EngineBridge, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._board, self._bridge = board, bridge
        self._best: Preset | None = None
        self._is_searching = False
        self.pill = QPushButton(self)
        self.pill.setProperty("look", "value")
        self.pill.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.pill.clicked.connect(self._on_clicked)
        self.status = QLabel(self)
        self.status.setProperty("part", "status")
        self.status.setProperty("tone", "note")
        self.status.setTextFormat(Qt.TextFormat.PlainText)
        self.status.setWordWrap(True)
        self.status.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        top = QHBoxLayout()
        top.addWidget(QLabel("Preset"), 1)
        top.addWidget(self.pill)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 7)
        layout.setSpacing(3)
        layout.addLayout(top)
        layout.addWidget(self.status)
        board.switch_changed.connect(self._on_switch_changed)
        bridge.model_loading.connect(self._on_loading)
        bridge.best_found.connect(self._on_found)
        bridge.best_refused.connect(self._on_refused)
        bridge.engine_failed.connect(self._on_engine_failed)
        self._say("")

    def refresh(self) -> None:
        current = next((row for row in self._rows() if self._is_in_force(row)), None)
        title = current.title if current else OWN
        self.pill.setText("searching \N{HORIZONTAL ELLIPSIS}" if self._is_searching else title)
        self.pill.setEnabled(self._board.has_model)
        self.pill.setToolTip(NO_MODEL if not self._board.has_model else current.note if current else "Click to choose.")
        self.pill.setAccessibleName(f"Preset: {title}")

    def make_menu(self) -> QMenu:
        menu = ChoiceMenu(self)
        if self._is_searching:
            menu.addAction("Stop searching", self._bridge.cancel_load)
            return menu
        for row in self._rows():
            action = menu.add_choice(row.title, row.note, partial(self._choose, row))
            action.setCheckable(True)
            action.setChecked(self._is_in_force(row))
        menu.addSeparator()
        menu.add_choice(SEARCH, SEARCH_NOTE, self._search)
        return menu

    def _rows(self) -> tuple[Preset, ...]:
        return (*presets(), self._best) if self._best else presets()

    def _read_best(self) -> None:
        """What was found before with this model on this machine."""
        info = self._board.info
        found = stored_best(find_paths().best_here_file) if info else None
        is_ours = info is not None and found is not None and found.is_of(info.machine.name, info.name)
        self._best = found.as_preset() if found and is_ours else None

    def _is_in_force(self, row: Preset) -> bool:
        states = ((self._board.state(key), value) for key, value in row.settings().items())
        return all(state.shown == value or value in state.reasons for state, value in states)

    def _choose(self, row: Preset) -> None:
        left_out = self._board.choose_all(row.settings())
        self._say(f"{row.title}, without {'; '.join(left_out)}" if left_out else "")

    def _search(self) -> None:
        if self._board.has_model:
            self._is_searching = True
            self._say("Searching for the best setting here")
            self._bridge.find_best()

    # ---- what the engine says

    def _on_switch_changed(self, key: str) -> None:
        if not key:  # another model, or none
            self._is_searching = False
            self._read_best()
            self._say("")
        self.refresh()

    def _on_loading(self, loading: ModelLoading) -> None:
        if self._is_searching:
            self._say(f"{loading.stage}, {loading.fraction * 100:.0f} %")

    def _on_found(self, event: BestFound) -> None:
        self._is_searching = False
        self._best = event.found.as_preset()
        words = f"Best here: {event.found.words}."
        file = find_paths().best_here_file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            keep_best(event.found, file)
        except OSError as error:
            words = f"{words} It could not be kept: {error.strerror or error}."
        self._say(words)

    def _on_refused(self, event: BestRefused) -> None:
        self._is_searching = False
        self._say(event.message)

    def _on_engine_failed(self, error: EngineError) -> None:
        if self._is_searching:
            self._is_searching = False
            self._say(error.message)

    def _say(self, words: str) -> None:
        self.status.setText(words)
        self.status.setVisible(bool(words))
        self.refresh()

    def _on_clicked(self) -> None:
        menu = self.make_menu()
        below = self.mapToGlobal(QPoint(self.pill.geometry().right(), self.pill.geometry().bottom() + 4))
        menu.popup(below - QPoint(menu.sizeHint().width(), 0))
