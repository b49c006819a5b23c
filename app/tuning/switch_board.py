"""SwitchBoard: the state of every switch, between the engine's answers and the rows that show it. A view-model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from PySide6.QtCore import QObject, Signal

from app.bridge import EngineBridge
from app.tuning.consequences import Consequences
from app.tuning.effects import Effects
from app.tuning.figures import LiveFigures
from app.tuning.numbers import plural, seconds
from engine.events import (
    DraftChanged,
    EngineError,
    ModelInfo,
    ModelLoaded,
    ModelLoadFailed,
    ModelLoading,
    OptionsApplied,
    OptionsRefused,
)
from engine.options import OPTIONS, Kind, OptionEntry, clashes, entry

NO_MODEL = "Load a model to use the switches."


@dataclass(frozen=True, slots=True)
class SwitchState:
    """One switch. ``pending`` is the value asked for and not yet answered; ``reasons`` why choices cannot be used here at all,
    ``clashes`` why not while the other switches are as they are."""

    value: str
    pending: str | None = None
    status: str = ""
    is_refusal: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)
    clashes: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        return self.pending or self.value

    @property
    def blocked(self) -> Mapping[str, str]:
        """Choice -> why it cannot be chosen now."""
        return {**self.clashes, **self.reasons}


def mark_name(option: OptionEntry, value: str) -> str:
    """How a flip is called in the plots: "int4", "prefix sharing off", "batch limit 8"."""
    title = option.choice(value).title
    speaks_for_itself = not (title in ("on", "off", "full") or title.isdigit())
    return title if speaks_for_itself else f"{option.title[:1].lower()}{option.title[1:]} {title}".replace("kV", "KV")


class SwitchBoard(QObject):
    """Posts what the user chooses, and keeps what the engine answered. Who has the records feeds ``consequences``.

    Signals:
        switch_changed: the key whose state is new; "" when all may be.
        switches_applied: OptionsApplied, after the states were updated.
    """

    switch_changed = Signal(str)
    switches_applied = Signal(object)

    def __init__(self, bridge: EngineBridge, figures: LiveFigures, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.effects = Effects(figures)
        self.consequences = Consequences()
        self.info: ModelInfo | None = None
        self._bridge = bridge
        self._states = {option.key: SwitchState(option.default) for option in OPTIONS}
        bridge.model_loading.connect(self._on_loading)
        bridge.model_loaded.connect(self._on_loaded)
        bridge.model_load_failed.connect(self._on_load_failed)
        bridge.options_applied.connect(self._on_applied)
        bridge.options_refused.connect(self._on_refused)
        bridge.draft_changed.connect(self._on_draft_changed)
        bridge.engine_failed.connect(self._on_engine_failed)

    @property
    def has_model(self) -> bool:
        return self.info is not None

    def state(self, key: str) -> SwitchState:
        return self._states[key]

    def effect(self, key: str) -> str:
        """What the switch does as it is set, and what was measured since it was."""
        line, since = self.effects.line(entry(key), self._states[key].value), self.consequences.line(key)
        return f"{line.removesuffix('.')}. {since}" if since else line

    def choose(self, key: str, value: str) -> None:
        """Ask the engine for ``key`` = ``value``. Nothing is asked twice, and not without a model."""
        state = self._states[key]
        if not self.has_model or value == state.shown or value in state.blocked:
            return
        slow = entry(key).kind is Kind.WEIGHTS
        self._set(key, replace(state, pending=value, status="Reloading weights" if slow else "", is_refusal=False))
        self._bridge.set_options({key: value})

    def choose_all(self, values: Mapping[str, str]) -> list[str]:
        """Ask for many values in one command (a preset). Those that cannot be used here, or hold already, are left out.

        What clashes with a switch as it is now may go with it as it will be: the engine judges them together.
        Returns what is left out since it cannot be used here, each with its reason.
        """
        left_out = [
            f"{option.title} {option.choice(value).title}: {self._states[key].reasons[value]}"
            for key, value in values.items()
            if value in self._states[key].reasons and (option := entry(key)).default != value
        ]
        changes = {
            key: value
            for key, value in values.items()
            if value != self._states[key].shown and value not in self._states[key].reasons
        }
        if not self.has_model or not changes:
            return left_out
        for key, value in changes.items():
            slow = entry(key).kind is Kind.WEIGHTS
            status = "Reloading weights" if slow else ""
            self._set(key, replace(self._states[key], pending=value, status=status, is_refusal=False))
        self._bridge.set_options(changes)
        return left_out

    def clear_old_statuses(self) -> None:
        """Forget what finished changes said; a refusal stays until the next try."""
        for key, state in self._states.items():
            if state.status and not state.is_refusal and state.pending is None:
                self._set(key, replace(state, status=""))

    # ---- what the engine says

    def _on_loading(self, loading: ModelLoading) -> None:
        for key, state in self._states.items():
            if state.pending is not None and entry(key).kind is Kind.WEIGHTS:
                self._set(key, replace(state, status=f"{loading.stage}, {loading.fraction * 100:.0f} %"))

    def _on_loaded(self, loaded: ModelLoaded) -> None:
        self.info = loaded.info
        self.effects.on_info(loaded.info, is_same_model=False)
        self._states = {
            option.key: SwitchState(
                loaded.options.get(option.key, option.default), reasons=loaded.unavailable.get(option.key, {})
            )
            for option in OPTIONS
        }
        self._find_clashes()
        self.switch_changed.emit("")

    def _on_load_failed(self, failed: ModelLoadFailed) -> None:
        if not failed.kept:
            self._lose_model()

    def _on_engine_failed(self, error: EngineError) -> None:
        for key, state in self._states.items():
            if state.pending is not None:
                self._set(key, replace(state, pending=None, status=error.message, is_refusal=True))

    def _lose_model(self) -> None:
        self.info = None
        self._states = {key: SwitchState(state.value) for key, state in self._states.items()}
        self.switch_changed.emit("")

    def _on_applied(self, applied: OptionsApplied) -> None:
        if applied.info is not None:
            self.info = applied.info
            self.effects.on_info(applied.info, is_same_model=True)
        for key, state in self._states.items():
            value = applied.options.get(key, state.value)
            if key in applied.changed:
                pending = None if state.pending == value else state.pending
                status = "" if pending else _what_it_took(entry(key), applied)
                self._set(key, replace(state, value=value, pending=pending, status=status, is_refusal=False))
            elif state.pending == value:
                self._set(key, replace(state, value=value, pending=None, status=""))
        self.switches_applied.emit(applied)

    def _on_draft_changed(self, changed: DraftChanged) -> None:
        """What hangs on the draft model can be chosen now, or no more; a switch that needed it may have moved."""
        for key, state in self._states.items():
            reasons, value = changed.unavailable.get(key, {}), changed.options.get(key, state.value)
            if reasons != state.reasons or value != state.value:
                self._set(key, replace(state, value=value, reasons=reasons))

    def _on_refused(self, refused: OptionsRefused) -> None:
        for key in refused.changes:
            if key in self._states:
                state = self._states[key]
                self._set(key, replace(state, pending=None, status=refused.message, is_refusal=True))

    def _set(self, key: str, state: SwitchState) -> None:
        self._states[key] = state
        self.switch_changed.emit(key)
        self._find_clashes()

    def _find_clashes(self) -> None:
        """Which choices the other switches, as they are shown now, do not allow."""
        found = clashes({key: state.shown for key, state in self._states.items()})
        for key, state in list(self._states.items()):
            if state.clashes != found.get(key, {}):
                self._states[key] = replace(state, clashes=found.get(key, {}))
                self.switch_changed.emit(key)


def _what_it_took(option: OptionEntry, applied: OptionsApplied) -> str:
    """ "Took 0.8 s; 2 running chats are recomputed." Nothing for what is instant: the pill says it all."""
    if option.kind is Kind.FREE:
        return ""
    number, unit = seconds(applied.seconds)
    took = f"Took {number} {unit}"
    if not applied.preempted:
        return f"{took}."
    chats = plural(applied.preempted, "running chat")
    return f"{took}; {chats} {'is' if applied.preempted == 1 else 'are'} recomputed."
