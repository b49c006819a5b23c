"""The live panel in a window of its own."""

from __future__ import annotations

from PySide6.QtCore import QByteArray, QSize, Qt, Signal
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QVBoxLayout, QWidget

USUAL = QSize(480, 800)
SMALLEST_HEIGHT = 320


class DockWindow(QWidget):
    """Holds the dock while it is detached.

    Signals:
        closed: by the user; the dock wants to go back.
    """

    closed = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent, Qt.WindowType.Window)
        self.setObjectName("dock_window")
        self.setWindowTitle("Live panel - Ridgeline")
        self.setMinimumHeight(SMALLEST_HEIGHT)
        self.resize(USUAL)
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)

    def hold(self, dock: QWidget) -> None:
        self._layout.addWidget(dock)
        dock.show()

    @property
    def geometry_text(self) -> str:
        """Size and place, for the settings."""
        return bytes(self.saveGeometry().toBase64().data()).decode("ascii")

    def put_back(self, geometry_text: str) -> None:
        """Take size and place as they were; a text that is damaged changes nothing."""
        if geometry_text:
            self.restoreGeometry(QByteArray.fromBase64(geometry_text.encode("ascii", "ignore")))

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        super().closeEvent(event)
        self.closed.emit()
