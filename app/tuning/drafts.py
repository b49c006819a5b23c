"""Drafts: which model guesses for the one loaded, which others could, and why the rest cannot. A view-model.

A verdict holds for one model only: it is asked for anew whenever the list is opened, and forgotten with its model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from PySide6.QtCore import QObject, Signal

from app.bridge import EngineBridge
from app.model_chooser import ListedModel
from app.tuning.numbers import data
from engine.events import (
    DraftChanged,
    DraftInfo,
    DraftJudged,
    DraftRefused,
    EngineError,
    ModelInfo,
    ModelLoaded,
    ModelLoadFailed,
    ModelLoading,
)

NONE = ""  # the source that lets the draft model go
CHECKING = "Checking ..."
NO_DRAFT = "none; a smaller model with the same vocabulary can guess"


class KeepsSettings(Protocol):
    """What is asked of the settings store: to remember the draft model of each model."""

    @property
    def settings(self) -> Any: ...

    def update(self, **changes: Any) -> object: ...


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A line of the list. words: why it cannot guess, why it will not pay, or what it is."""

    source: str
    title: str
    words: str
    is_usable: bool
    is_current: bool


class Drafts(QObject):
    """Asks the engine, remembers the answers and, per model, the choice.

    Signals:
        changed: another draft model, a load of one began or went on, or a verdict came.

    Attributes:
        draft: the model that guesses now, if any.
        status: how a load goes or why it failed; ``is_refusal`` says which.
    """

    changed = Signal()

    def __init__(
        self,
        bridge: EngineBridge,
        settings: KeepsSettings | None = None,
        list_models: Callable[[], Sequence[ListedModel]] = tuple,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._bridge, self._settings, self._list_models = bridge, settings, list_models
        self.draft: DraftInfo | None = None
        self.status, self.is_refusal = "", False
        self._target: ModelInfo | None = None
        self._asked: str | None = None  # the source that is being loaded
        self._verdicts: dict[str, DraftJudged] = {}
        self._listed: list[ListedModel] = []
        bridge.model_loading.connect(self._on_loading)
        bridge.model_loaded.connect(self._on_loaded)
        bridge.model_load_failed.connect(self._on_load_failed)
        bridge.draft_changed.connect(self._on_changed)
        bridge.draft_refused.connect(self._on_refused)
        bridge.draft_judged.connect(self._on_judged)
        bridge.engine_failed.connect(self._on_engine_failed)

    @property
    def has_model(self) -> bool:
        return self._target is not None

    @property
    def is_loading(self) -> bool:
        return self._asked is not None

    @property
    def words(self) -> str:
        """The draft model in one line."""
        if self.draft is None:
            return NO_DRAFT
        held = f"{data(self.draft.weight_bytes)} more are read for each guess"
        return f"{held}. {self.draft.note}" if self.draft.note else held

    def open(self) -> None:
        """List the models anew and have each judged against the one loaded now."""
        self._listed, self._verdicts = list(self._list_models()), {}
        for choice in self.choices():
            if choice.words == CHECKING:
                self._bridge.judge_draft(choice.source)
        self.changed.emit()

    def choices(self) -> list[DraftChoice]:
        """Every model that was listed, and the one loaded where it is not among them."""
        if self._target is None:
            return []
        found = [self._choice(model.name, model.title, model) for model in self._listed]
        if self._target.source not in {choice.source for choice in found}:
            found.append(self._choice(self._target.source, self._target.name, None))
        return found

    def choose(self, source: str) -> None:
        """Load ``source`` to guess, or let the present one go with NONE. It guesses as soon as it is loaded."""
        current = self.draft.source if self.draft else NONE
        if self._target is None or source == (current if self._asked is None else self._asked):
            return
        self._asked = source
        self._say("Opening the model" if source else "")
        self._bridge.set_draft(source)

    def cancel(self) -> None:
        if self._asked is not None:
            self._bridge.cancel_load()

    def _choice(self, source: str, title: str, model: ListedModel | None) -> DraftChoice:
        is_current = self.draft is not None and self.draft.source == source
        if model is not None and model.problem:
            return DraftChoice(source, title, model.problem, False, is_current)
        verdict = self._verdicts.get(source)
        if verdict is None:
            return DraftChoice(source, title, CHECKING, False, is_current)
        facts = f"{model.format}, {data(model.num_bytes)}" if model is not None else "the model loaded now"
        return DraftChoice(source, title, verdict.reason or verdict.note or facts, not verdict.reason, is_current)

    # ---- what the engine says

    def _on_loading(self, loading: ModelLoading) -> None:
        if self._asked:
            self._say(f"{loading.stage}, {loading.fraction * 100:.0f} %")

    def _on_loaded(self, loaded: ModelLoaded) -> None:
        self._target, self.draft = loaded.info, loaded.draft
        self._asked, self._verdicts, self._listed = None, {}, []
        self._say("")

    def _on_load_failed(self, failed: ModelLoadFailed) -> None:
        if not failed.kept:
            self._target = self.draft = self._asked = None
            self._verdicts, self._listed = {}, []
            self._say("")

    def _on_changed(self, changed: DraftChanged) -> None:
        self.draft, asked, self._asked = changed.draft, self._asked, None
        if asked is not None:
            self._remember(asked)
        self._say("")
        if asked and changed.draft is not None and changed.options.get("speculation") != "draft":
            self._bridge.set_options({"speculation": "draft"})  # it was chosen in order to guess

    def _on_refused(self, refused: DraftRefused) -> None:
        self._asked = None
        self._say(refused.message, is_refusal=True)

    def _on_judged(self, judged: DraftJudged) -> None:
        if self._target is not None and judged.target == self._target.source:
            self._verdicts[judged.source] = judged
            self.changed.emit()

    def _on_engine_failed(self, error: EngineError) -> None:
        if self._asked is not None:
            self._asked = None
            self._say(error.message, is_refusal=True)

    def _say(self, status: str, is_refusal: bool = False) -> None:
        self.status, self.is_refusal = status, is_refusal
        self.changed.emit()

    def _remember(self, source: str) -> None:
        if self._settings is None or self._target is None:
            return
        kept: Mapping[str, str] = getattr(self._settings.settings, "drafts", {})
        others = {target: draft for target, draft in kept.items() if target != self._target.source}
        self._settings.update(drafts={**others, self._target.source: source} if source else others)
