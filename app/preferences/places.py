"""Where Ridgeline's files are, and the report for whoever helps: the last part of the preferences dialog."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices, QGuiApplication
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.commands import doctor
from app.library.starter import models_folder
from app.log import redact
from app.paths import find_paths
from app.preferences.editors import GAP, LABEL_WIDTH

MakeReport = Callable[[], str]
_ASK = "Copy diagnostics"
_END_SECONDS = 2.0


def diagnostics() -> str:
    """What ``ridgeline doctor`` prints, secrets hidden. Reads files; imports no torch."""
    return redact(doctor.as_text(doctor.examine()))


def open_folder(folder: Path) -> None:
    """Show ``folder`` in the desktop's file manager."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(folder)))


class PlaceRow(QWidget):
    """A title, a path that can be selected, and a button that opens its folder."""

    def __init__(self, title: str, path: Path, folder: Path, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        name = QLabel(title, self)
        name.setFixedWidth(LABEL_WIDTH)
        # A path has no spaces to break at: an invisible one after each separator lets it wrap.
        self.words = QLabel(str(path).replace("/", "/\u200b").replace("\\", "\\\u200b"), self)
        self.words.setWordWrap(True)
        self.words.setProperty("look", "muted")
        self.words.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.button = QPushButton("Open folder", self)
        self.button.setAccessibleName(f"Open folder: {title}")
        self.button.clicked.connect(lambda: open_folder(folder))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(GAP)
        row.addWidget(name)
        row.addWidget(self.words, 1)
        row.addWidget(self.button)


class Places(QWidget):
    """The folders, and a button that copies the diagnostics. They are collected on a thread of their own: disks may be slow.

    Signals:
        report_made: the text, from the thread.
    """

    report_made = Signal(str)

    def __init__(self, parent: QWidget | None = None, make_report: MakeReport = diagnostics) -> None:
        super().__init__(parent)
        self._make_report = make_report
        self._thread: threading.Thread | None = None
        paths = find_paths()
        self.rows = [
            PlaceRow("Models", models_folder(), models_folder(), self),
            PlaceRow("Chats and data", paths.data, paths.data, self),
            PlaceRow("Settings", paths.settings_file, paths.config, self),
            PlaceRow("Log", paths.log_file, paths.logs, self),
        ]
        self.copy = QPushButton(_ASK, self)
        self.copy.clicked.connect(self._collect)
        self.said = QLabel("What this machine has and lacks, for a report. No chat text is in it.", self)
        self.said.setProperty("look", "small")
        self.said.setWordWrap(True)
        last = QHBoxLayout()
        last.setSpacing(12)
        last.addSpacing(LABEL_WIDTH + GAP)
        last.addWidget(self.copy)
        last.addWidget(self.said, 1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(10)
        for row in self.rows:
            layout.addWidget(row)
        layout.addLayout(last)
        self.report_made.connect(self._on_report_made)

    def _collect(self) -> None:
        self.copy.setEnabled(False)
        self._thread = threading.Thread(target=self._run, name="diagnostics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            report = self._make_report()
        except (OSError, ValueError) as error:
            report = f"The diagnostics could not be collected: {error}"
        self.report_made.emit(report)

    def _on_report_made(self, report: str) -> None:
        self.end()
        QGuiApplication.clipboard().setText(report)
        self.copy.setEnabled(True)
        self.said.setText(f"Copied, {len(report.splitlines())} lines. Paste them into your report.")

    def end(self) -> None:
        """Wait for the thread, if one runs."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_END_SECONDS)
