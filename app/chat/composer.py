"""The message box: grows with its text, sends on Enter, shows how full the context is, and can always stop."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QSize, Qt, Signal
from PySide6.QtGui import QFocusEvent, QInputMethodEvent, QKeyEvent, QKeySequence
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QPlainTextEdit,
    QProgressBar,
    QPushButton,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.actions import ACTIONS
from engine.commands import Overflow
from engine.context import reply_room

MOST_LINES = 8
_METER_STEPS = 1000


class MessageEdit(QPlainTextEdit):
    """Plain text, as high as its lines up to a limit.

    Signals:
        send_pressed: Enter without Shift, outside of input method composition.
        focus_changed: whether it has the keyboard.
    """

    send_pressed = Signal()
    focus_changed = Signal(bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setPlaceholderText("Ask something")
        self.setAccessibleName("Message")
        self.setTabChangesFocus(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.document().setDocumentMargin(2)
        self.is_composing = False
        self.document().documentLayout().documentSizeChanged.connect(lambda _size: self._fit())

    def event(self, event: QEvent) -> bool:
        """The window's shortcuts win over the editing keys that Qt gives a text field on some systems (Ctrl+K, Ctrl+E)."""
        if isinstance(event, QKeyEvent) and event.type() is QEvent.Type.ShortcutOverride:
            typed = QKeySequence(event.keyCombination())
            if any(typed == QKeySequence(text) for entry in ACTIONS for text in entry.shortcuts):
                event.ignore()
                return False
        return super().event(event)

    def inputMethodEvent(self, event: QInputMethodEvent) -> None:  # noqa: N802
        """While there is preedit text Enter belongs to the input method (FIELD 49)."""
        self.is_composing = bool(event.preeditString())
        super().inputMethodEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        is_enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if is_enter and self.is_composing:
            event.accept()
        elif is_enter and event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self.insertPlainText("\n")
            self.ensureCursorVisible()
        elif is_enter:
            self.send_pressed.emit()
        else:
            super().keyPressEvent(event)

    def focusInEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        super().focusInEvent(event)
        self.focus_changed.emit(True)

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        super().focusOutEvent(event)
        self.is_composing = False  # the input method ends with the focus
        self.focus_changed.emit(False)

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        super().changeEvent(event)
        if event.type() is QEvent.Type.FontChange:
            self._fit()

    def height_for(self, num_lines: int) -> int:
        """Pixels that show ``num_lines`` lines."""
        return self.fontMetrics().lineSpacing() * num_lines + 2 * int(self.document().documentMargin()) + 2

    def _fit(self) -> None:
        num_lines = max(1, int(self.document().size().height()))  # QPlainTextEdit counts its height in lines
        self.setFixedHeight(self.height_for(min(num_lines, MOST_LINES)))
        policy = Qt.ScrollBarPolicy
        is_full = num_lines > MOST_LINES
        self.setVerticalScrollBarPolicy(policy.ScrollBarAsNeeded if is_full else policy.ScrollBarAlwaysOff)

    def sizeHint(self) -> QSize:  # noqa: N802
        return QSize(200, self.height_for(1))


def _at_the_limit(limit: int, most: int, policy: Overflow) -> str:
    """What happens when the window is full, in the chat's own figures."""
    window = f"The model's window holds {limit:,} tokens, the reply included."
    if policy == "stop":
        return f"{window} A longer chat is not sent, and a reply ends when the window is full. Preferences (Ctrl+,) can change that."
    return (
        f"{window} From {most:,} tokens on the oldest messages are left out of what the model reads, to keep room for "
        "the reply. They stay in the chat, and the system prompt is always sent. Preferences (Ctrl+,) can change that."
    )


class Composer(QFrame):
    """Message box, context meter, and one button that is Send, or Stop while the chat generates.

    Signals:
        send_requested: the text, not empty. The box is cleared by `take_text`, so that a refused text stays.
        stop_requested: Stop, at any moment, also while a model loads.
        draft_changed: the text, whenever it changed.
        edit_cancelled: the message being edited is left as it was.
    """

    send_requested = Signal(str)
    stop_requested = Signal()
    draft_changed = Signal(str)
    edit_cancelled = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("composer")
        self._is_generating = False
        self.editing_id = ""  # the message that the text will replace, as another branch
        self.edit = MessageEdit(self)
        self.edit.send_pressed.connect(self._on_send)
        self.edit.focus_changed.connect(self._on_focus_changed)
        self.edit.textChanged.connect(self._on_text_changed)
        self.meter = QProgressBar(self)
        self.meter.setTextVisible(False)
        self.meter.setRange(0, _METER_STEPS)
        self.meter.setFixedWidth(120)
        self.meter.setAccessibleName("Context used")
        self.meter_label = QLabel(self)
        self.meter_label.setProperty("look", "muted")
        self.button = QPushButton("Send", self)
        self.button.setProperty("look", "primary")
        self.button.setMinimumWidth(64)
        self.button.clicked.connect(self._on_button)
        self.note = QWidget(self)
        self._lay_out()
        self.set_context(None, None)
        self._show_button()

    def _lay_out(self) -> None:
        banner = QHBoxLayout(self.note)
        banner.setContentsMargins(0, 0, 0, 0)
        words = QLabel("Editing an earlier message. Sending adds a branch; the old one is kept.", self.note)
        words.setProperty("look", "muted")
        cancel = QToolButton(self.note)
        cancel.setText("Cancel")
        cancel.clicked.connect(self.cancel_edit)
        banner.addWidget(words, 1)
        banner.addWidget(cancel)
        self.note.hide()
        below = QHBoxLayout()
        below.setSpacing(10)
        below.addWidget(self.meter)
        below.addWidget(self.meter_label)
        below.addStretch(1)
        below.addWidget(self.button)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(14, 11, 13, 10)
        layout.setSpacing(9)
        layout.addWidget(self.note)
        layout.addWidget(self.edit)
        layout.addLayout(below)

    @property
    def text(self) -> str:
        return self.edit.toPlainText()

    def take_text(self) -> str:
        """The text; the box is empty afterwards."""
        text = self.text
        self.edit.clear()
        self._end_edit()
        return text

    def set_text(self, text: str) -> None:
        self.edit.setPlainText(text)
        self.edit.moveCursor(self.edit.textCursor().MoveOperation.End)

    def begin_edit(self, message_id: str, text: str) -> None:
        """Let the user rewrite a message they sent."""
        self.editing_id = message_id
        self.note.show()
        self.set_text(text)
        self.edit.setFocus()

    def cancel_edit(self) -> None:
        self.edit.clear()
        self._end_edit()
        self.edit_cancelled.emit()

    def _end_edit(self) -> None:
        self.editing_id = ""
        self.note.hide()

    @property
    def is_generating(self) -> bool:
        return self._is_generating

    def set_generating(self, is_generating: bool) -> None:
        """Send becomes Stop and back."""
        if is_generating != self._is_generating:
            self._is_generating = is_generating
            self._show_button()

    def set_context(
        self, num_tokens: int | None, limit: int | None, policy: Overflow = "stop", max_tokens: int | None = None
    ) -> None:
        """Tokens of the rendered chat, and the largest conversation that fits; None while unknown.

        policy and max_tokens: what happens at the limit, and the longest reply, for the words beside the meter.
        """
        is_known = num_tokens is not None and bool(limit)
        self.meter.setVisible(is_known)
        self.meter_label.setVisible(is_known)
        if num_tokens is None or not limit:
            return
        is_full = num_tokens >= limit
        self.meter.setValue(min(_METER_STEPS, num_tokens * _METER_STEPS // limit))
        if self.meter.property("full") != is_full:
            self.meter.setProperty("full", is_full)
            self.meter.style().unpolish(self.meter)
            self.meter.style().polish(self.meter)
        words = f"{num_tokens:,} of {limit:,} tokens"
        most = limit if policy == "stop" else limit - reply_room(limit, max_tokens)
        beyond = "more than fits" if policy == "stop" else "the oldest are left out"
        self.meter_label.setText(f"{words}: {beyond}" if num_tokens > most else words)
        for part in (self.meter, self.meter_label):
            part.setToolTip(_at_the_limit(limit, most, policy))

    def _show_button(self) -> None:
        self.button.setText("Stop" if self._is_generating else "Send")
        self.button.setToolTip("Esc" if self._is_generating else "Enter; Shift+Enter begins a new line")
        self.button.setEnabled(self._is_generating or bool(self.text.strip()))

    def _on_button(self) -> None:
        if self._is_generating:
            self.stop_requested.emit()
        else:
            self._on_send()

    def _on_send(self) -> None:
        if not self._is_generating and self.text.strip():
            self.send_requested.emit(self.text)

    def _on_text_changed(self) -> None:
        self._show_button()
        self.draft_changed.emit(self.text)

    def _on_focus_changed(self, has_focus: bool) -> None:
        self.setProperty("focused", has_focus)
        self.style().unpolish(self)
        self.style().polish(self)
