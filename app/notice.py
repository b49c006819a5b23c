"""A strip that says what went wrong and what to do, where it happened."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QWidget


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
