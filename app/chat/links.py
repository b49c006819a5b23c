"""Opening links from a message: only after asking, and only web and mail addresses."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QMessageBox, QWidget

from app.chat.markdown import is_safe_link


class LinkOpener:
    """Asks, then hands the address to the system.

    Attributes:
        ask: (address, then) shows the question and calls ``then`` on yes.
        open_url: opens an address; both are replaced by tests.
    """

    def __init__(self, parent: QWidget) -> None:
        self._parent = parent
        self.ask: Callable[[str, Callable[[], object]], None] = self._ask
        self.open_url: Callable[[QUrl], bool] = QDesktopServices.openUrl

    def ask_and_open(self, address: str) -> None:
        """Offer to open ``address``; anything but http, https and mailto is ignored."""
        if is_safe_link(address):
            self.ask(address, lambda: self.open_url(QUrl(address)))

    def _ask(self, address: str, then: Callable[[], object]) -> None:
        box = QMessageBox(self._parent)
        box.setWindowTitle("Open link")
        box.setText("Open this address outside Ridgeline?")
        box.setInformativeText(address)
        box.setTextInteractionFlags(box.textInteractionFlags())
        yes = box.addButton("Open", QMessageBox.ButtonRole.AcceptRole)
        box.addButton("Cancel", QMessageBox.ButtonRole.RejectRole)
        yes.clicked.connect(then)
        box.finished.connect(box.deleteLater)
        box.open()
