"""PresetRow: named settings of all switches. Choosing one asks the engine once for everything that differs."""

from __future__ import annotations

from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QHBoxLayout, QLabel, QMenu, QPushButton, QSizePolicy, QWidget

from app.paths import find_paths
from app.tuning.switch_board import NO_MODEL, SwitchBoard
from engine.presets import Preset, presets, stored_best

OWN = "own"  # the switches are as no preset has them


class PresetRow(QWidget):
    """Title and a pill with the preset that is in force; a click opens the menu of presets."""

    def __init__(self, board: SwitchBoard, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._board = board
        self.pill = QPushButton(self)
        self.pill.setProperty("look", "value")
        self.pill.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.pill.clicked.connect(self._on_clicked)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 7)
        layout.addWidget(QLabel("Preset"), 1)
        layout.addWidget(self.pill)
        board.switch_changed.connect(self._on_switch_changed)
        self.refresh()

    def refresh(self) -> None:
        current = next((row for row in self._rows() if self._is_in_force(row)), None)
        title = current.title if current else OWN
        self.pill.setText(title)
        self.pill.setEnabled(self._board.has_model)
        self.pill.setToolTip(NO_MODEL if not self._board.has_model else current.note if current else "Click to choose.")
        self.pill.setAccessibleName(f"Preset: {title}")

    def make_menu(self) -> QMenu:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        for row in self._rows():
            action = QAction(f"{row.title}\t{row.note}", menu)
            action.setCheckable(True)
            action.setChecked(self._is_in_force(row))
            action.triggered.connect(lambda _=False, chosen=row: self._board.choose_all(chosen.settings()))
            menu.addAction(action)
        return menu

    def _rows(self) -> tuple[Preset, ...]:
        best = stored_best(find_paths().best_here_file)
        return (*presets(), best) if best else presets()

    def _is_in_force(self, row: Preset) -> bool:
        states = ((self._board.state(key), value) for key, value in row.settings().items())
        return all(state.shown == value or value in state.reasons for state, value in states)

    def _on_switch_changed(self, key: str) -> None:
        self.refresh()

    def _on_clicked(self) -> None:
        menu = self.make_menu()
        below = self.mapToGlobal(QPoint(self.pill.geometry().right(), self.height() + 3))
        menu.popup(below - QPoint(menu.sizeHint().width(), 0))
