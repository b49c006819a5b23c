"""The preferences dialog, built from the table of preferences. What is typed is checked at once and kept when it is right."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from PySide6.QtCore import QSize, Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QDialog, QFrame, QHBoxLayout, QLabel, QPushButton, QScrollArea, QVBoxLayout, QWidget

from app.preferences.editors import Row
from app.preferences.places import Places
from app.preferences.table import SECTIONS, Section, preferences
from app.settings import Settings, SettingsStore

SIZE = QSize(680, 640)
SMALLEST = QSize(520, 360)
_PAUSE_MILLISECONDS = 250  # of typing, before the file is written
_RESET, _UNDO = "Reset to defaults", "Undo reset"


class PreferencesDialog(QDialog):
    """Shows the settings of ``store`` and changes them. Not modal: the chat goes on beside it.

    Signals:
        changed: keys of the settings that have just been changed, e.g. {"sampling.top_k"}.
    """

    changed = Signal(object)  # frozenset[str]

    def __init__(self, store: SettingsStore, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Preferences")
        self.setObjectName("preferences")
        self.setMinimumSize(SMALLEST)
        self.resize(SIZE)
        self._store = store
        self._before_reset: Settings | None = None
        self._waiting: dict[str, Any] = {}  # key -> value, checked and not yet written
        self._timer = QTimer(self, interval=_PAUSE_MILLISECONDS, singleShot=True)
        self._timer.setObjectName("preferences")
        self._timer.timeout.connect(self.keep)
        self.rows = {preference.key: Row(preference, self) for preference in preferences()}
        self.places = Places(self)
        self.trouble = QLabel(self)
        self.trouble.setProperty("look", "error")
        self.trouble.setWordWrap(True)
        self.trouble.hide()
        self.reset_button = QPushButton(_RESET, self)
        self.reset_button.setAutoDefault(False)
        self.reset_button.clicked.connect(self._on_reset)
        self.close_button = QPushButton("Close", self)
        self.close_button.setDefault(True)
        self.close_button.clicked.connect(self.close)
        self._lay_out()
        for row in self.rows.values():
            row.edited.connect(lambda shown, row=row: self._on_edited(row, shown))
        self.refresh()

    def _lay_out(self) -> None:
        page = QWidget()
        page.setObjectName("preferencesPage")
        column = QVBoxLayout(page)
        column.setContentsMargins(28, 22, 28, 26)
        column.setSpacing(14)
        for at, section in enumerate(SECTIONS):
            self._add_heading(column, section.title, section.note, is_first=at == 0)
            self._add_rows(column, section)
        self._add_heading(column, "Files", "To use another folder, start Ridgeline with --data-dir FOLDER.", False)
        column.addWidget(self.places)
        column.addStretch(1)
        area = QScrollArea(self)
        area.setObjectName("preferencesScroll")
        area.setFrameShape(QFrame.Shape.NoFrame)
        area.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        area.setWidgetResizable(True)
        area.setWidget(page)
        foot = QHBoxLayout()
        foot.setContentsMargins(28, 12, 28, 14)
        foot.addWidget(self.reset_button)
        foot.addWidget(self.trouble, 1)
        foot.addStretch(1)
        foot.addWidget(self.close_button)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        layout.addWidget(area, 1)
        layout.addWidget(_line(self))
        layout.addLayout(foot)

        editors = [row.editor for row in self.rows.values()]
        buttons = [row.button for row in self.places.rows]
        order = [*editors, *buttons, self.places.copy, self.reset_button, self.close_button]
        for before, after in pairwise(order):
            QWidget.setTabOrder(before, after)

    def _add_heading(self, column: QVBoxLayout, title: str, note: str, is_first: bool) -> None:
        if not is_first:
            column.addSpacing(6)
            column.addWidget(_line(self))
            column.addSpacing(6)
        line = QHBoxLayout()
        line.setSpacing(10)
        for text, look in ((title, "heading"), (note, "small")):
            label = QLabel(text, self)
            label.setProperty("look", look)
            line.addWidget(label, 0, Qt.AlignmentFlag.AlignBaseline)
        line.addStretch(1)
        column.addLayout(line)

    def _add_rows(self, column: QVBoxLayout, section: Section) -> None:
        for preference in section.preferences:
            column.addWidget(self.rows[preference.key])

    # ---- values

    def refresh(self) -> None:
        """Show what the settings are now; what is being typed and not right stays."""
        for row in self.rows.values():
            if row.problem.isHidden():
                row.show_value(row.preference.shown(self._store.settings))

    def _on_edited(self, row: Row, shown: str) -> None:
        key = row.preference.key
        self._before_reset = None
        self.reset_button.setText(_RESET)
        try:
            value = row.preference.check(self._store.settings, shown)
        except ValueError as error:
            self._waiting.pop(key, None)
            row.show_problem(f"{error} Until then it stays {self._now(row)}.")
            return
        row.show_problem("")
        self._waiting[key] = value
        if row.preference.kind == "choice":
            self.keep()
        else:
            self._timer.start()

    def _now(self, row: Row) -> str:
        return row.preference.shown(self._store.settings) or row.preference.when_empty

    def keep(self) -> None:
        """Write what was changed."""
        self._timer.stop()
        waiting, self._waiting = self._waiting, {}
        before = self._store.settings
        for key, value in waiting.items():
            self.rows[key].preference.store(self._store, value)
        self._tell(before)

    def _on_reset(self) -> None:
        """All preferences as they were at first, or, just after that, as they were before."""
        self.keep()
        before = self._store.settings
        wanted, self._before_reset = self._before_reset or Settings(), None if self._before_reset else before
        for row in self.rows.values():
            row.preference.store(self._store, row.preference.value(wanted))
            row.show_value(row.preference.shown(wanted))
        self.reset_button.setText(_UNDO if self._before_reset else _RESET)
        self._tell(before)

    def _tell(self, before: Settings) -> None:
        now = self._store.settings
        values = [(key, row.preference) for key, row in self.rows.items()]
        keys = frozenset(key for key, preference in values if preference.value(before) != preference.value(now))
        self.trouble.setText(self._store.message)
        self.trouble.setVisible(bool(self._store.message))
        if keys:
            self.changed.emit(keys)

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        super().showEvent(event)
        next(iter(self.rows.values())).editor.setFocus()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        self.keep()
        self.places.end()
        for row in self.rows.values():
            row.show_value(row.preference.shown(self._store.settings))
        super().hideEvent(event)


def _line(parent: QWidget) -> QFrame:
    line = QFrame(parent)
    line.setProperty("look", "line")
    line.setFixedHeight(1)
    return line
