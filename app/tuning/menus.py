"""Lines of the panel's menus: a title, and beside it what the choice does or why it cannot be made."""

from __future__ import annotations

from PySide6.QtGui import QAction

MOST_LETTERS = 84  # a wider menu leaves small screens; the tooltip has all


def show_choice(action: QAction, title: str, words: str) -> None:
    """Write ``title`` and ``words`` on ``action``, the words shortened where they are long and whole in the tooltip."""
    shown = words if len(words) <= MOST_LETTERS else f"{words[: MOST_LETTERS - 1].rstrip()}…"
    action.setText(f"{title}\t{shown}")
    action.setToolTip(words)
