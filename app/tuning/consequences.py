"""Consequences: did flipping a switch make decoding slower here? Judged from StepRecords before and after. Knows no Qt.

Steps are comparable when as many chats decoded in them and their contexts are of about the same length; nothing is said
until there are enough of them on both sides, and nothing about differences that are noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from app.tuning.numbers import plural, rate
from engine.events import Phase, StepRecord

NUM_STEPS = 16  # on each side
WARM_UP_STEPS = 2  # after a flip: caches are cold
NOISE = 0.10  # differences below this share are not called differences
CONTEXT_FACTOR, CONTEXT_SLACK = 1.5, 256  # contexts this much longer read noticeably more


@dataclass(frozen=True, slots=True)
class _Pace:
    """How fast some steps decoded: tokens of all chats per second, chats per step, and their mean context."""

    tokens_per_second: float
    batch: int
    context: float


class Consequences:
    """Fold every record, tell every flip; ``line`` then speaks of a switch's last flip once it can be judged."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=NUM_STEPS)  # of one batch size
        self._before: _Pace | None = None
        self._flipped: tuple[str, ...] = ()
        self._to_skip = 0
        self._lines: dict[str, str] = {}

    def on_model(self) -> None:
        """Another model, or none: what was seen says nothing about it."""
        self._steps.clear()
        self._before, self._flipped, self._lines = None, (), {}

    def on_switched(self, keys: Iterable[str]) -> None:
        """These switches took effect now, together."""
        changed = tuple(keys)
        pace = self._pace()
        if pace is not None:
            self._before, self._flipped = pace, changed
        else:  # too soon after the last flip to have judged it: both are judged together
            self._flipped = tuple(dict.fromkeys((*self._flipped, *changed)))
        for key in changed:
            self._lines.pop(key, None)
        self._steps.clear()
        self._to_skip = WARM_UP_STEPS

    def fold(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            if record.phase is Phase.DECODE and record.num_new_tokens:
                self._fold(record)

    def line(self, key: str) -> str:
        """ "Slower since it was set: 14 tokens/s, 23 before." Empty where nothing was measured."""
        return self._lines.get(key, "")

    @property
    def lines(self) -> Mapping[str, str]:
        return self._lines

    def _fold(self, record: StepRecord) -> None:
        if self._to_skip:
            self._to_skip -= 1
            return
        if self._steps and self._steps[-1].batch != record.batch:
            self._steps.clear()
        self._steps.append(record)
        after = self._pace()
        if after is not None and self._before is not None and self._flipped and after.batch == self._before.batch:
            if _comparable(self._before, after):
                words = _words(self._before, after, len(self._flipped))
                self._lines.update(dict.fromkeys(self._flipped, words))
            self._before, self._flipped = None, ()

    def _pace(self) -> _Pace | None:
        if len(self._steps) < NUM_STEPS:
            return None
        seconds = sum(step.step_seconds for step in self._steps)
        contexts = [progress.context_tokens for step in self._steps for progress in step.requests]
        if seconds <= 0 or not contexts:
            return None
        tokens = sum(step.num_new_tokens for step in self._steps)
        return _Pace(tokens / seconds, self._steps[-1].batch, sum(contexts) / len(contexts))


def _comparable(before: _Pace, after: _Pace) -> bool:
    less, more = sorted((before.context, after.context))
    return more <= CONTEXT_FACTOR * less + CONTEXT_SLACK


def _words(before: _Pace, after: _Pace, num_flipped: int) -> str:
    ratio = after.tokens_per_second / before.tokens_per_second
    verdict = "slower" if ratio < 1 - NOISE else "faster" if ratio > 1 + NOISE else "no faster and no slower"
    since = "since it was set" if num_flipped == 1 else f"since {plural(num_flipped, 'switch', 'switches')} were set"
    chats = "" if after.batch == 1 else f", {after.batch} chats"
    figures = f"{rate(after.tokens_per_second)} tokens/s, {rate(before.tokens_per_second)} before{chats}"
    return f"{verdict[:1].upper()}{verdict[1:]} {since}: {figures}."
