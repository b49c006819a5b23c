"""Chats that run while switches are flipped at random, through the real service thread.

``Stress`` is the client side of it: some chats, each of which asks, regenerates, goes on or is stopped, with settings drawn
anew each time, and somebody who flips switches meanwhile. It checks every event as it comes and raises AssertionError with
the seed, the options in force and the latest changes when something is wrong.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.commands import Abort, LoadModel, MeasureContext, Message, Prompt, SetOptions, Submit, WatchPages
from engine.events import (
    ContextMeasured,
    EngineError,
    Event,
    Finished,
    FinishReason,
    ModelLoaded,
    ModelLoadFailed,
    OptionsApplied,
    OptionsRefused,
    PageMap,
    StepRecord,
    TokenDelta,
)
from engine.options import OPTIONS, Kind, Options
from engine.params import SamplingParams
from engine.process_memory import settled_bytes
from engine.service import EngineService

STOPS = ("the", ". ", "e a", "\n")
WORDS = (
    "the",
    "cat",
    "sat",
    "on a mat",
    "and",
    "saw",
    "that",
    "a",
    "while",
    "we all",
    "looked",
    "at it",
    "again,",
    "and again",
)
REPREFILL_STEPS = 30  # the longest prompt in the smallest chunks
DEFAULTS = {option.key: option.default for option in OPTIONS}
WEIGHTS = [option.key for option in OPTIONS if option.kind is Kind.WEIGHTS]
OTHERS = [option.key for option in OPTIONS if option.kind is not Kind.WEIGHTS]


@dataclass
class Chat:
    """One chat and the request it waits for, if any."""

    index: int
    history: list[Message] = field(default_factory=list)
    request_id: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    steps_left: int = 0  # of the engine, until it counts as stuck
    abort_after: int | None = None  # deltas
    was_aborted: bool = False
    pieces: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_deltas: int = 0

    @property
    def is_waiting(self) -> bool:
        return self.request_id != 0


class Stress:
    """source: the model. has_template: chats are conversations; else their prompts are token ids below ``vocab``.

    longest: tokens of a reply at most. patience_seconds: how long the engine may say nothing at all. A chat is stuck when
    the engine has made more steps since its latest token than all chats' replies before it and their prompts, computed anew
    after every flip, can take.
    """

    def __init__(
        self,
        source: str,
        seed: int,
        num_chats: int = 6,
        longest: int = 60,
        longest_prompt: int = 400,
        patience_seconds: float = 120.0,
        has_template: bool = True,
        weights_share: float = 0.03,
        flips_per_second: float = 4.0,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.chats = [Chat(index) for index in range(num_chats)]
        self.counts: Counter[str] = Counter()
        self._longest, self._longest_prompt = longest, longest_prompt
        self._patience = patience_seconds
        self._heard_at = time.monotonic()
        self._most_steps = num_chats * (longest + REPREFILL_STEPS)
        self._has_template = has_template
        self._weights_share = weights_share
        self._flip_seconds = 1 / flips_per_second
        self._by_request: dict[int, Chat] = {}
        self._next_request = 1
        self._flips: deque[dict[str, str]] = deque()  # posted, not yet answered
        self._history: deque[tuple[dict[str, str], str]] = deque(maxlen=8)
        self.options = Options({})
        self.unavailable: Mapping[str, Mapping[str, str]] = {}
        self.service = EngineService()
        self.service.start()
        self.service.post(LoadModel(source, dict(settings or {})))
        loaded = self._wait_for_load()
        self.options, self.unavailable = Options(loaded.options), loaded.unavailable

    # -- running ------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Chats and flips for ``seconds``."""
        until = time.monotonic() + seconds
        next_flip = time.monotonic()
        while time.monotonic() < until:
            self._turn(ask=True)
            if time.monotonic() >= next_flip and len(self._flips) < 3:
                self._flip()
                next_flip = time.monotonic() + self.random.expovariate(1 / self._flip_seconds)
        self.settle()

    def settle(self) -> None:
        """The switches go back, and no more questions; all chats end. Then every page must be accounted for."""
        self._post_flip(self._usable(DEFAULTS))
        while self._flips or any(chat.is_waiting for chat in self.chats):
            self._turn(ask=False)
        self._idle()
        with self._blamed():
            engine = self.service._engine
            assert engine is not None
            assert not engine.has_work
            engine.check_integrity()
            pool = engine._scheduler.pool
            assert pool.num_held == 0
            assert not engine._replies
        self.counts["settled"] += 1

    def fresh_bytes(self) -> int:
        """Memory of the process at rest, with default switches, a new pool and no page of it touched."""
        self.set_options(DEFAULTS)
        self.set_options({"kv_dtype": "int8"})
        self.set_options({"kv_dtype": "native"})
        self._idle()
        return settled_bytes()

    def set_options(self, changes: Mapping[str, str]) -> None:
        self._post_flip(self._usable(changes))
        while self._flips:
            self._turn(ask=False)

    def close(self) -> None:
        assert self.service.shutdown(60), f"the engine thread does not end (seed {self.seed})"

    def _turn(self, ask: bool) -> None:
        with self._blamed():
            events = self.service.take_events()
            for event in events:
                self._take(event)
            assert self.service.is_alive
            if events:
                self._heard_at = time.monotonic()
            self._look_for_stuck_chats()
        if ask:
            for chat in self.chats:
                if not chat.is_waiting and self.random.random() < 0.3:
                    self._ask(chat)
            if self.random.random() < 0.01:
                self.service.post(WatchPages(self.random.choice((0, 5, 30))))
            if self.random.random() < 0.01 and self._has_template:
                self.service.post(MeasureContext(1, (Message("user", self._words(10)),)))
        if not events:
            time.sleep(0.002)

    def _idle(self) -> None:
        """Wait until the engine thread has answered everything."""
        self.service.post(SetOptions({}))
        self._flips.append({})
        while self._flips:
            self._turn(ask=False)

    # -- asking -------------------------------------------------------------------------------

    def _ask(self, chat: Chat) -> None:
        prompt: Prompt
        if self._has_template:
            if not chat.history or self._is_long(chat) or self.random.random() < 0.2:
                length = self.random.choice((1, 5, 30, self._longest_prompt // 2, self._longest_prompt))
                chat.history = [Message("user", self._words(self.random.randint(1, length)))]
            elif self.random.random() < 0.6 and chat.pieces:
                chat.history += [
                    Message("assistant", "".join(chat.pieces)),
                    Message("user", self._words(self.random.randint(1, 12))),
                ]  # else: regenerate
            prompt = tuple(chat.history)
        else:
            start = self.random.choice((0, 0, 3))
            length = self.random.choice((1, 31, 32, 33, 64, self.random.randint(1, self._longest_prompt)))
            prompt = tuple((start + i * i % 97 + i // 50) % 250 for i in range(length))
        self._submit(chat, prompt)

    def _submit(self, chat: Chat, prompt: Prompt) -> None:
        chat.request_id, self._next_request = self._next_request, self._next_request + 1
        chat.params = self._params()
        chat.steps_left = self._most_steps
        chat.abort_after = self.random.randint(0, 20) if self.random.random() < 0.15 else None
        chat.was_aborted = False
        chat.pieces, chat.num_tokens, chat.num_deltas = [], 0, 0
        self._by_request[chat.request_id] = chat
        overflow = self.random.choice(("stop", "drop_oldest"))
        self.service.post(Submit(chat.request_id, prompt, chat.params, overflow))
        self.counts["asked"] += 1
        if chat.abort_after == 0:
            self._abort(chat)

    def _abort(self, chat: Chat) -> None:
        self.service.post(Abort(chat.request_id))
        chat.was_aborted = True
        self.counts["aborted"] += 1

    def _params(self) -> SamplingParams:
        draw = self.random
        greedy = draw.random() < 0.4
        return SamplingParams(
            temperature=0 if greedy else draw.choice((0.3, 0.8, 1.5)),
            top_k=draw.choice((0, 0, 1, 5, 10**6)),
            top_p=draw.choice((1.0, 0.9, 0.0)),
            min_p=draw.choice((0.0, 0.05)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.3)),
            presence_penalty=draw.choice((0.0, 0.0, 0.5)),
            frequency_penalty=draw.choice((0.0, 0.0, 0.5)),
            seed=draw.choice((None, 7)),
            stop=tuple(draw.sample(STOPS, draw.choice((0, 0, 1, 2)))),
            max_tokens=draw.choice((1, 2, draw.randint(1, self._longest), self._longest)),
            logprobs=draw.choice((None, None, 3)),
            ignore_eos=draw.random() < 0.5,
        )

    def _words(self, count: int) -> str:
        return " ".join(self.random.choice(WORDS) for _ in range(count))

    def _is_long(self, chat: Chat) -> bool:
        return sum(len(message.content) for message in chat.history) > 6 * self._longest_prompt

    # -- flipping -----------------------------------------------------------------------------

    def _flip(self) -> None:
        draw = self.random
        keys = draw.sample(OTHERS, draw.choice((1, 1, 1, 2, 4)))
        if draw.random() < self._weights_share:
            keys.append(draw.choice(WEIGHTS))
        changes = {}
        for key in keys:
            option = next(option for option in OPTIONS if option.key == key)
            refused = self.unavailable.get(key, {})
            changes[key] = draw.choice([value for value in option.values if value not in refused])
        self._post_flip(changes)

    def _post_flip(self, changes: Mapping[str, str]) -> None:
        self._flips.append(dict(changes))
        self.service.post(SetOptions(dict(changes)))
        self.counts["flips"] += 1

    # -- events -------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        match event:
            case TokenDelta():
                self._take_delta(event)
            case Finished():
                self._take_ending(event)
            case StepRecord():
                pool = event.pool
                assert pool.used + pool.cached + pool.free == pool.total
                assert event.num_accepted <= event.num_drafted
                assert event.step_seconds > 0
                self.counts["steps"] += 1
                for chat in self.chats:
                    chat.steps_left -= 1
            case OptionsApplied() | OptionsRefused():
                self._take_answer(event)
            case PageMap():
                self.counts["maps"] += 1
            case ContextMeasured():
                assert event.num_tokens > 0
            case EngineError() | ModelLoadFailed():
                raise AssertionError(f"{event.message}\n{getattr(event, 'detail', '')}")

    def _take_delta(self, event: TokenDelta) -> None:
        chat = self._by_request[event.request_id]
        assert chat.request_id == event.request_id
        chat.pieces.append(event.text)
        chat.num_tokens += len(event.token_ids)
        chat.num_deltas += 1
        chat.steps_left = self._most_steps
        assert chat.params.max_tokens is not None
        assert chat.num_tokens <= chat.params.max_tokens
        self.counts["tokens"] += len(event.token_ids)
        if chat.abort_after is not None and chat.num_deltas >= chat.abort_after and not chat.was_aborted:
            self._abort(chat)

    def _take_ending(self, event: Finished) -> None:
        chat = self._by_request.pop(event.request_id)
        assert event.reason is not FinishReason.ERROR, event.message
        assert event.reason is not FinishReason.ABORT or chat.was_aborted
        text = "".join(chat.pieces)
        assert not any(stop in text for stop in chat.params.stop)
        ends_with_marker = event.reason is FinishReason.STOP and event.usage.new_tokens == chat.num_tokens + 1
        assert event.usage.new_tokens == chat.num_tokens or ends_with_marker, (event, chat)
        assert event.reason is not FinishReason.LENGTH or event.usage.new_tokens == chat.params.max_tokens
        chat.request_id = 0
        self.counts[f"ended: {event.reason}"] += 1

    def _take_answer(self, event: OptionsApplied | OptionsRefused) -> None:
        changes = self._flips.popleft()
        try:
            wanted: Options | None = self.options.replaced(changes)
        except ValueError:
            wanted = None
        if isinstance(event, OptionsApplied):
            assert wanted is not None, f"{changes} were applied although they conflict"
            assert dict(event.options) == dict(wanted)
            self.options = wanted
            self._history.append((changes, f"{event.seconds:.2f} s, {event.preempted} preempted"))
            self.counts["preempted"] += event.preempted
            for chat in self.chats:
                chat.steps_left += REPREFILL_STEPS * event.preempted
        else:
            assert wanted is None, f"{changes} were refused: {event.message}"
            assert "cannot go with" in event.message
            self.counts["refused"] += 1

    def _look_for_stuck_chats(self) -> None:
        waiting = [chat for chat in self.chats if chat.is_waiting]
        silence = time.monotonic() - self._heard_at
        assert not waiting or silence < self._patience, f"the engine has said nothing for {silence:.0f} s"
        for chat in waiting:
            assert chat.steps_left > 0, f"chat {chat.index} is stuck: {chat}"

    def _usable(self, changes: Mapping[str, str]) -> dict[str, str]:
        return {key: value for key, value in changes.items() if value not in self.unavailable.get(key, {})}

    def _wait_for_load(self) -> ModelLoaded:
        while True:
            for event in self.service.take_events():
                assert not isinstance(event, ModelLoadFailed), event
                if isinstance(event, ModelLoaded):
                    return event
            time.sleep(0.01)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Tell, with whatever goes wrong inside, how to see it again."""
        try:
            yield
        except (AssertionError, KeyError) as error:
            latest = "\n".join(f"  {changes}: {what}" for changes, what in self._history)
            error.add_note(
                f"seed {self.seed}, {dict(self.counts)}\noptions {dict(self.options)}\nlatest changes\n{latest}"
            )
            raise
