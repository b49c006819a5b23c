"""DraftRow: the line below the speculation switch that says which model guesses, and lets the user choose another."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QHBoxLayout, QLabel, QMenu, QPushButton, QSizePolicy, QVBoxLayout, QWidget
from shiboken6 import isValid

from app.tuning.cards import Paragraph
from app.tuning.drafts import NONE, DraftChoice, Drafts
from app.tuning.menus import ChoiceMenu, show_choice
from app.tuning.pace import Meter
from app.tuning.switch_board import NO_MODEL


class DraftRow(QWidget):
    """Title, one line about the draft model, a pill that opens the list; below, how a load goes or why it failed."""

    def __init__(self, drafts: Drafts, meter: Meter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._drafts = drafts
        self._menu: ChoiceMenu | None = None
        self.setObjectName("switch")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.title = QLabel("Draft model", self)
        self.title.setProperty("part", "title")
        self.effect = Paragraph(meter)
        self.pill = QPushButton(self)
        self.pill.setProperty("look", "value")
        self.pill.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.pill.clicked.connect(self._on_clicked)
        self.status = QLabel(self)
        self.status.setProperty("part", "status")
        self.status.setTextFormat(Qt.TextFormat.PlainText)
        self.status.setWordWrap(True)
        self.status.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._lay_out()
        drafts.changed.connect(self.refresh)
        self.refresh()

    def _lay_out(self) -> None:
        words = QVBoxLayout()
        words.setSpacing(1)
        words.addWidget(self.title)
        words.addWidget(self.effect)
        top = QHBoxLayout()
        top.setSpacing(10)
        top.addLayout(words, 1)
        top.addWidget(self.pill, 0, Qt.AlignmentFlag.AlignTop)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(14, 7, 0, 7)  # set in: it belongs to the switch above
        layout.setSpacing(3)
        layout.addLayout(top)
        layout.addWidget(self.status)

    def refresh(self) -> None:
        """Show what the view-model knows; an open list is kept up to date."""
        drafts = self._drafts
        name = drafts.draft.name if drafts.draft else "none"
        shown = self.pill.fontMetrics().elidedText(name, Qt.TextElideMode.ElideRight, 150)
        self.pill.setText(f"{shown} …" if drafts.is_loading else shown)
        self.pill.setEnabled(drafts.has_model)
        self.pill.setToolTip(f"{name}. Click to choose." if drafts.has_model else NO_MODEL)
        self.pill.setAccessibleName(f"Draft model: {name}")
        tone = "on" if drafts.draft else "plain"
        if self.pill.property("tone") != tone:
            self.pill.setProperty("tone", tone)
            _restyle(self.pill)
        self.effect.show_text(drafts.words)
        tone = "refusal" if drafts.is_refusal else "note"
        if self.status.property("tone") != tone:
            self.status.setProperty("tone", tone)
            _restyle(self.status)
        self.status.setText(drafts.status)
        self.status.setVisible(bool(drafts.status))
        if self._menu is not None and isValid(self._menu):  # a menu that was never shown goes without a word
            self._fill(self._menu)

    def make_menu(self) -> QMenu:
        """The models with what was found of each; those that cannot guess are grey and say why."""
        menu = ChoiceMenu(self)
        self._menu = menu
        menu.aboutToHide.connect(self._on_menu_gone)
        if self._drafts.is_loading:
            menu.addAction("Stop loading", self._drafts.cancel)
            self._menu = None  # nothing in it changes
        else:
            self._drafts.open()  # fills it
        return menu

    def _fill(self, menu: ChoiceMenu) -> None:
        actions = {str(action.data()): action for action in menu.actions()}
        none = DraftChoice(NONE, "none", "nothing is loaded to guess", True, self._drafts.draft is None)
        for choice in (none, *self._drafts.choices()):
            action = actions.get(choice.source) or self._add(menu, choice)
            show_choice(action, choice.title, choice.words)
            action.setEnabled(choice.is_usable)
            action.setChecked(choice.is_current)

    def _add(self, menu: ChoiceMenu, choice: DraftChoice) -> QAction:
        action = menu.add_choice(choice.title, choice.words, partial(self._drafts.choose, choice.source))
        action.setData(choice.source)
        action.setCheckable(True)
        return action

    def _on_menu_gone(self) -> None:
        self._menu = None

    def _on_clicked(self) -> None:
        menu = self.make_menu()
        below = self.mapToGlobal(QPoint(self.pill.geometry().right(), self.pill.geometry().bottom() + 4))
        menu.popup(below - QPoint(menu.sizeHint().width(), 0))


def _restyle(widget: QWidget) -> None:
    widget.style().unpolish(widget)
    widget.style().polish(widget)
