"""The switches: one row per entry of engine/options.py, grouped by pile. Rows show a SwitchBoard and ask it for changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QHBoxLayout, QLabel, QMenu, QPushButton, QSizePolicy, QVBoxLayout, QWidget

from app.tuning.cards import Paragraph, stack
from app.tuning.effects import KIND_SENTENCES, KIND_WORDS
from app.tuning.menus import ChoiceMenu
from app.tuning.pace import Meter
from app.tuning.switch_board import NO_MODEL, SwitchBoard, SwitchState
from engine.options import OPTIONS, OptionEntry, Pile

PLAIN_VALUES = ("off", "none", "reference")  # nothing optimized: the pill is not accented
PILE_ORDER = (Pile.MORE_TOKENS, Pile.FEWER_BYTES, Pile.CAPACITY, Pile.PREFILL, Pile.FUSION)


class Pill(QPushButton):
    """The current value. Two choices: a click flips. More: a click opens a menu of them."""

    def __init__(self, option: OptionEntry, board: SwitchBoard, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._option, self._board = option, board
        self.setProperty("look", "value")
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.clicked.connect(self._on_clicked)

    def show_state(self, state: SwitchState, has_model: bool) -> None:
        option = self._option
        title = option.choice(state.shown).title
        self.setText(f"{title} …" if state.pending else title)
        flips = len(option.choices) == 2
        stuck = flips and self._other(state) in state.blocked
        self.setEnabled(has_model and not stuck)
        self.setToolTip(self._tool_tip(state, has_model, flips))
        self.setAccessibleName(f"{option.title}: {title}")
        kind = "plain" if state.shown in PLAIN_VALUES else "on"
        if self.property("tone") != kind:
            self.setProperty("tone", kind)
            self.style().unpolish(self)
            self.style().polish(self)

    def make_menu(self) -> QMenu:
        """The choices with what each does; those that cannot be used are grey and say why."""
        state = self._board.state(self._option.key)
        menu = ChoiceMenu(self)
        blocked = state.blocked
        for choice in self._option.choices:
            reason = blocked.get(choice.value)
            choose = partial(self._board.choose, self._option.key, choice.value)
            action = menu.add_choice(choice.title, reason or choice.note, choose)
            action.setCheckable(True)
            action.setChecked(choice.value == state.shown)
            action.setEnabled(reason is None)
        return menu

    def _tool_tip(self, state: SwitchState, has_model: bool, flips: bool) -> str:
        if not has_model:
            return NO_MODEL
        other = self._other(state)
        if flips and other in state.blocked:
            return state.blocked[other]
        if flips:
            return f"Click for {self._option.choice(other).title}: {self._option.choice(other).note}."
        return f"{self._option.choice(state.shown).note}. Click to choose."

    def _other(self, state: SwitchState) -> str:
        return next(value for value in self._option.values if value != state.shown)

    def _on_clicked(self) -> None:
        if len(self._option.choices) == 2:
            self._board.choose(self._option.key, self._other(self._board.state(self._option.key)))
            return
        menu = self.make_menu()
        below = self.mapToGlobal(QPoint(self.width(), self.height() + 3))
        menu.popup(below - QPoint(menu.sizeHint().width(), 0))


class SwitchRow(QWidget):
    """Title and kind of change, one line of effect, the pill; below, when asked for, the explanation."""

    def __init__(self, option: OptionEntry, board: SwitchBoard, meter: Meter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.option, self._board = option, board
        self.setObjectName("switch")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.pill = Pill(option, board, self)
        self.title = QPushButton(self)
        self.title.setProperty("look", "link")
        self.title.setCheckable(True)
        self.title.setToolTip("What it does and what changing it costs")
        self.title.toggled.connect(self._on_toggled)
        self.kind = _label("kind", KIND_WORDS[option.kind])
        self.kind.setToolTip(KIND_SENTENCES[option.kind])
        self.kind.setMinimumWidth(1)  # where all do not fit, this gives way and not the pill
        self.effect = Paragraph(meter)
        self.status = _label("status")
        self.status.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.status.hide()
        self.explanation = _label("explanation", _explanation(option))
        self.explanation.hide()
        self._lay_out()
        self._on_toggled(False)
        self.refresh()

    def _lay_out(self) -> None:
        heading = QHBoxLayout()
        heading.setSpacing(8)
        heading.addWidget(self.title)
        heading.addWidget(self.kind, 0, Qt.AlignmentFlag.AlignBaseline)
        heading.addStretch(1)
        words = QVBoxLayout()
        words.setSpacing(1)
        words.addLayout(heading)
        words.addWidget(self.effect)
        top = QHBoxLayout()
        top.setSpacing(10)
        top.addLayout(words, 1)
        top.addWidget(self.pill, 0, Qt.AlignmentFlag.AlignTop)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 7, 0, 7)
        layout.setSpacing(3)
        layout.addLayout(top)
        layout.addWidget(self.status)
        layout.addWidget(self.explanation)

    def refresh(self) -> None:
        """Show the board's state; texts that did not change cost nothing."""
        state = self._board.state(self.option.key)
        self.pill.show_state(state, self._board.has_model)
        self.effect.show_text(self._board.effect(self.option.key))
        tone = "refusal" if state.is_refusal else "note"
        if self.status.property("tone") != tone:
            self.status.setProperty("tone", tone)
            self.status.style().unpolish(self.status)
            self.status.style().polish(self.status)
        _show_text(self.status, state.status)
        if self.status.isHidden() == bool(state.status):
            self.status.setVisible(bool(state.status))

    def _on_toggled(self, opened: bool) -> None:
        self.title.setText(f"{self.option.title}  {'▾' if opened else '▸'}")
        self.explanation.setVisible(opened)


class Switches(QWidget):
    """Rows for the whole table (or the ``options`` given), under the headings of their piles.

    below: key -> what stands under that switch's row.

    Attributes:
        rows: key -> SwitchRow.
    """

    def __init__(
        self,
        board: SwitchBoard,
        meter: Meter,
        options: Iterable[OptionEntry] = OPTIONS,
        parent: QWidget | None = None,
        below: Mapping[str, QWidget] | None = None,
    ) -> None:
        super().__init__(parent)
        self.rows: dict[str, SwitchRow] = {}
        self._board = board
        layout = stack(spacing=0)
        self.setLayout(layout)
        chosen = list(options)
        for pile in sorted({option.pile for option in chosen}, key=_order_of):
            layout.addWidget(heading(str(pile.value)))
            for option in (option for option in chosen if option.pile is pile):
                row = SwitchRow(option, board, meter, self)
                self.rows[option.key] = row
                layout.addWidget(row)
                if below and option.key in below:
                    layout.addWidget(below[option.key])
        board.switch_changed.connect(self._on_switch_changed)

    def refresh(self) -> None:
        for row in self.rows.values():
            row.refresh()

    def _on_switch_changed(self, key: str) -> None:
        if not key:
            self.refresh()
        elif key in self.rows:
            self.rows[key].refresh()


def _order_of(pile: Pile) -> int:
    return PILE_ORDER.index(pile) if pile in PILE_ORDER else len(PILE_ORDER)


def _explanation(option: OptionEntry) -> str:
    choices = "\n".join(f"{choice.title}: {choice.note}" for choice in option.choices if not choice.title.isdigit())
    lossless = "The text stays the same." if option.lossless else "The text can differ."
    parts = (option.explanation, choices, f"Changes {option.terms}. {lossless} {KIND_SENTENCES[option.kind]}")
    return "\n\n".join(part for part in parts if part)


def _label(part: str, text: str = "") -> QLabel:
    label = QLabel(text)
    label.setIndent(0)
    label.setProperty("part", part)
    label.setWordWrap(part in ("explanation", "status"))
    label.setTextFormat(Qt.TextFormat.PlainText)
    return label


def heading(text: str) -> QLabel:
    """A muted heading over a group of rows."""
    return _label("pile", text)


def _show_text(label: QLabel, text: str) -> None:
    if label.text() != text:
        label.setText(text)
