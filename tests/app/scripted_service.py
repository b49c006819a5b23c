"""ScriptedService: EngineService's interface without an engine. A test double; lives in tests only.

Two modes. Stepwise (default): nothing happens until the test calls ``advance()`` (drain commands, run one step) or
``run()`` (until idle). Threaded: its own thread does the same with real pauses, as the engine would.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.commands import (
    Abort,
    CancelLoad,
    Command,
    FindBest,
    JudgeDraft,
    LoadModel,
    MeasureContext,
    Message,
    Prompt,
    SetDraft,
    SetOptions,
    Submit,
    WatchPages,
)
from engine.context import fit
from engine.events import (
    BestFound,
    BestRefused,
    ContextMeasured,
    DraftChanged,
    DraftInfo,
    DraftJudged,
    DraftRefused,
    EngineError,
    Event,
    Finished,
    FinishReason,
    MachineFigures,
    MemoryUse,
    ModelInfo,
    ModelLoaded,
    ModelLoadFailed,
    ModelLoading,
    OptionsApplied,
    OptionsRefused,
    PageMap,
    Phase,
    PoolSnapshot,
    RequestProgress,
    RequestUsage,
    StepCost,
    StepRecord,
    TokenDelta,
)
from engine.options import Capabilities, Options, check, unavailable
from engine.presets import Found

BANDWIDTH = 14.5e9
THROUGHPUT = 150e9
WEIGHT_BYTES = {
    "none": 537_000_000,
    "int8": 135_000_000,
    "int4": 98_000_000,
    "int4_g64": 91_000_000,
    "int4_g128": 88_000_000,
    "nf4": 90_000_000,
    "llm_int8": 135_000_000,
    "as_stored": 98_000_000,
}
NUM_WEIGHTS = 134_000_000
KV_BYTES_PER_TOKEN = 23_040
PAGE_SIZE = 16

MACHINE = MachineFigures(
    device="cpu",
    name="Scripted CPU, 2 threads",
    threads=2,
    read_bytes_per_second=BANDWIDTH,
    flops_per_second={"fp32": THROUGHPUT, "bf16": 35e9, "int8": 200e9},
    launch_seconds=5e-6,
    measured_at="2026-11-30",
)
INFO = ModelInfo(
    name="SmolLM2 135M Instruct",
    source="starter",
    family="llama",
    num_parameters=NUM_WEIGHTS,
    weight_bytes=WEIGHT_BYTES["int4"],
    kv_bytes_per_token=KV_BYTES_PER_TOKEN,
    context_length=8192,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    vocab_size=49152,
    stored_format="GGUF Q4_1",
    device="cpu",
    dtype="bf16",
    is_fallback=False,
    load_seconds=0.8,
    has_chat_template=True,
    active_paths={"linear": "int4: scripted", "attention": "scripted"},
    machine=MACHINE,
    memory=MemoryUse(WEIGHT_BYTES["int4"], kv_bytes=189_000_000, scratch_bytes=24_000_000),
)
REPLY = "Ice floats because water expands when it freezes: the same mass fills more volume and the density falls."


_ITSELF = "This is the model itself."


@dataclass
class Script:
    """What the service will do. Change it between steps to change its mind.

    replies: used in turn, the last one again and again; or a function of the prompt.
    reply_tokens: when set, each reply is repeated until it has that many tokens (a token is a word with its space).
    fail_load, fail_reply: a message makes the next load, or each reply after its second token, fail.
    refuse: option key -> message.
    unavailable: option key -> choice -> reason; by default what no CPU can do.
    best: what the search for the best setting finds.
    misfits: source -> why it cannot be a draft model.
    window: tokens that fit, the reply included; None lets everything fit.
    step_seconds: None lets the figures decide (memory time plus overhead); threaded mode really pauses that long.
    """

    replies: Sequence[str] | Callable[[Prompt], str] = (REPLY,)
    reply_tokens: int | None = None
    load_stages: tuple[tuple[str, float], ...] = (
        ("Reading weights", 0.0),
        ("Reading weights", 0.6),
        ("Measuring", 1.0),
    )
    load_pause_seconds: float = 0.0
    info: ModelInfo = INFO
    fail_load: str | None = None
    fail_reply: str | None = None
    refuse: Mapping[str, str] = field(default_factory=dict)
    unavailable: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: unavailable(Capabilities()))
    best: Mapping[str, str] = field(default_factory=lambda: {"weights": "int8"})
    misfits: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float | None = None
    overhead_seconds: float = 0.0015
    total_pages: int = 512
    window: int | None = None


@dataclass
class _Request:
    request_id: int
    prompt_tokens: int
    pieces: list[str]
    max_tokens: int | None
    submitted_at: float
    num_dropped: int = 0
    sent: int = 0
    first_at: float | None = None
    last_at: float = 0.0
    pages: list[int] = field(default_factory=list)

    @property
    def limit(self) -> int:
        return len(self.pieces) if self.max_tokens is None else min(self.max_tokens, len(self.pieces))

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.sent


def _draft_info(source: str, target: ModelInfo) -> DraftInfo:
    """A draft model a tenth of the size of ``target``, or ``target`` itself."""
    is_itself = source == target.source
    size = 1 if is_itself else 10
    note = _ITSELF if is_itself else ""
    name = target.name if is_itself else source
    return DraftInfo(source, name, target.num_parameters // size, target.weight_bytes // size, note)


def pieces_of(text: str) -> list[str]:
    """Cut text into pieces that join to exactly it: each is a word with the space before it."""
    words = text.split(" ")
    return [word if i == 0 else " " + word for i, word in enumerate(words)]


def count_tokens(prompt: Prompt) -> int:
    """Scripted token count: words, plus four for each message's frame."""
    if isinstance(prompt, str):
        return len(prompt.split())
    return sum(4 + len(item.content.split()) if isinstance(item, Message) else 1 for item in prompt)


class ScriptedService:
    """See the module. ``posted`` keeps every command in order; ``clock`` is the scripted time (perf_counter-like)."""

    def __init__(
        self, wake: Callable[[], None] | None = None, script: Script | None = None, threaded: bool = False
    ) -> None:
        self.script = script or Script()
        self.posted: list[Command] = []
        self.clock = time.perf_counter()
        self.index = 0
        self.options = Options()
        self.info: ModelInfo | None = None
        self.draft: DraftInfo | None = None
        self._wake = wake or (lambda: None)
        self._threaded = threaded
        self._thread: threading.Thread | None = None
        self._lock = threading.Condition()
        self._commands: deque[Command] = deque()
        self._events: list[Event] = []
        self._active: list[_Request] = []
        self._waiting: list[_Request] = []
        self._num_replies = 0
        self._pages_per_second = 0.0
        self._mapped_at = -math.inf
        self._free_pages = list(range(self.script.total_pages, 0, -1))
        self._cached: deque[int] = deque()
        self._started = False
        self._stopping = False
        self._died = False

    # ---- EngineService's interface

    def start(self) -> None:
        self._started = True
        if self._threaded:
            self._thread = threading.Thread(target=self._loop, name="scripted-engine")
            self._thread.start()

    @property
    def is_alive(self) -> bool:
        if self._thread is not None:
            return self._thread.is_alive()
        return self._started and not self._died and not self._stopping

    def post(self, command: Command) -> None:
        with self._lock:
            self.posted.append(command)
            self._commands.append(command)
            self._lock.notify_all()

    def take_events(self) -> list[Event]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def shutdown(self, timeout_seconds: float = 5.0) -> bool:
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # ---- driving it from a test

    def advance(self, steps: int = 1) -> None:
        """Take in the commands posted so far, then run ``steps`` steps, taking in commands between them."""
        assert not self._threaded, "a threaded service runs by itself"
        for _ in range(steps):
            self._take_commands()
            self._step()
        self._take_commands()

    def run(self, max_steps: int = 10_000) -> None:
        """Advance until nothing is left to do."""
        for _ in range(max_steps):
            self.advance()
            if not self.has_work:
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def emit(self, *events: Event) -> None:
        """Let ``events`` out as they are."""
        with self._lock:
            was_empty = not self._events
            self._events.extend(events)
        if was_empty:
            self._wake()

    def die(self) -> None:
        """The engine thread ends without a word."""
        self._died = True
        with self._lock:
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(5)

    def fail(self, message: str) -> None:
        self.emit(EngineError(message))

    @property
    def has_work(self) -> bool:
        return bool(self._commands or self._active or self._waiting)

    # ---- the pretended engine

    def _loop(self) -> None:
        while not self._stopping and not self._died:
            self._take_commands()
            if not (self._active or self._waiting):
                with self._lock:
                    if not self._commands and not self._stopping and not self._died:
                        self._lock.wait(0.5)
                continue
            started = time.perf_counter()
            seconds = self._step()
            with self._lock:
                if not self._stopping:
                    self._lock.wait(max(0.0, seconds - (time.perf_counter() - started)))

    def _take_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, LoadModel):
                self._load(command)
            elif isinstance(command, Submit):
                self._submit(command)
            elif isinstance(command, Abort):
                self._abort(command.request_id)
            elif isinstance(command, SetOptions):
                self._set_options(command.changes)
            elif isinstance(command, SetDraft):
                self._set_draft(command.source)
            elif isinstance(command, JudgeDraft):
                self._judge_draft(command.source)
            elif isinstance(command, FindBest):
                self._find_best()
            elif isinstance(command, MeasureContext):
                self.emit(ContextMeasured(command.query_id, count_tokens(command.messages)))
            elif isinstance(command, WatchPages):
                self._pages_per_second = command.per_second
                self._emit_pages()

    def _load(self, command: LoadModel) -> None:
        for stage, fraction in self.script.load_stages:
            self.emit(ModelLoading(stage, fraction))
            if self._threaded and self.script.load_pause_seconds:
                with self._lock:
                    self._lock.wait(self.script.load_pause_seconds)
            if any(isinstance(waiting, CancelLoad) for waiting in list(self._commands)):
                self.emit(ModelLoadFailed(command.source, "Loading was stopped.", kept=self.info is not None))
                return
        for request in [*self._active, *self._waiting]:
            self._finish(request, FinishReason.ABORT)
        if self.script.fail_load:
            self.info = None
            self.emit(ModelLoadFailed(command.source, self.script.fail_load))
            return
        self.options = Options({**command.settings})
        self.info = self._info_now(replace(self.script.info, source=command.source))
        misfit = self.script.misfits.get(command.draft)
        self.draft = _draft_info(command.draft, self.info) if command.draft and not misfit else None
        self.emit(ModelLoaded(self.info, dict(self.options), self._unavailable(), self.draft))
        if misfit:
            self.emit(DraftRefused(command.draft, misfit))
        self._emit_pages()

    def _unavailable(self) -> Mapping[str, Mapping[str, str]]:
        """As scripted; and without a draft model nothing can be drafted, where drafts are scripted at all."""
        if self.draft is not None or not self.script.misfits:
            return self.script.unavailable
        return {**self.script.unavailable, "speculation": {"draft": "No draft model is loaded."}}

    def _set_draft(self, source: str) -> None:
        message = self.script.misfits.get(source) if self.info else "No model is loaded. Choose one first."
        if not message and source:
            self.emit(ModelLoading("Draft model: reading weights", 0.5))
            if any(isinstance(waiting, CancelLoad) for waiting in list(self._commands)):
                message = "Loading the draft model was stopped."
        if message or self.info is None:
            self.emit(DraftRefused(source, message or ""))
            return
        self.draft = _draft_info(source, self.info) if source else None
        if not source and self.options["speculation"] == "draft":
            self.options = self.options.replaced({"speculation": "off"})
        use = replace(self.info.memory, draft_bytes=self.draft.weight_bytes if self.draft else 0)
        self.info = replace(self.info, memory=use)
        self.emit(DraftChanged(self.draft, dict(self.options), self._unavailable(), self.info))

    def _find_best(self) -> None:
        """It finds what the script says, after one try, unless a command behind it stops it or a reply runs."""
        if self.info is None or self._active or self._waiting:
            self.emit(BestRefused("A reply is being written."))
            return
        self.emit(ModelLoading("Trying weights=int8", 0.5))
        if self._commands:
            self.emit(BestRefused("The search was stopped; the switches are as before."))
            return
        before, self.options = self.options, self.options.replaced(self.script.best)
        self.info = self._info_now(self.info)
        self.emit(OptionsApplied(dict(self.options), before.changed(self.options), 1.0, 0, self.info))
        date = "2026-11-30T12:00:00+00:00"
        self.emit(BestFound(Found(self.info.machine.name, self.info.name, date, 1.31, dict(self.script.best))))

    def _judge_draft(self, source: str) -> None:
        if self.info is not None:
            note = _ITSELF if source == self.info.source else ""
            self.emit(DraftJudged(source, self.info.source, self.script.misfits.get(source, ""), note))

    def _info_now(self, info: ModelInfo) -> ModelInfo:
        if self.script.window is not None:
            info = replace(info, context_length=self.script.window)
        dtype = "fp32" if self.options["weights"] == "none" else "bf16"
        return replace(info, weight_bytes=WEIGHT_BYTES[self.options["weights"]], dtype=dtype)

    def _submit(self, command: Submit) -> None:
        if self.info is None:
            usage = RequestUsage(prompt_tokens=0)
            self.emit(Finished(command.request_id, FinishReason.ERROR, usage, "No model is loaded. Choose one first."))
            return
        try:
            prompt, num_dropped = self._fitted(command)
        except ValueError as error:
            self.emit(Finished(command.request_id, FinishReason.ERROR, RequestUsage(0), str(error)))
            return
        text = self._next_reply(prompt)
        pieces = pieces_of(text)
        if self.script.reply_tokens is not None:
            again = [" " + pieces[0], *pieces[1:]]
            while len(pieces) < self.script.reply_tokens:
                pieces.extend(again)
            pieces = pieces[: self.script.reply_tokens]
        most = command.params.max_tokens
        if self.script.window is not None:
            most = min(most or len(pieces), self.script.window - count_tokens(prompt))
        self._waiting.append(_Request(command.request_id, count_tokens(prompt), pieces, most, self._now(), num_dropped))

    def _fitted(self, command: Submit) -> tuple[Prompt, int]:
        """What is read of the prompt, and how many messages were left out. ValueError when it is too long."""
        prompt, window = command.prompt, self.script.window
        if window is None:
            return prompt, 0
        if command.overflow == "drop_oldest" and not isinstance(prompt, str):
            return fit([message for message in prompt if isinstance(message, Message)], count_tokens, window)
        if count_tokens(prompt) >= window:
            raise ValueError(f"The prompt has {count_tokens(prompt):,} tokens. Shorten the prompt.")
        return prompt, 0

    def _next_reply(self, prompt: Prompt) -> str:
        replies = self.script.replies
        if callable(replies):
            return replies(prompt)
        reply = replies[min(self._num_replies, len(replies) - 1)]
        self._num_replies += 1
        return reply

    def _abort(self, request_id: int) -> None:
        for request in [*self._active, *self._waiting]:
            if request.request_id == request_id:
                self._finish(request, FinishReason.ABORT)

    def _set_options(self, changes: Mapping[str, str]) -> None:
        for key, value in changes.items():
            reason = self.script.refuse.get(key) or self._unavailable().get(key, {}).get(value)
            if reason:
                self.emit(OptionsRefused(changes, reason))
                return
            try:
                check(key, value, Capabilities())
            except ValueError as error:
                self.emit(OptionsRefused(changes, str(error)))
                return
        if self.info is None:
            self.emit(OptionsRefused(changes, "No model is loaded. Choose one first."))
            return
        before, self.options = self.options, self.options.replaced(changes)
        changed = before.changed(self.options)
        info = None
        if "weights" in changed:
            self.emit(ModelLoading("Reading weights", 0.5))
            self.info = info = self._info_now(self.info)
        preempted = len(self._active) if {"kv_cache", "paging", "weights"} & set(changed) else 0
        self.emit(OptionsApplied(dict(self.options), changed, 0.004, preempted, info))

    def _now(self) -> float:
        if self._threaded:
            self.clock = time.perf_counter()
        return self.clock

    def _step(self) -> float:
        """One step: every waiting request prefills, every active one gains a token. Returns its seconds."""
        if not (self._active or self._waiting):
            return 0.0
        limit = self.options.number("max_batch")
        room = max(0, limit - len(self._active))
        prefilling, self._waiting = self._waiting[:room], self._waiting[room:]
        decoding, self._active = self._active, [*self._active, *prefilling]
        record = self._record(prefilling, decoding)
        self.clock = record.ended_at
        events: list[Event] = []
        for request in self._active:
            if request.sent < request.limit:
                events.append(TokenDelta(request.request_id, request.pieces[request.sent], (request.sent + 1,)))
                request.sent += 1
                request.first_at = request.first_at or self.clock
                request.last_at = self.clock
        self.emit(*events, record)
        self._end_requests()
        if self._pages_per_second and self.clock - self._mapped_at >= 1 / self._pages_per_second:
            self._emit_pages()
        return record.step_seconds

    def _end_requests(self) -> None:
        for request in list(self._active):
            if self.script.fail_reply and request.sent >= 2:
                self._finish(request, FinishReason.ERROR, self.script.fail_reply)
            elif request.sent >= request.limit:
                is_full = self.script.window is not None and request.context >= self.script.window
                cut = FinishReason.CONTEXT if is_full else FinishReason.LENGTH
                self._finish(request, cut if request.limit < len(request.pieces) else FinishReason.STOP)

    def _finish(self, request: _Request, reason: FinishReason, message: str = "") -> None:
        self._active = [other for other in self._active if other is not request]
        self._waiting = [other for other in self._waiting if other is not request]
        self._cached.extend(request.pages)
        first = None if request.first_at is None else request.first_at - request.submitted_at
        usage = RequestUsage(
            prompt_tokens=request.prompt_tokens,
            new_tokens=request.sent,
            first_token_seconds=first,
            decode_seconds=request.last_at - request.first_at if request.first_at is not None else 0.0,
            dropped_messages=request.num_dropped,
        )
        self.emit(Finished(request.request_id, reason, usage, message))

    def _record(self, prefilling: list[_Request], decoding: list[_Request]) -> StepRecord:
        num_prefill = sum(request.prompt_tokens for request in prefilling)
        rows = num_prefill + len(decoding)
        context = sum(request.context for request in self._active)
        weight_bytes = WEIGHT_BYTES[self.options["weights"]]
        cost = StepCost(
            weight_bytes=weight_bytes,
            kv_read_bytes=context * KV_BYTES_PER_TOKEN,
            kv_write_bytes=rows * KV_BYTES_PER_TOKEN,
            activation_bytes=rows * 400_000,
            logit_bytes=len(self._active) * 49152 * 4,
            linear_flops=2 * NUM_WEIGHTS * rows,
            attention_flops=4 * 576 * 30 * context,
        )
        memory, compute = cost.total_bytes / BANDWIDTH, cost.total_flops / THROUGHPUT
        step = self.script.step_seconds or max(memory, compute) + self.script.overhead_seconds
        if not self.options.on("fused_ops"):
            step += 0.004
        for request in self._active:
            self._grow(request)
        self.index += 1
        phase = Phase.DECODE if not prefilling else Phase.MIXED if decoding else Phase.PREFILL
        return StepRecord(
            index=self.index,
            ended_at=(time.perf_counter() if self._threaded else self.clock) + step,
            phase=phase,
            step_seconds=step,
            memory_seconds=memory,
            compute_seconds=compute,
            cost=cost,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=len(decoding),
            num_new_tokens=sum(request.sent < request.limit for request in self._active),
            batch=len(self._active),
            waiting=len(self._waiting),
            pool=self._snapshot(),
            requests=tuple(
                RequestProgress(r.request_id, 1 if r in decoding else r.prompt_tokens, 1, r.context + 1)
                for r in self._active
            ),
            active_paths=self.script.info.active_paths,
        )

    def _grow(self, request: _Request) -> None:
        while len(request.pages) * PAGE_SIZE < request.context + 1:
            page = self._free_pages.pop() if self._free_pages else self._cached.popleft() if self._cached else 0
            request.pages.append(page)

    def _snapshot(self) -> PoolSnapshot:
        used = sum(len(request.pages) for request in self._active)
        cached = len(self._cached)
        total = self.script.total_pages
        shared = min(2, used) if len(self._active) > 1 else 0
        return PoolSnapshot(
            total, used, shared, cached, total - used - cached, 0, PAGE_SIZE, PAGE_SIZE * KV_BYTES_PER_TOKEN
        )

    def _emit_pages(self) -> None:
        if not self._pages_per_second:
            return
        self._mapped_at = self.clock
        owners = [0] * (self.script.total_pages + 1)
        owners[0] = -2
        for page in self._cached:
            owners[page] = -1
        for request in self._active:
            for page in request.pages:
                owners[page] = request.request_id
        self.emit(PageMap(tuple(owners)))
