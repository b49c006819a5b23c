"""EngineService: the thread that owns the engine. Commands in, events out; nothing else touches the engine.

Any thread may ``post`` a command and ``take_events``; neither blocks. torch is imported on the service's own
thread, with the first model, so that a window is up before it.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands import (
    Abort,
    CancelLoad,
    Command,
    FindBest,
    JudgeDraft,
    LoadModel,
    MeasureContext,
    SetDraft,
    SetOptions,
    Submit,
    WatchPages,
)
from engine.events import (
    BestFound,
    BestRefused,
    ContextMeasured,
    DraftRefused,
    EngineError,
    Event,
    Finished,
    FinishReason,
    ModelLoadFailed,
    ModelLoading,
    OptionsApplied,
    OptionsRefused,
    RequestUsage,
)
from engine.weights.locate import locate

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger(__name__)

NO_MODEL = "No model is loaded. Choose one first."
MODEL_CHANGED = "Another model was loaded while this reply was running. Regenerate it with the new one."
BUSY = "A reply is being written. The search needs the machine to itself: try again when it has ended."
SEARCH_STOPPED = "The search was stopped; the switches are as before."


class EngineService:
    """Runs an Engine on its own thread.

    wake: called on that thread when the event queue stops being empty, so that a front end can come and take.
    find: from a model's name to its path (the app knows more names than the engine does).
    """

    def __init__(
        self,
        wake: Callable[[], None] | None = None,
        find: Callable[[str], Path] = locate,
        machine_file: Path | None = None,
    ) -> None:
        self._wake = wake
        self._find = find
        self._machine_file = machine_file
        self._commands: deque[Command] = deque()
        self._events: deque[Event] = deque()
        self._something_to_do = threading.Condition()
        self._stopping = False
        self._engine: Engine | None = None
        self._pages_every_seconds = 0.0
        self._pages_sent_at = 0.0
        self._thread = threading.Thread(target=self._run, name="ridgeline-engine", daemon=True)

    # -- for any thread -----------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, command: Command) -> None:
        with self._something_to_do:
            self._commands.append(command)
            self._something_to_do.notify()

    def take_events(self) -> list[Event]:
        taken: list[Event] = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def shutdown(self, timeout_seconds: float = 5.0) -> bool:
        """Ask the thread to stop, also in the middle of loading. True when it ended in time."""
        with self._something_to_do:
            self._stopping = True
            self._something_to_do.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # -- the engine thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                command = self._next_command()
                if command is not None:
                    self._handle(command)
                elif self._engine is not None and self._engine.has_work:
                    self._step(self._engine)
        except BaseException as error:
            log.critical("the engine thread ended", exc_info=True)
            self._emit(EngineError(f"The engine stopped: {error}. Load the model again.", traceback.format_exc()))
            raise
        finally:
            if self._engine is not None:
                self._engine.close()
            self._engine = None

    def _next_command(self) -> Command | None:
        """The oldest command; None when there is a step to run instead; waits when there is neither."""
        with self._something_to_do:
            while not self._commands and not self._stopping:
                if self._engine is not None and self._engine.has_work:
                    return None
                self._something_to_do.wait()
            return self._commands.popleft() if self._commands else None

    def _step(self, engine: Engine) -> None:
        for event in engine.step():
            self._emit(event)
        now = time.perf_counter()
        is_due = (
            now - self._pages_sent_at >= self._pages_every_seconds or not engine.has_work
        )  # the last map must be true
        if self._pages_every_seconds and is_due:
            self._send_pages(engine)

    def _handle(self, command: Command) -> None:
        try:
            match command:
                case LoadModel():
                    self._load(command)
                case CancelLoad():
                    log.debug("nothing to cancel: the load has ended")
                case Submit():
                    self._submit(command)
                case Abort():
                    if self._engine is not None:
                        self._engine.abort(command.request_id)
                case SetOptions():
                    self._set_options(command)
                case SetDraft():
                    self._set_draft(command)
                case JudgeDraft():
                    if self._engine is not None:
                        self._emit(self._engine.judge_draft(command.source, self._find))
                case FindBest():
                    self._find_best()
                case MeasureContext():
                    if self._engine is not None:
                        self._emit(ContextMeasured(command.query_id, self._engine.count_tokens(command.messages)))
                case WatchPages():
                    self._pages_every_seconds = 1 / command.per_second if command.per_second > 0 else 0.0
                    if self._engine is not None and self._pages_every_seconds:
                        self._send_pages(self._engine)
        except ValueError as error:  # a template that cannot render the draft, say; the model and its chats go on
            self._emit(EngineError(str(error)))
        except Exception as error:
            log.exception("%s failed", type(command).__name__)
            self._emit(EngineError(f"{type(command).__name__} failed: {error}", traceback.format_exc()))

    def _load(self, command: LoadModel) -> None:
        from engine.engine import Engine
        from engine.model.load import LoadCancelled

        refused: list[str] = []
        try:
            engine = Engine.load(
                command.source,
                command.settings,
                self._loading,
                self._is_overtaken,
                machine_file=self._machine_file,
                find=self._find,
                draft=command.draft or None,
                on_draft_refused=refused.append,
            )
        except LoadCancelled:
            self._emit(ModelLoadFailed(command.source, "Loading was stopped.", kept=self._engine is not None))
            return
        except Exception as error:
            log.info("loading %s failed", command.source, exc_info=True)
            message = str(error) or f"Loading failed: {type(error).__name__}."
            self._emit(ModelLoadFailed(command.source, message, kept=self._engine is not None))
            return
        if self._engine is not None:
            for event in self._engine.fail_all(MODEL_CHANGED):
                self._emit(event)
            self._engine.close()
        self._engine = engine
        self._emit(engine.loaded_event())
        for message in refused:
            self._emit(DraftRefused(command.draft, message))

    def _submit(self, command: Submit) -> None:
        if self._engine is None:
            self._emit(_failed(command, NO_MODEL))
            return
        try:
            self._engine.submit(command.prompt, command.params, command.request_id, command.overflow)
        except ValueError as error:
            self._emit(_failed(command, str(error)))

    def _set_options(self, command: SetOptions) -> None:
        from engine.model.load import LoadCancelled

        if self._engine is None:
            self._emit(OptionsRefused(command.changes, NO_MODEL))
            return
        try:
            self._emit(self._engine.apply(command.changes, self._loading, self._is_overtaken))
        except LoadCancelled:
            self._emit(OptionsRefused(command.changes, "Reading the weights was stopped; the old ones stay."))
        except (ValueError, MemoryError, RuntimeError) as error:
            log.info("changing %s failed", dict(command.changes), exc_info=True)
            self._emit(OptionsRefused(command.changes, str(error) or "Not enough memory; the old weights stay."))

    def _set_draft(self, command: SetDraft) -> None:
        from engine.model.load import LoadCancelled

        if self._engine is None:
            self._emit(DraftRefused(command.source, NO_MODEL))
            return
        try:
            self._emit(self._engine.set_draft(command.source, self._loading, self._is_draft_overtaken, find=self._find))
        except LoadCancelled:
            self._emit(DraftRefused(command.source, "Loading the draft model was stopped."))
        except (ValueError, MemoryError, RuntimeError) as error:
            log.info("the draft model %s failed", command.source, exc_info=True)
            self._emit(DraftRefused(command.source, str(error) or "Not enough memory for a draft model."))

    def _find_best(self) -> None:
        from engine.best_here import SearchStopped, search

        engine = self._engine
        if engine is None or engine.has_work:
            self._emit(BestRefused(NO_MODEL if engine is None else BUSY))
            return
        before, started = engine.options, time.perf_counter()
        try:
            found = search(engine, self._loading, stopped=self._is_disturbed)
        except Exception as error:  # whatever a try raises, the chats go on with the switches as they were
            engine.apply(dict(before))
            was_stopped = isinstance(error, SearchStopped)
            if not was_stopped:
                log.exception("the search for the best setting failed")
            self._emit(BestRefused(SEARCH_STOPPED if was_stopped else f"The search failed: {error}"))
            return
        seconds = time.perf_counter() - started
        self._emit(OptionsApplied(dict(engine.options), before.changed(engine.options), seconds, 0, engine.info))
        self._emit(BestFound(found))

    def _is_disturbed(self) -> bool:
        """Somebody wants the engine while it searches."""
        wants = (LoadModel, CancelLoad, Submit, SetOptions, SetDraft)
        return self._stopping or any(isinstance(command, wants) for command in list(self._commands))

    # -- while a model loads ------------------------------------------------------------------

    def _loading(self, stage: str, fraction: float) -> None:
        self._emit(ModelLoading(stage, fraction))
        self._abort_unstarted()

    def _is_overtaken(self) -> bool:
        """Loading goes on unless it is cancelled, the window closes or another model was asked for meanwhile."""
        return self._stopping or any(isinstance(command, LoadModel | CancelLoad) for command in list(self._commands))

    def _is_draft_overtaken(self) -> bool:
        return self._is_overtaken() or any(isinstance(command, SetDraft) for command in list(self._commands))

    def _abort_unstarted(self) -> None:
        """Stop takes effect at once also for requests that wait behind the load."""
        with self._something_to_do:
            aborted = {command.request_id for command in self._commands if isinstance(command, Abort)}
            submitted = [c for c in self._commands if isinstance(c, Submit) and c.request_id in aborted]
            gone = {command.request_id for command in submitted}
            self._commands = deque(
                c for c in self._commands if not (isinstance(c, Submit | Abort) and c.request_id in gone)
            )
        for command in submitted:
            self._emit(Finished(command.request_id, FinishReason.ABORT, RequestUsage(0)))

    # -- events -------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        was_empty = not self._events
        self._events.append(event)
        if was_empty and self._wake:
            self._wake()

    def _send_pages(self, engine: Engine) -> None:
        self._pages_sent_at = time.perf_counter()
        self._emit(engine.page_map())


def _failed(command: Submit, message: str) -> Finished:
    return Finished(command.request_id, FinishReason.ERROR, RequestUsage(0), message)
