"""How many tokens to guess, and when to stop guessing: decided by measured seconds, not by hope.

For one chat of a batch of B, with ``plain`` the seconds of a step without guesses, alpha the share of tested guesses that
were right, and ``extra`` the seconds one more guess adds to a step (making it and verifying it):

    k guesses gain    alpha + alpha^2 + ... + alpha^k   tokens, each worth plain / B seconds,
    and cost          k * extra                         seconds.

The length with the largest difference is used. When no length gains anything, the break-even is not reached: the chat
decodes without guesses and tries again after a while, each time after twice as long. A larger batch makes a token cheaper
and a guess not, so speculation turns itself off where the machine is busy anyway.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LENGTHS = (1, 2, 3, 4, 6, 8)
PROBE_LENGTH = 4
SETTLING_STEPS = (
    4  # without guesses until one counts as plain: those behind a step of many rows are slower than they would stay
)
PLAIN_SAMPLES = 3  # plain steps to see before guessing at all
STEPS_BETWEEN_PLAIN = 128  # then some without guesses, so that ``plain`` follows the growing context
FIRST_WAIT, LONGEST_WAIT = 32, 512  # steps until a chat that is off tries again
ASSUMED_EXTRA = 0.4  # of a plain step, until measured: a first try should be a cheap one
_MEMORY = 16  # samples a median is taken of
_PLAIN_MEMORY = 7  # of steps without guesses: caches warm up and contexts grow, so the latest count
_DECAY = 0.85  # of what is known of a chat's guesses, per verification
_PRIOR_TESTS, _PRIOR_ACCEPTED = 2.0, 1.4  # a new chat deserves a try


@dataclass(slots=True)
class _Chat:
    tested: float = _PRIOR_TESTS
    accepted: float = _PRIOR_ACCEPTED
    wait: int = FIRST_WAIT
    steps_until_probe: int = 0
    is_off: bool = False

    @property
    def acceptance(self) -> float:
        return self.accepted / self.tested

    def learn(self, tested: int, accepted: int) -> None:
        self.tested = self.tested * _DECAY + tested
        self.accepted = self.accepted * _DECAY + accepted

    def turn_off(self, wait: int) -> None:
        """Remember the acceptance, but lightly, so that one good probe can outweigh it."""
        acceptance = self.acceptance
        self.tested, self.accepted = _PRIOR_TESTS, _PRIOR_TESTS * acceptance
        self.is_off, self.wait, self.steps_until_probe = True, wait, wait


def _samples() -> deque[float]:
    return deque(maxlen=_MEMORY)


@dataclass(slots=True)
class _Costs:
    """What steps of about one batch size took, seconds. extra: length -> seconds per guess.

    plain: of steps that ran as they do when nobody guesses, so behind others without guesses. Otherwise guessing would be
    compared with the slowness that it brought about itself (cold caches), and would seem to pay where it does not.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_PLAIN_MEMORY))
    extra: dict[int, deque[float]] = field(default_factory=dict)
    steps_since_plain: int = 0
    num_settling: int = 0

    def saw_plain(self, seconds: float) -> None:
        self.num_settling += 1
        self.steps_since_plain += 1
        if self.num_settling > SETTLING_STEPS:
            self.plain.append(seconds)
            self.steps_since_plain = 0

    def saw_guesses(self, total: int, length: int, seconds: float) -> None:
        """A step that verified ``total`` guesses, about ``length`` in a chat."""
        self.num_settling = 0
        self.steps_since_plain += 1
        if self.plain:
            extra = max(0.0, seconds - statistics.median(self.plain)) / total
            self.extra.setdefault(length, _samples()).append(extra)

    @property
    def needs_plain_step(self) -> bool:
        return len(self.plain) < PLAIN_SAMPLES or self.steps_since_plain >= STEPS_BETWEEN_PLAIN

    def extra_seconds(self, length: int) -> float:
        """Per guess, from steps with guesses of the length nearest to ``length``."""
        if not self.extra:
            return ASSUMED_EXTRA * statistics.median(self.plain)
        nearest = min(self.extra, key=lambda known: abs(known - length))
        return statistics.median(self.extra[nearest])


class Outcome(NamedTuple):
    """One chat's part in a decode step: guesses run, compared, and found right."""

    request_id: int
    num_drafts: int
    num_tested: int
    num_accepted: int


class Controller:
    """length: "adaptive" or a number of tokens.

    automatic_off: False guesses always, whatever it costs (tests and measurements).
    """

    def __init__(self, length: str, automatic_off: bool = True) -> None:
        self.automatic_off = automatic_off
        self._lengths = LENGTHS if length == "adaptive" else (int(length),)
        self._chats: dict[int, _Chat] = {}
        self._costs: dict[int, _Costs] = {}

    def length_for(self, request_id: int, batch: int) -> int:
        """How many tokens to guess for this chat in the next step of ``batch`` decoding chats; 0 is none."""
        if not self.automatic_off:
            return self._lengths[-1]
        chat = self._chats.setdefault(request_id, _Chat())
        costs = self._costs_of(batch)
        if costs.needs_plain_step:
            return 0
        if chat.is_off:
            return 0 if chat.steps_until_probe > 0 else min(PROBE_LENGTH, self._lengths[-1])
        return max(self._lengths, key=lambda length: self._gain_seconds(chat, length, batch))

    def observe(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """A step that only decoded took ``seconds``, guessing included."""
        batch = len(outcomes)
        costs = self._costs_of(batch)
        drafted = [outcome for outcome in outcomes if outcome.num_drafts]
        if drafted:
            total = sum(outcome.num_drafts for outcome in drafted)
            costs.saw_guesses(total, round(total / len(drafted)), seconds)
        else:
            costs.saw_plain(seconds)
        for outcome in outcomes:
            if outcome.request_id in self._chats:  # not ended with this step
                self._judge(self._chats[outcome.request_id], outcome, batch)

    def forget(self, request_id: int) -> None:
        self._chats.pop(request_id, None)

    def summary(self) -> str:
        """What it is doing, in words for the panel."""
        if not self._chats:
            return "no chat decodes"
        off = [chat for chat in self._chats.values() if chat.is_off and self.automatic_off]
        if len(off) < len(self._chats):
            return f"off by itself in {len(off)} of {len(self._chats)} chats" if off else "on"
        acceptance = statistics.mean(chat.acceptance for chat in off)
        steps = max(0, min(chat.steps_until_probe for chat in off))
        return f"off by itself: with {acceptance:.0%} of guesses right it does not pay; tries again in {steps} steps"

    def state(self) -> Mapping[int, tuple[bool, float]]:
        """Request id -> (whether it is off, acceptance)."""
        return {number: (chat.is_off, chat.acceptance) for number, chat in self._chats.items()}

    def _judge(self, chat: _Chat, outcome: Outcome, batch: int) -> None:
        if not outcome.num_tested:
            chat.steps_until_probe -= 1
            return
        chat.learn(outcome.num_tested, outcome.num_accepted)
        if not self._costs_of(batch).plain:
            return
        pays = max(self._gain_seconds(chat, length, batch) for length in self._lengths) > 0
        if pays:
            chat.is_off, chat.wait = False, FIRST_WAIT
        else:
            chat.turn_off(min(2 * chat.wait, LONGEST_WAIT) if chat.is_off else FIRST_WAIT)

    def _gain_seconds(self, chat: _Chat, length: int, batch: int) -> float:
        costs, alpha = self._costs_of(batch), min(1.0, chat.acceptance)
        expected = sum(alpha**place for place in range(1, length + 1))
        return expected * statistics.median(costs.plain) / batch - length * costs.extra_seconds(length)

    def _costs_of(self, batch: int) -> _Costs:
        """Batches of 1, 2, 3 to 4, 5 to 8, ... share their figures."""
        return self._costs.setdefault((max(1, batch) - 1).bit_length(), _Costs())
