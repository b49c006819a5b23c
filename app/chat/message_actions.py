"""The small toolbar on the message under the pointer, or on the one chosen with the keyboard."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QToolButton, QWidget

from app import theme as look
from app.chat.conversation import MessageView


class MessageActions(QWidget):
    """Real buttons, so that the keyboard and a screen reader reach them.

    Signals:
        copy_asked, regenerate_asked, edit_asked: for the message shown.
        branch_asked: index of the alternative to show.
    """

    copy_asked = Signal(str)
    regenerate_asked = Signal(str)
    edit_asked = Signal(str)
    branch_asked = Signal(str, int)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.message_id = ""
        self._branch_index = 0
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        self.previous = self._button("‹", "Previous version", lambda: self._go(-1))
        self.branch = QLabel(self)
        self.branch.setProperty("look", "muted")
        self.branch.setFont(look.font(12))
        self.next = self._button("›", "Next version", lambda: self._go(1))
        self.edit = self._button("Edit", "Edit and send again", lambda: self.edit_asked.emit(self.message_id))
        self.regenerate = self._button(
            "Regenerate", "Another reply (Ctrl+R)", lambda: self.regenerate_asked.emit(self.message_id)
        )
        self.copy = self._button("Copy", "Copy the message as written", lambda: self.copy_asked.emit(self.message_id))
        for widget in (self.previous, self.branch, self.next, self.edit, self.regenerate, self.copy):
            layout.addWidget(widget)
        self.hide()

    def _button(self, text: str, hint: str, do: object) -> QToolButton:
        button = QToolButton(self)
        button.setText(text)
        button.setToolTip(hint)
        button.setAccessibleName(hint)
        button.setFont(look.font(12))
        button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        button.clicked.connect(do)
        return button

    def _go(self, by: int) -> None:
        self.branch_asked.emit(self.message_id, self._branch_index + by)

    def show_for(self, message: MessageView) -> None:
        """Fit the buttons to ``message``; the caller moves the toolbar into place."""
        self.message_id = message.message_id
        self._branch_index = message.branch_index
        is_streaming = message.state == "streaming"
        has_branches = message.branch_count > 1
        for widget in (self.previous, self.branch, self.next):
            widget.setVisible(has_branches)
        self.branch.setText(f"{message.branch_index + 1} of {message.branch_count}")
        self.previous.setEnabled(message.branch_index > 0)
        self.next.setEnabled(message.branch_index + 1 < message.branch_count)
        self.edit.setVisible(message.role == "user")
        self.regenerate.setVisible(message.role == "assistant" and not is_streaming)
        self.adjustSize()
        self.show()
