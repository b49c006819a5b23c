"""The context menu of a message: everything its toolbar offers, for mouse and keyboard alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMenu

from app.chat.markdown import BlockKind

if TYPE_CHECKING:
    from app.chat.view import ChatView


def message_menu(view: ChatView, message_id: str, row: int | None) -> QMenu:
    """A menu for ``message_id`` (may be empty) opened over ``row``; it deletes itself when closed."""
    menu = QMenu(view)
    menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    copy = menu.addAction("Copy selected text", view.copy)
    copy.setEnabled(bool(view.selected_text()))
    menu.addAction("Select all", view.select_all)
    if row is not None:
        _add_code(menu, view, row)
    if message_id:
        _add_message(menu, view, message_id)
    return menu


def _add_code(menu: QMenu, view: ChatView, row: int) -> None:
    rows = view.transcript.rows
    block = rows[row].block
    if block is None or block.kind is not BlockKind.CODE:
        return
    while row > 0 and (inner := rows[row].block) is not None and inner.continues:
        row -= 1
    menu.addAction("Copy code", lambda: view.copy_code(row))


def _add_message(menu: QMenu, view: ChatView, message_id: str) -> None:
    message = view.transcript.message_of(message_id)
    menu.addSeparator()
    menu.addAction("Copy message", lambda: view.copy_message(message_id))
    if message.role == "user":
        menu.addAction("Edit and send again", lambda: view.edit_requested.emit(message_id))
    elif message.state != "streaming":
        title = "Try again" if message.state == "failed" else "Regenerate"
        menu.addAction(title, lambda: view.regenerate_requested.emit(message_id))
    index, count = message.branch_index, message.branch_count
    if count > 1:
        menu.addSeparator()
        previous = menu.addAction("Previous version", lambda: view.branch_requested.emit(message_id, index - 1))
        following = menu.addAction("Next version", lambda: view.branch_requested.emit(message_id, index + 1))
        previous.setEnabled(index > 0)
        following.setEnabled(index + 1 < count)
