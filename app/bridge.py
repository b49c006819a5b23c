"""EngineBridge: the one object that owns the engine service, and the only way between it and the widgets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from PySide6.QtCore import QElapsedTimer, QObject, Qt, QTimer, Signal, SignalInstance

from engine.commands import (
    Abort,
    CancelLoad,
    Command,
    FindBest,
    JudgeDraft,
    LoadModel,
    MeasureContext,
    Message,
    Overflow,
    Prompt,
    SetDraft,
    SetOptions,
    Submit,
    WatchPages,
)
from engine.events import (
    BestFound,
    BestRefused,
    ContextMeasured,
    DraftChanged,
    DraftJudged,
    DraftRefused,
    EngineError,
    Event,
    Finished,
    FinishReason,
    ModelLoaded,
    ModelLoadFailed,
    ModelLoading,
    OptionsApplied,
    OptionsRefused,
    PageMap,
    RequestUsage,
    StepRecord,
    TokenDelta,
)
from engine.params import SamplingParams

DRAIN_MILLISECONDS = 33  # no faster than a 30 Hz screen refresh needs
WATCH_MILLISECONDS = 500  # while work is outstanding but nothing comes: is the thread still there?
QUIET_DRAINS = 3  # empty drains in a row before the timer slows down or stops

STOPPED = "The engine stopped unexpectedly. Your chats are saved. Load the model again to go on."


class Service(Protocol):
    """What the bridge needs of ``engine.service.EngineService`` (and of its test double)."""

    @property
    def is_alive(self) -> bool: ...

    def start(self) -> None: ...

    def post(self, command: Command) -> None: ...

    def take_events(self) -> list[Event]: ...

    def shutdown(self, timeout_seconds: float = 5.0) -> bool: ...


MakeService = Callable[[Callable[[], None]], Service]


class EngineBridge(QObject):
    """Commands go in as method calls, facts come out as signals, all on the GUI thread.

    The service is made at the first command. One timer drains its events, at most every 33 ms, and runs only while
    events flow; ``wake`` (engine thread) starts it through a queued signal. Within one drain each kind comes in one
    signal, deltas before the Finished that ends them; only a change of model splits a drain, so that nothing the old
    model did is taken for the new one's.
    """

    tokens_arrived = Signal(object)  # list[TokenDelta]
    generation_finished = Signal(object)  # Finished
    steps_recorded = Signal(object)  # list[StepRecord]
    pages_mapped = Signal(object)  # PageMap, the latest of a drain
    model_loading = Signal(object)  # ModelLoading, the latest of a drain
    model_loaded = Signal(object)  # ModelLoaded
    model_load_failed = Signal(object)  # ModelLoadFailed
    options_applied = Signal(object)  # OptionsApplied
    options_refused = Signal(object)  # OptionsRefused
    draft_changed = Signal(object)  # DraftChanged
    draft_refused = Signal(object)  # DraftRefused
    draft_judged = Signal(object)  # DraftJudged
    best_found = Signal(object)  # BestFound
    best_refused = Signal(object)  # BestRefused
    context_measured = Signal(object)  # ContextMeasured
    engine_failed = Signal(object)  # EngineError
    generation_requested = Signal(int, float)  # request_id, time.perf_counter() at the submit

    _woken = Signal()

    def __init__(self, make_service: MakeService, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._make_service = make_service
        self._service: Service | None = None
        self._is_shut_down = False
        self._request_ids = itertools.count(1)
        self._query_ids = itertools.count(1)
        self._running: set[int] = set()
        self._loading: str | None = None  # the source being loaded
        self._quiet_drains = 0
        self._since_drain = QElapsedTimer()
        self._timer = QTimer(self)
        self._timer.setObjectName("bridge.drain")
        self._timer.setInterval(DRAIN_MILLISECONDS)
        self._timer.timeout.connect(self._drain)
        self._woken.connect(self._on_woken, Qt.ConnectionType.QueuedConnection)

    # ---- commands

    def load_model(self, source: str, settings: Mapping[str, str] | None = None, draft: str = "") -> None:
        self._loading = source
        self._post(LoadModel(source, dict(settings or {}), draft))

    def cancel_load(self) -> None:
        """End the load that runs; the model before it stays. It answers with model_load_failed, or draft_refused."""
        self._post(CancelLoad())

    def submit(self, prompt: Prompt, params: SamplingParams, overflow: Overflow = "stop") -> int:
        """Start a reply; returns its request_id. After shutdown the id is returned but nothing runs."""
        request_id = next(self._request_ids)
        if not self._is_shut_down:
            self._running.add(request_id)
            self.generation_requested.emit(request_id, time.perf_counter())
        self._post(Submit(request_id, prompt, params, overflow))
        return request_id

    def abort(self, request_id: int) -> None:
        self._post(Abort(request_id))

    def set_options(self, changes: Mapping[str, str]) -> None:
        self._post(SetOptions(dict(changes)))

    def set_draft(self, source: str) -> None:
        """Load the model that guesses for the one loaded; "" lets it go. Answered by draft_changed or draft_refused."""
        self._post(SetDraft(source))

    def judge_draft(self, source: str) -> None:
        """Ask whether ``source`` could guess for the model loaded. Answered by draft_judged; not at all without a model."""
        self._post(JudgeDraft(source))

    def find_best(self) -> None:
        """Search for the fastest setting here and apply it. Answered by best_found or best_refused."""
        self._post(FindBest())

    def measure_context(self, messages: tuple[Message, ...]) -> int:
        """Ask for the tokens of the rendered conversation; the answer comes as context_measured with this id."""
        query_id = next(self._query_ids)
        self._post(MeasureContext(query_id, messages))
        return query_id

    def watch_pages(self, per_second: float) -> None:
        self._post(WatchPages(per_second))

    def shutdown(self) -> bool:
        """Stop the engine thread. True when it is gone (or never was); later commands are ignored."""
        self._is_shut_down = True
        self._timer.stop()
        self._running.clear()
        service, self._service = self._service, None
        return service.shutdown() if service is not None else True

    @property
    def is_busy(self) -> bool:
        """A reply is being generated or a model loaded."""
        return bool(self._running) or self._loading is not None

    @property
    def is_draining(self) -> bool:
        """The timer runs: events are flowing or work is outstanding."""
        return self._timer.isActive()

    # ---- events

    def _post(self, command: Command) -> None:
        if self._is_shut_down:
            return
        if self._service is not None and not self._service.is_alive:
            self._drain()  # the dead one's last words, and its failure, come first
        if self._service is None:
            self._service = self._make_service(self._wake)
            self._service.start()
        self._service.post(command)
        if not self._timer.isActive():
            self._timer.start(WATCH_MILLISECONDS if self.is_busy else DRAIN_MILLISECONDS)
            self._quiet_drains = 0

    def _wake(self) -> None:
        """Called on the engine thread."""
        if not self._is_shut_down:
            self._woken.emit()

    def _on_woken(self) -> None:
        if self._is_shut_down:
            return
        self._quiet_drains = 0
        if not self._timer.isActive() or self._timer.interval() != DRAIN_MILLISECONDS:
            self._timer.start(DRAIN_MILLISECONDS)
        if not self._since_drain.isValid() or self._since_drain.elapsed() >= DRAIN_MILLISECONDS:
            self._drain()  # at once after a pause; the timer's pace afterwards

    def _drain(self) -> None:
        service = self._service
        if service is None:
            self._timer.stop()
            return
        self._since_drain.start()
        was_alive = service.is_alive  # before taking: a thread that ends later has more to say at the next drain
        events = service.take_events()
        self._deliver(events)
        if self._service is not service or self._is_shut_down:
            return  # a slot shut us down or replaced it
        if not was_alive:
            self._on_service_died(service)
            return
        self._pace(bool(events))

    def _pace(self, had_events: bool) -> None:
        """Keep the timer at full pace while events flow, slow while work is outstanding, off when idle."""
        self._quiet_drains = 0 if had_events else self._quiet_drains + 1
        if self._quiet_drains < QUIET_DRAINS:
            return
        if not self.is_busy:
            self._timer.stop()
        elif self._timer.interval() != WATCH_MILLISECONDS:
            self._timer.start(WATCH_MILLISECONDS)

    def _deliver(self, events: Iterable[Event]) -> None:
        batch = _Batch()
        for event in events:
            batch.add(event)
            if isinstance(event, ModelLoaded | ModelLoadFailed):
                self._send(batch)
                batch = _Batch()
        self._send(batch)

    def _send(self, batch: _Batch) -> None:
        if batch.deltas:
            self.tokens_arrived.emit(batch.deltas)
        if batch.records:
            self.steps_recorded.emit(batch.records)
        if batch.loading is not None:  # before the news that the load has ended
            self.model_loading.emit(batch.loading)
        for event in batch.others:
            self._note(event)
            self._signal_of(event).emit(event)
        if batch.pages is not None:
            self.pages_mapped.emit(batch.pages)

    def _note(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._running.discard(event.request_id)
        elif isinstance(event, ModelLoaded | ModelLoadFailed):
            self._loading = None

    def _signal_of(self, event: Event) -> SignalInstance:
        return {
            Finished: self.generation_finished,
            ModelLoaded: self.model_loaded,
            ModelLoadFailed: self.model_load_failed,
            OptionsApplied: self.options_applied,
            OptionsRefused: self.options_refused,
            DraftChanged: self.draft_changed,
            DraftRefused: self.draft_refused,
            DraftJudged: self.draft_judged,
            BestFound: self.best_found,
            BestRefused: self.best_refused,
            ContextMeasured: self.context_measured,
            EngineError: self.engine_failed,
        }[type(event)]

    def _on_service_died(self, service: Service) -> None:
        """The thread ended by itself: end what hangs on it, say so, and let the next command make a new service."""
        self._timer.stop()
        self._service = None
        service.shutdown(0.0)
        failed: list[Event] = [
            Finished(request_id, FinishReason.ERROR, RequestUsage(prompt_tokens=0), STOPPED)
            for request_id in sorted(self._running)
        ]
        if self._loading is not None:
            failed.append(ModelLoadFailed(self._loading, STOPPED))
        failed.append(EngineError(STOPPED))
        self._deliver(failed)


class _Batch:
    """Events of one drain, sorted by how they are delivered."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.records: list[StepRecord] = []
        self.others: list[Event] = []
        self.pages: PageMap | None = None
        self.loading: ModelLoading | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, TokenDelta):
            self.deltas.append(event)
        elif isinstance(event, StepRecord):
            self.records.append(event)
        elif isinstance(event, PageMap):
            self.pages = event
        elif isinstance(event, ModelLoading):
            self.loading = event
        else:
            self.others.append(event)
