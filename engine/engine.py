"""The engine: load a model, submit requests, step. One thread at a time may use it (EngineService sees to that)."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from torch import Tensor

from engine.accounting import Accountant, ledger_model
from engine.commands import Message, Overflow, Prompt
from engine.context import encode_within, reply_room
from engine.events import (
    NO_COST,
    Completion,
    DraftChanged,
    DraftInfo,
    DraftJudged,
    Event,
    Finished,
    FinishReason,
    MachineFigures,
    MemoryUse,
    ModelInfo,
    ModelLoaded,
    OptionsApplied,
    PageMap,
    StepRecord,
    TokenDelta,
)
from engine.kv.pool import PagePool
from engine.kv.room import PAGE_SIZE, is_out_of_memory, kv_budget, layout_for, make_cache, num_pages
from engine.kv.switches import sparse_pages, user_window
from engine.memory import expected, in_use
from engine.model.load import LoadedModel, load_model
from engine.ops.cpu import native
from engine.options import Capabilities, Kind, Options, entry, unavailable
from engine.params import SamplingParams
from engine.reply import Accepted, Reply
from engine.roofline import machine
from engine.runner import build_batch
from engine.scheduler import Policy, Request, Scheduler, StepPlan
from engine.speculation.candidates import Candidate, Target, candidates, judged
from engine.speculation.make import NO_DRAFT, Draft, load_draft, make_speculator
from engine.speculation.speculator import Speculator
from engine.speculation.verify import NO_PROPOSAL, Verified, verify
from engine.weights.locate import locate

log = logging.getLogger(__name__)

DEFAULT_PARAMS = SamplingParams()
NO_GUESSES = "rests: without a KV cache there is no step in which guesses could be tested"
READ_TOKENS = 64  # per step of ``read_text``: their logits are all wanted, 4 bytes * vocabulary each

Progress = Callable[[str, float], None]
ChatMessages = Sequence[Mapping[str, str]]


def _no_progress(stage: str, fraction: float) -> None:
    """Nobody watches."""


def _never() -> bool:
    return False


class Engine:
    """A loaded model with its KV pages, its requests and its switches."""

    def __init__(
        self,
        loaded: LoadedModel,
        source: str,
        path: Path,
        options: Options,
        figures: MachineFigures,
        kv_bytes: int | None,
    ) -> None:
        self._source = source
        self._path = path
        self._accountant = Accountant(figures)
        self._kv_bytes = kv_bytes
        self._replies: dict[int, Reply] = {}
        self._undelivered: list[Event] = []
        self._request_ids = itertools.count(1)
        self.options = options
        self._draft: Draft | None = None
        self._speculator: Speculator | None = None
        self._hold(loaded, options)
        self._speculator = self._make_speculator()
        self._scheduler = Scheduler(self._make_pool(), self._policy(options), self.context_length)

    # -- life ---------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        source: str,
        settings: Mapping[str, str] | None = None,
        progress: Progress = _no_progress,
        cancelled: Callable[[], bool] = _never,
        kv_bytes: int | None = None,
        machine_file: Path | None = None,
        find: Callable[[str], Path] = locate,
        draft: str | None = None,
        on_draft_refused: Callable[[str], None] | None = None,
    ) -> Engine:
        """Load ``source`` ("starter", a GGUF file, a safetensors folder) with switches set as in ``settings``.

        kv_bytes: memory for the KV cache; by default what the model's window needs, at least 512 MiB, at most 30 % of
        the free memory. machine_file: where this machine's measured figures are kept. find: from a model's name to its path.
        draft: a smaller model with the same vocabulary, for ``speculation=draft``. on_draft_refused: told why it cannot be used, and
        the load goes on without; None: that is an error.
        Raises ValueError, with what was wrong, where, and what to do.
        """
        here = Capabilities(has_native_kernels=native.is_available(), no_draft="" if draft else NO_DRAFT)
        options = Options(settings or {}, here)
        path = find(source)
        loaded = _load(path, options, progress, cancelled)
        progress("Measuring this machine", 1.0)
        figures = machine.measured_once(machine_file or machine.default_cache())
        engine = cls(loaded, source, path, options.replaced({"speculation": "off"}), figures, kv_bytes)
        if draft:
            try:
                engine.set_draft(draft, progress, cancelled, find)
            except ValueError as error:
                if on_draft_refused is None:
                    raise
                on_draft_refused(str(error))
                if options["speculation"] == "draft":
                    options = options.replaced({"speculation": "off"})
        engine.apply(dict(options))
        return engine

    def fail_all(self, message: str) -> list[Event]:
        """End every request with ``message`` (the model is about to go)."""
        return [self._end(reply, FinishReason.ERROR, message) for reply in list(self._replies.values())]

    def close(self) -> None:
        """Drop the weights and the cache, end the template's helper process. The engine is of no use afterwards."""
        self._loaded.text.close()
        self._draft = self._speculator = None
        del self._loaded, self._cache

    # -- what is loaded -----------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        loaded, spec = self._loaded, self._loaded.spec
        return ModelInfo(
            name=loaded.name,
            source=self._source,
            family=spec.family,
            num_parameters=spec.num_parameters,
            weight_bytes=loaded.model.weight_bytes,
            kv_bytes_per_token=self._cache.layout.token_bytes,
            context_length=self.context_length,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            vocab_size=spec.vocab_size,
            stored_format=loaded.stored_format,
            device="cpu",
            dtype=loaded.model.product_dtype,
            is_fallback=loaded.is_fallback,
            load_seconds=loaded.load_seconds,
            has_chat_template=loaded.text.has_chat_template,
            active_paths=self._active_paths(),
            machine=self._accountant.figures,
            memory=in_use(loaded, self._cache, self.options, self._draft, self._speculator),
        )

    def loaded_event(self) -> ModelLoaded:
        return ModelLoaded(self.info, dict(self.options), unavailable(self.capabilities), self.draft)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            device="cpu",
            is_fallback=self._loaded.is_fallback,
            has_native_kernels=native.is_available(),
            has_bitsandbytes=find_spec("bitsandbytes") is not None,
            not_stored_packed=self._loaded.not_stored_packed,
            head_dim=self._loaded.spec.head_dim,
            no_draft="" if self._draft else NO_DRAFT,
        )

    @property
    def draft(self) -> DraftInfo | None:
        """The model that guesses with ``speculation=draft``."""
        return self._draft.info if self._draft else None

    def set_draft(
        self,
        source: str,
        progress: Progress = _no_progress,
        cancelled: Callable[[], bool] = _never,
        find: Callable[[str], Path] = locate,
    ) -> DraftChanged:
        """Load ``source`` to guess for this model in place of any before; "" lets it go, and ``speculation=draft`` with it.

        Raises ValueError, with the present one kept, when it cannot be loaded or cannot guess for this model.
        """
        self._draft = self._load_draft(source, find(source), self._loaded, progress, cancelled) if source else None
        if self.options["speculation"] == "draft":
            if self._draft is None:
                self.options = self.options.replaced({"speculation": "off"})
            self._speculator = self._make_speculator()
        return DraftChanged(self.draft, dict(self.options), unavailable(self.capabilities), self.info)

    def judge_draft(self, source: str, find: Callable[[str], Path] = locate) -> DraftJudged:
        """Whether ``source`` could guess for this model. No weights are read."""
        try:
            reason, note = judged(self._as_target(self._loaded), find(source))
        except ValueError as error:  # there is no such model
            reason, note = str(error), ""
        return DraftJudged(source, self._source, reason, note)

    def draft_candidates(self, paths: Iterable[Path]) -> list[Candidate]:
        """Which of ``paths`` could guess for this model, each with the reason when it could not."""
        return candidates(self._as_target(self._loaded), paths)

    def _as_target(self, loaded: LoadedModel) -> Target:
        return Target(self._path, loaded.text.spellings(), loaded.spec.num_parameters)

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of the rendered template: exactly what ``submit`` would send."""
        return len(self._loaded.text.encode(tuple(messages)))

    # -- requests -----------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt | ChatMessages,
        params: SamplingParams,
        request_id: int | None = None,
        overflow: Overflow = "stop",
    ) -> int:
        """Queue a request; its events come out of ``step``.

        overflow: "drop_oldest" leaves the oldest turns of a conversation out when it would fill the window; the usage
        counts them. Raises ValueError when the prompt cannot be run.
        """
        return self._start(prompt, params, request_id, overflow).request_id

    def _start(
        self,
        prompt: Prompt | ChatMessages,
        params: SamplingParams,
        request_id: int | None = None,
        overflow: Overflow = "stop",
    ) -> Reply:
        submitted_at = time.perf_counter()
        number = next(self._request_ids) if request_id is None else request_id
        prompt = _as_prompt(prompt)
        is_conversation = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Message)
        room = reply_room(self.context_length, params.max_tokens)
        tokens, num_dropped = encode_within(
            prompt, self._loaded.text.encode, self.context_length, room, is_conversation and overflow == "drop_oldest"
        )
        most = self.context_length if params.max_tokens is None else params.max_tokens
        request = Request(number, tokens, len(tokens), most)
        reply = Reply(request, params, self._loaded.text, submitted_at, is_conversation, num_dropped)
        if params.max_tokens == 0:
            self._undelivered.append(reply.finished(FinishReason.LENGTH))
        else:
            self._replies[number] = reply
            self._scheduler.add(reply.request)
        return reply

    def abort(self, request_id: int) -> None:
        """Stop a request now; its Finished event comes with the next ``step``. Unknown ids were finished already."""
        reply = self._replies.get(request_id)
        if reply:
            delta = reply.held_back()
            self._undelivered += [delta] if delta else []
            self._undelivered.append(self._end(reply, FinishReason.ABORT))

    @property
    def has_work(self) -> bool:
        return bool(self._undelivered) or self._scheduler.has_work

    def step(self) -> list[Event]:
        """Compute one step of every request that fits; return what happened."""
        events, self._undelivered = self._undelivered, []
        started = time.perf_counter()
        self._guess()
        plan = self._scheduler.plan()
        if not plan.items:
            return events
        try:
            verified = self._run(plan)
        except Exception as error:  # whatever a step raises, its requests fail with a message and the engine goes on
            log.exception("a step of %d tokens failed", plan.num_rows)
            return events + self._fail(plan, error)
        accepted, happened = self._commit(plan, verified)
        events += happened
        record = self._record(plan, accepted, started)
        events.append(record)
        if self._speculator:
            self._speculator.observe(plan, accepted, record.step_seconds)
        if not self._scheduler.has_work:
            self._scheduler.check_integrity()
        return events

    def page_map(self) -> PageMap:
        return self._scheduler.page_map()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    # -- library use --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt | ChatMessages],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS,
    ) -> list[Completion]:
        """Run all prompts together and return their completions, in order. Raises ValueError if one cannot be run."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        replies = [self._start(prompt, its) for prompt, its in zip(prompts, each, strict=True)]
        endings: dict[int, Finished] = {}
        while self.has_work:
            endings.update((event.request_id, event) for event in self.step() if isinstance(event, Finished))
        failed = [ending.message for ending in endings.values() if ending.reason is FinishReason.ERROR]
        if failed:
            raise RuntimeError(failed[0])
        return [reply.completion(endings[reply.request_id].reason) for reply in replies]

    def stream(self, prompt: Prompt | ChatMessages, params: SamplingParams = DEFAULT_PARAMS) -> Iterator[TokenDelta]:
        """Yield the reply's deltas as they are made. Leaving the loop early stops the request."""
        number = self.submit(prompt, params)
        try:
            while self.has_work:
                for event in self.step():
                    if isinstance(event, TokenDelta) and event.request_id == number:
                        yield event
                    elif isinstance(event, Finished) and event.request_id == number:
                        if event.reason is FinishReason.ERROR:
                            raise RuntimeError(event.message)
                        return
        finally:
            self.abort(number)

    # -- measuring ----------------------------------------------------------------------------

    def forget(self) -> None:
        """Empty the prefix index, so that the next prompts are computed in full."""
        self._scheduler.pool.clear_index()

    def expected_memory(self, settings: Mapping[str, str]) -> MemoryUse:
        """What this model would take, loaded once more with ``settings`` and as much room for its pages (a draft model aside)."""
        options = Options(settings, replace(self.capabilities, no_draft=""))
        return expected(self._loaded.spec, options, self._kv_budget, _stored_bytes(self._path))

    @property
    def pool_bytes(self) -> int:
        """Memory of the KV cache's pages, used or not."""
        return self._cache.num_bytes

    def encode_text(self, text: str) -> list[int]:
        return self._loaded.text.encode(text)

    def read_text(self, token_ids: Sequence[int], num_prefill: int) -> Iterator[Tensor]:
        """Read a given text and yield the logits of all its positions in order, fp32 [rows, vocab] per step.

        The first ``num_prefill`` tokens are computed as a prompt is, the others one by one as replies are, by the
        scheduler, pages and ops that the switches choose; nothing is shared with other texts. Raises ValueError while requests run, or when the
        text does not fit.
        """
        if self.has_work or not 0 < num_prefill <= len(token_ids) < self.context_length:
            raise ValueError(
                f"A text of {len(token_ids):,} tokens cannot be read now: it must be shorter than the window of "
                f"{self.context_length:,}, and no chat may be running."
            )
        policy = self._scheduler.policy
        budget = min(READ_TOKENS, policy.token_budget)
        self._scheduler.change_policy(replace(policy, share_prefixes=False, token_budget=budget))
        request = Request(next(self._request_ids), list(token_ids[:num_prefill]), num_prefill, len(token_ids))
        self._scheduler.add(request)
        try:
            num_read = 0
            while num_read < len(token_ids):
                plan = self._scheduler.plan()
                (item,) = plan.items
                yield self._logits_from(plan, num_read - item.start)
                num_read = item.context
                if num_read < len(token_ids):
                    following = {request.request_id: [token_ids[num_read]]} if item.wants_logits else {}
                    self._scheduler.commit(plan, following)
        finally:
            self._scheduler.remove(request)
            self._scheduler.change_policy(policy)

    def _logits_from(self, plan: StepPlan, first_row: int) -> Tensor:
        """Run a plan of one item; logits of its rows from ``first_row`` on."""
        with torch.inference_mode():
            batch = build_batch(plan, PAGE_SIZE)
            rows = torch.arange(first_row, plan.num_rows)
            return self._loaded.model.forward(replace(batch, logit_rows=rows), self._cache)

    # -- switches -----------------------------------------------------------------------------

    def apply(
        self, changes: Mapping[str, str], progress: Progress = _no_progress, cancelled: Callable[[], bool] = _never
    ) -> OptionsApplied:
        """Flip switches between two steps. Running requests go on; some kinds of change recompute them.

        Raises ValueError, with nothing changed, when a value is unknown or cannot be used here.
        """
        started = time.perf_counter()
        options = self.options.replaced(changes, self.capabilities)
        changed = self.options.changed(options)
        reloads = any(entry(key).kind is Kind.WEIGHTS for key in changed)
        relaid = not reloads and layout_for(self._loaded, options) != self._cache.layout
        preempted = 0
        if reloads:
            preempted = self._reload(options, progress, cancelled)
        elif relaid:
            preempted = self._lay_out_again(options)
        preempted += self._scheduler.change_policy(self._policy(options))
        self._cache.window = user_window(options)
        if "sparse" in changed:  # texts computed one way are not offered to chats that compute the other way
            self._scheduler.pool.clear_index()
            self._cache.set_sparse(sparse_pages(options), self._scheduler.pool.held_pages())
        _set_fused(self._loaded, options)
        self.options = options
        self._account_for(options)
        if reloads or relaid or {"speculation", "draft_length", "fused_ops", "attention"} & set(changed):
            self._speculator = self._make_speculator()
        seconds = time.perf_counter() - started
        takes_other_memory = reloads or any(entry(key).kind is Kind.CACHE or key == "speculation" for key in changed)
        return OptionsApplied(dict(options), changed, seconds, preempted, self.info if takes_other_memory else None)

    def _reload(self, options: Options, progress: Progress, cancelled: Callable[[], bool]) -> int:
        """Read the weights again in another form, then swap; until the swap the old ones keep working."""
        loaded = _load(self._path, options, progress, cancelled)
        if self._draft:
            self._draft = self._load_draft(*self._draft[:2], loaded, progress, cancelled, options)
        preempted = self._scheduler.preempt_all()
        self._loaded.text.close()
        self._hold(loaded, options)
        self._move_requests()
        return preempted

    def _load_draft(
        self,
        source: str,
        path: Path,
        target: LoadedModel,
        progress: Progress,
        cancelled: Callable[[], bool],
        options: Options | None = None,
    ) -> Draft:
        """With weights as ``options`` ask for them; by default as they are now."""

        def of_draft(stage: str, fraction: float) -> None:
            progress(f"Draft model: {stage.lower()}", fraction)

        its = options or self.options
        return load_draft(source, path, self._as_target(target), lambda where: _load(where, its, of_draft, cancelled))

    def _lay_out_again(self, options: Options) -> int:
        """An empty cache of another layout in the memory of the old one; running requests are computed again."""
        num_pages(layout_for(self._loaded, options), options, self._kv_budget)  # raises before anything is given up
        preempted = self._scheduler.preempt_all()
        self._make_cache(options)
        self._move_requests()
        return preempted

    def _move_requests(self) -> None:
        """Go on with the new cache; requests that it cannot hold end, and say why."""
        for reply in list(self._replies.values()):
            if reply.request.num_tokens >= self.context_length:
                message = f"This chat has {reply.request.num_tokens:,} tokens; with these settings {self.context_length:,} fit."
                self._undelivered.append(self._end(reply, FinishReason.ERROR, message))
        self._scheduler.move_to(self._make_pool(), self.context_length)

    # -- memory -------------------------------------------------------------------------------

    def _hold(self, loaded: LoadedModel, options: Options) -> None:
        self._loaded = loaded
        _set_fused(loaded, options)
        self._kv_budget = self._kv_bytes or kv_budget(loaded)
        num_pages(layout_for(loaded, options), options, self._kv_budget)
        self._make_cache(options)

    def _make_cache(self, options: Options) -> None:
        """As many pages as the budget holds in the layout that ``options`` ask for."""
        self.__dict__.pop("_cache", None)  # the old one goes before the new one comes
        self._cache = make_cache(self._loaded, options, self._kv_budget)
        self.context_length = min(self._loaded.spec.max_position, (self._cache.num_pages - 1) * PAGE_SIZE)
        self._account_for(options)

    def _account_for(self, options: Options) -> None:
        loaded, layout = self._loaded, self._cache.layout
        self._accountant.model = ledger_model(loaded.spec, loaded.model, layout, options, PAGE_SIZE)

    def _policy(self, options: Options) -> Policy:
        return Policy.of(options, self._loaded.spec)

    def _active_paths(self) -> dict[str, str]:
        return {**self._loaded.model.active_paths(), **self._cache.active_paths()}

    def _make_pool(self) -> PagePool:
        return PagePool(self._cache.num_pages, PAGE_SIZE)

    def _make_speculator(self) -> Speculator | None:
        return make_speculator(self.options, self._loaded, self._draft, self._cache.num_pages, PAGE_SIZE)

    # -- one step, in parts -------------------------------------------------------------------

    def _guess(self) -> None:
        """Give decoding requests guesses for the coming step. Without a KV cache there is no row to verify them in."""
        if self._speculator and self.options.on("kv_cache"):
            states = {number: reply.sampler for number, reply in self._replies.items()}
            self._speculator.prepare(self._scheduler.running, states, self.context_length)

    def _run(self, plan: StepPlan) -> dict[int, Verified]:
        """Request id -> its new tokens, for the items that want logits. Commits them to the sampler states."""
        with torch.inference_mode():
            rows = self._loaded.model.forward(build_batch(plan, PAGE_SIZE), self._cache).cpu().numpy()
        verified: dict[int, Verified] = {}
        first = 0
        for item in plan.items:
            if item.wants_logits:
                state = self._replies[item.request.request_id].sampler
                proposal = self._speculator.proposal_for(item) if self._speculator else NO_PROPOSAL
                its = rows[first : first + item.num_logit_rows, : state.vocab_size]
                verified[item.request.request_id] = verify(its, proposal, state)
                first += item.num_logit_rows
        return verified

    def _commit(self, plan: StepPlan, verified: Mapping[int, Verified]) -> tuple[dict[int, Accepted], list[Event]]:
        """Request id -> what its reply accepted, and the events of that."""
        accepted: dict[int, Accepted] = {}
        endings: list[Event] = []
        now = time.perf_counter()
        for number, got in verified.items():
            reply, error = self._replies[number], got.sampled[0].error
            if error:
                endings.append(self._end(reply, FinishReason.ERROR, error))
            else:
                accepted[number] = reply.accept(got, now, self.context_length)
        tokens = {
            number: [sampled.token_id for sampled in verified[number].sampled[: its.num_kept]]
            for number, its in accepted.items()
        }
        self._scheduler.commit(plan, tokens)
        events: list[Event] = [its.delta for its in accepted.values()]
        endings += [self._end(self._replies[number], its.reason) for number, its in accepted.items() if its.reason]
        return accepted, events + endings

    def _record(self, plan: StepPlan, accepted: Mapping[int, Accepted], started: float) -> StepRecord:
        paths = self._active_paths()
        if self._speculator:
            paths["speculation"] = self._speculator.describe() if self.options.on("kv_cache") else NO_GUESSES
        pool = self._scheduler.snapshot(self._cache.page_bytes)
        guessing = self._speculator.take_cost() if self._speculator else NO_COST
        return self._accountant.record(plan, accepted, started, len(self._scheduler.waiting), pool, paths, guessing)

    def _end(self, reply: Reply, reason: FinishReason, message: str = "") -> Finished:
        self._scheduler.remove(reply.request)
        del self._replies[reply.request_id]
        if self._speculator:
            self._speculator.forget(reply.request_id)
        return reply.finished(reason, message)

    def _fail(self, plan: StepPlan, error: Exception) -> list[Event]:
        message = self._explain(plan, error)
        return [self._end(self._replies[item.request.request_id], FinishReason.ERROR, message) for item in plan.items]

    def _explain(self, plan: StepPlan, error: Exception) -> str:
        if not is_out_of_memory(error):
            return f"The step failed: {error}. Try again; if it happens again, copy the diagnostics and report it."
        free = psutil.virtual_memory().available
        fits = free // self._cache.layout.token_bytes
        return (
            f"Not enough memory for a step of {plan.num_rows:,} tokens in {len(plan.items)} chats. {free / 2**30:.1f} GiB are free, "
            f"room for about {min(fits, self.context_length):,} tokens of context. Lower the batch limit or the step budget, or close other programs."
        )


def _set_fused(loaded: LoadedModel, options: Options) -> None:
    loaded.model.set_fused(options.on("fused_ops"), options["attention"] == "fused")


def _load(path: Path, options: Options, progress: Progress, cancelled: Callable[[], bool]) -> LoadedModel:
    return load_model(
        path,
        options["weights"],
        options.on("fused_ops"),
        progress,
        cancelled,
        sensitive=options["sensitive_layers"],
        activations=options["activations"],
    )


def _as_prompt(prompt: Prompt | ChatMessages) -> Prompt:
    """Messages may also be given as {"role", "content"} mappings."""
    if isinstance(prompt, str) or not any(isinstance(part, Mapping) for part in prompt):
        return prompt if isinstance(prompt, str) else tuple(prompt)  # type: ignore[return-value]
    return tuple(Message(part["role"], part["content"]) for part in prompt)  # type: ignore[arg-type, index]


def _stored_bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size
