"""The centre column: one conversation, or an empty state, above the message box. A view of the ChatController."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QStackedWidget, QVBoxLayout, QWidget

from app.chat.composer import Composer
from app.chat.controller import ChatController
from app.chat.conversation import MessageView
from app.chat.view import ChatView
from app.empty_state import EmptyState
from app.model_chooser import ModelChooser
from app.notice import Notice
from app.store.records import MessageStats

READING_WIDTH = 680
COMPOSER_OVERHANG = 16  # the message box is a little wider than the text
SIDE_MARGIN = 24


def reading_column(width: int, reserved: int) -> tuple[int, int]:
    """(left, width) of the reading column in a centre ``width`` pixels wide, of which ``reserved`` at the right belong
    to the dock that is hidden now: opening it must not move the text."""
    usable = max(0, width - reserved)
    column = max(120, min(READING_WIDTH, usable - 2 * SIDE_MARGIN))
    return max(SIDE_MARGIN, (usable - column) // 2), column


class ChatPanel(QWidget):
    """Shows one chat at a time and keeps the drafts of the others.

    Signals:
        chat_shown: chat_id.
    """

    chat_shown = Signal(str)

    def __init__(
        self, controller: ChatController, chooser: ModelChooser, notice: Notice, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self.setObjectName("centre")
        self._controller, self._chooser, self._notice = controller, chooser, notice
        self.trouble = Notice(self)  # its own strip: loading a model clears the other
        self.chat_id = ""
        self._drafts: dict[str, str] = {}
        self._reserved = 0
        self._num_tokens: int | None = None
        self.view = ChatView(self)
        self.empty = EmptyState(self)
        self.composer = Composer(self)
        self._lay_out()
        self._connect_widgets()
        self._connect_controller()
        chooser.state_changed.connect(self._on_model_state_changed)
        self.view.painter.waiting_text = self._waiting_text
        self._on_model_state_changed()

    def _lay_out(self) -> None:
        self._empty_page = QWidget(self)
        self._empty_margins = QHBoxLayout(self._empty_page)
        self._empty_margins.addWidget(self.empty)
        self.stack = QStackedWidget(self)
        self.stack.addWidget(self._empty_page)
        self.stack.addWidget(self.view)
        self._composer_margins = QHBoxLayout()
        self._composer_margins.addWidget(self.composer)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        layout.addWidget(self.trouble)
        layout.addWidget(self._notice)
        layout.addWidget(self.stack, 1)
        layout.addLayout(self._composer_margins)

    def _connect_widgets(self) -> None:
        view, composer, empty = self.view, self.composer, self.empty
        composer.send_requested.connect(self.send)
        composer.stop_requested.connect(self.stop)
        composer.draft_changed.connect(self._on_draft_changed)
        view.regenerate_requested.connect(self._regenerate)
        view.retry_requested.connect(self._regenerate)
        view.edit_requested.connect(self.begin_edit)
        view.branch_requested.connect(lambda mid, index: self._controller.choose_branch(self.chat_id, mid, index))
        empty.example_chosen.connect(self.send)
        empty.starter_requested.connect(self._chooser.get_starter)
        empty.file_requested.connect(self._chooser.popup.open_file)
        empty.folder_requested.connect(self._chooser.popup.open_folder)

    def _connect_controller(self) -> None:
        controller = self._controller
        controller.message_appended.connect(self._on_message_appended)
        controller.message_text_grew.connect(self._on_message_text_grew)
        controller.message_changed.connect(self._on_message_changed)
        controller.stats_changed.connect(self._on_stats_changed)
        controller.chat_reset.connect(self._on_chat_reset)
        controller.chats_changed.connect(self._on_chats_changed)
        controller.context_counted.connect(self._on_context_counted)
        controller.storage_failed.connect(self._on_storage_failed)

    # ---- for the window

    def show_chat(self, chat_id: str) -> None:
        """Show another chat; the draft of the one before is kept."""
        if self.chat_id and not self.composer.editing_id:
            self._drafts[self.chat_id] = self.composer.text
        self.composer.take_text()
        self.chat_id = chat_id
        self._num_tokens = None
        self._on_chat_reset(chat_id, keep_place=False)
        self.composer.set_text(self._drafts.pop(chat_id, ""))
        self._on_chats_changed()
        self._show_context()
        self._controller.count_context(chat_id, self.composer.text)
        self.chat_shown.emit(chat_id)

    def reserve(self, width: int) -> None:
        """Pixels at the right that a hidden dock would take; in force from the next `place` or resize on."""
        self._reserved = width

    def send(self, text: str) -> None:
        """Send ``text``, or put it in place of the message being edited."""
        if not self._chooser.is_ready:
            self._notice.say("No model is loaded, so nobody would answer.", "Choose a model", self._chooser.open)
            return
        editing = self.composer.editing_id
        if text == self.composer.text:
            self.composer.take_text()
        if editing:
            self._controller.edit(self.chat_id, editing, text)
        else:
            self._controller.send(self.chat_id, text)

    def on_preferences_changed(self) -> None:
        """How full the window is, and what happens at its end, may be different now."""
        self._show_context()
        if self.chat_id:
            self._controller.count_context(self.chat_id, self.composer.text)

    def stop(self) -> None:
        """End this chat's reply; without one, leave the edit that was begun."""
        if self._controller.is_generating(self.chat_id):
            self._controller.stop(self.chat_id)
        elif self.composer.editing_id:
            self.composer.cancel_edit()

    def regenerate_last(self) -> None:
        last = self._last("assistant")
        if last is not None:
            self._regenerate(last.message_id)

    def edit_last(self) -> None:
        last = self._last("user")
        if last is not None:
            self.begin_edit(last.message_id)

    def begin_edit(self, message_id: str) -> None:
        self.composer.begin_edit(message_id, self.view.transcript.text_of(message_id))

    def _last(self, role: str) -> MessageView | None:
        messages = self._controller.messages(self.chat_id)
        return next((message for message in reversed(messages) if message.role == role), None)

    def _regenerate(self, message_id: str) -> None:
        if not self._chooser.is_ready:
            self._notice.say("No model is loaded, so nobody would answer.", "Choose a model", self._chooser.open)
            return
        self.view.jump_to_latest()
        self._controller.regenerate(self.chat_id, message_id)

    # ---- what the controller says

    def _on_message_appended(self, chat_id: str, message: MessageView) -> None:
        if chat_id == self.chat_id:
            self.view.append_message(message)
            self.stack.setCurrentWidget(self.view)

    def _on_message_text_grew(self, chat_id: str, message_id: str, added: str) -> None:
        if chat_id == self.chat_id:
            self.view.grow_message(message_id, added)

    def _on_message_changed(self, chat_id: str, message: MessageView) -> None:
        if chat_id == self.chat_id:
            self.view.change_message(message)

    def _on_stats_changed(self, chat_id: str, message_id: str, stats: MessageStats) -> None:
        if chat_id == self.chat_id:
            self.view.set_stats(message_id, stats)

    def _on_chat_reset(self, chat_id: str, keep_place: bool = True) -> None:
        if chat_id != self.chat_id:
            return
        messages = self._controller.messages(chat_id)
        self.view.set_messages(messages, keep_place)
        self.stack.setCurrentWidget(self.view if messages else self._empty_page)

    def _on_chats_changed(self) -> None:
        self.composer.set_generating(bool(self.chat_id) and self._controller.is_generating(self.chat_id))

    def _on_context_counted(self, chat_id: str, num_tokens: int) -> None:
        if chat_id == self.chat_id:
            self._num_tokens = num_tokens
            self._show_context()

    def _on_storage_failed(self, chat_id: str, message: str) -> None:
        if not chat_id:
            self.say_trouble(message)

    def say_trouble(self, words: str) -> None:
        """What is wrong with the chats file, with the button that repairs it where that is possible."""
        if self._controller.can_repair:
            repair = self._controller.repair
            self.trouble.say(self._controller.trouble, "Repair", lambda: self.trouble.say(repair()))
            return
        self.trouble.say(words)

    def _on_draft_changed(self, text: str) -> None:
        if self.chat_id:
            self._controller.count_context(self.chat_id, text)

    # ---- the model

    def _on_model_state_changed(self) -> None:
        info = self._chooser.info
        self.empty.show_model(info.name if info else "", self._chooser.is_loading)
        self._show_context()
        self.view.viewport().update()

    def _show_context(self) -> None:
        info = self._chooser.info
        settings = self._controller.settings
        limit = info.context_length if info else None
        self.composer.set_context(self._num_tokens, limit, settings.context_policy, settings.sampling.max_tokens)

    def _waiting_text(self) -> str:
        if self._chooser.is_loading:
            return "The model is still loading. The reply starts when it is ready."
        return "Reading the conversation"

    # ---- place

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        super().resizeEvent(event)
        self.place()

    def place(self) -> None:
        """Put view, message box and empty state on the reading column."""
        left, width = reading_column(self.width(), self._reserved)
        right = self.width() - left - width
        self.view.set_column(left, width)
        overhang = min(COMPOSER_OVERHANG, left - 8)
        self._composer_margins.setContentsMargins(left - overhang, 6, max(8, right - overhang), 16)
        self._empty_margins.setContentsMargins(left, 0, right, 0)
