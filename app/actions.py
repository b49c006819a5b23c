"""THE table of actions: the menu, the shortcuts and the help are built from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QMenu, QWidget


@dataclass(frozen=True, slots=True)
class ActionEntry:
    """One thing the user can do.

    shortcuts: the first is shown in menus and help. group: actions of one group stand together.
    checkable: the action shows a state.
    """

    key: str
    title: str
    group: str
    shortcuts: tuple[str, ...] = ()
    help: str = ""
    checkable: bool = False


ACTIONS: tuple[ActionEntry, ...] = (
    ActionEntry("new_chat", "New chat", "Chats", ("Ctrl+N",), "Start an empty chat. Others go on generating."),
    ActionEntry("search", "Search chats", "Chats", ("Ctrl+K",), "Find a chat by any word in it."),
    ActionEntry(
        "stop", "Stop generating", "Reply", ("Esc",), "End the reply of this chat. What has come so far stays."
    ),
    ActionEntry("regenerate", "Regenerate", "Reply", ("Ctrl+R",), "Another reply beside the last one; both are kept."),
    ActionEntry(
        "edit_last", "Edit last message", "Reply", ("Ctrl+E",), "Say it in other words; the old branch is kept."
    ),
    ActionEntry("latest", "Jump to latest", "Reply", ("Alt+End",), "Go to the newest text and follow it."),
    ActionEntry("compose", "Write a message", "Reply", ("Ctrl+L",), "Put the cursor into the message box."),
    ActionEntry("model", "Choose a model", "Model", ("Ctrl+M",), "Load the starter, a GGUF file or a folder."),
    ActionEntry("sidebar", "Chat list", "View", ("Ctrl+B",), "Show or hide the chats.", checkable=True),
    ActionEntry("dock", "Live panel", "View", ("Ctrl+J",), "Show or hide where the time goes.", checkable=True),
    ActionEntry(
        "detach",
        "Live panel in its own window",
        "View",
        ("Ctrl+Shift+J",),
        "Take the panel out, or put it back.",
        checkable=True,
    ),
    ActionEntry("theme_system", "Colours of the system", "Theme", checkable=True),
    ActionEntry("theme_light", "Light", "Theme", checkable=True),
    ActionEntry("theme_dark", "Dark", "Theme", checkable=True),
    ActionEntry("preferences", "Preferences", "Ridgeline", ("Ctrl+,",), "Colours, how replies are made, and folders."),
    ActionEntry("help", "Keyboard shortcuts", "Ridgeline", ("F1",), "This list."),
    ActionEntry("quit", "Quit", "Ridgeline", ("Ctrl+Q",), "Stop the engine and close the window."),
)


def make_actions(parent: QWidget, handlers: Mapping[str, Callable[[], None]]) -> dict[str, QAction]:
    """A QAction for every entry, added to ``parent`` so that its shortcuts work anywhere in the window."""
    missing = {entry.key for entry in ACTIONS} ^ set(handlers)
    assert not missing, f"actions without handler, or handlers without action: {sorted(missing)}"
    made: dict[str, QAction] = {}
    for entry in ACTIONS:
        action = QAction(entry.title, parent)
        action.setObjectName(entry.key)
        action.setShortcuts([QKeySequence(text) for text in entry.shortcuts])
        action.setShortcutContext(Qt.ShortcutContext.WindowShortcut)
        action.setCheckable(entry.checkable)
        action.setStatusTip(entry.help)
        action.triggered.connect(lambda _checked=False, do=handlers[entry.key]: do())
        parent.addAction(action)
        made[entry.key] = action
    return made


def fill_menu(menu: QMenu, actions: Mapping[str, QAction]) -> None:
    """All actions in table order, a line between groups."""
    group = ACTIONS[0].group
    for entry in ACTIONS:
        if entry.group != group:
            menu.addSeparator()
            group = entry.group
        menu.addAction(actions[entry.key])


def help_rows() -> list[tuple[str, str, str]]:
    """(shortcut, title, what it does) of every action with a shortcut, for the help window."""
    rows = [
        (QKeySequence(entry.shortcuts[0]).toString(QKeySequence.SequenceFormat.NativeText), entry.title, entry.help)
        for entry in ACTIONS
        if entry.shortcuts
    ]
    return [
        *rows,
        ("Enter", "Send", "Send the message. Shift+Enter begins a new line."),
        ("Alt+Up, Alt+Down", "Choose a message", "In the conversation; Tab then reaches its actions."),
    ]
