"""The best setting for this machine, found by a short measured search.

One chat's work (a prompt of fresh tokens, then a reply) is timed; each switch in turn tries its other choices and keeps one
that is faster than the best so far, beyond the noise, in two pairs of runs one after the other (coordinate descent, one pass; the
weights come last, since trying them reads the model again). Only switches that leave the text alone are tried, and
the roundings of the weights: a window or a rounded cache would always win on a short text, at a price that a clock
does not see. A run is cut short once it has taken clearly longer than the best.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from engine.comparison import NOISE, TooSlow, Workload, run_once
from engine.options import OPTIONS, Kind, entry
from engine.presets import Found

if TYPE_CHECKING:
    from engine.engine import Engine

PROMPT_TOKENS = 96
NEW_TOKENS = 16
PAIRS = 2  # all of which a choice must win
CUT = 1.3  # a run is stopped at this many times the best
_ROUNDINGS = ("int8", "int4")  # of the weights; full precision cannot be faster at one chat and need not fit
_ABOUT_MANY_CHATS = ("batching", "max_batch", "prefix", "eviction", "paging")
_ABOUT_LONG_PROMPTS = ("chunked_prefill", "token_budget")
_ABOUT_THE_TEXT = ("speculation", "draft_length")
_NOT_TIMED = _ABOUT_MANY_CHATS + _ABOUT_LONG_PROMPTS + _ABOUT_THE_TEXT  # this work cannot tell their choices apart

Progress = Callable[[str, float], None]


class SearchStopped(Exception):  # noqa: N818  (not an error: what the user asked for)
    """The search was stopped; the engine has some setting that was being tried."""


def search(
    engine: Engine,
    progress: Progress = lambda stage, share: None,
    seconds: float = 20.0,
    stopped: Callable[[], bool] = lambda: False,
) -> Found:
    """Search with ``engine``, which ends with the best setting applied. ``seconds``: no new try begins after that many.

    stopped: asked before each run; true raises SearchStopped. Nothing else may run on the engine meanwhile.
    """
    until = time.perf_counter() + seconds
    engine.apply({option.key: option.default_for(engine.capabilities) for option in OPTIONS})
    timer = _Timer(engine, stopped)
    timer.seconds()  # warms up
    best = dict(engine.options)
    speedup = 1.0
    tries = _tries(engine)
    for index, (key, value) in enumerate(tries):
        if time.perf_counter() > until:
            break
        progress(f"Trying {key}={value}", index / len(tries))
        gain = _gain(engine, timer, {key: best[key]}, {key: value})
        if gain > 1 + NOISE:
            best, speedup = {**best, key: value}, speedup * gain
    engine.apply(best)
    return Found(
        machine=engine.info.machine.name,
        model=engine.info.name,
        measured_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        speedup=speedup,
        values=_named(best),
    )


def _tries(engine: Engine) -> list[tuple[str, str]]:
    """What to try, in order: the switches that leave the text alone, then the weights."""
    tried = [
        option
        for option in OPTIONS
        if option.lossless and option.kind is not Kind.WEIGHTS and option.key not in _NOT_TIMED
    ]
    pairs = [(option, value) for option in tried for value in option.values]
    pairs += [(entry("weights"), value) for value in _ROUNDINGS]
    return [
        (option.key, value)
        for option, value in pairs
        if value != option.default and not option.reason(value, engine.capabilities)
    ]


def _gain(engine: Engine, timer: _Timer, now: Mapping[str, str], other: Mapping[str, str]) -> float:
    """How many times faster ``other`` is than ``now`` in the worst pair; stops at a pair that it loses. Either may be set after."""
    worst = float("inf")
    for _ in range(PAIRS):
        engine.apply(now)
        before = timer.seconds()
        try:
            engine.apply(other)
        except ValueError:  # it needs another switch, or something that is not here
            return 0.0
        worst = min(worst, before / timer.seconds(CUT * before))
        if worst <= 1 + NOISE:
            break
    engine.apply(now)
    return worst


def _named(values: Mapping[str, str]) -> dict[str, str]:
    return {option.key: values[option.key] for option in OPTIONS if values[option.key] != option.default}


class _Timer:
    """Times the work on the engine as it is set now; prompts are random tokens, never the same twice."""

    def __init__(self, engine: Engine, stopped: Callable[[], bool] = lambda: False) -> None:
        self._engine, self._stopped = engine, stopped
        self._random = random.Random(0)

    def seconds(self, limit: float = float("inf")) -> float:
        """Seconds of one run, or infinity when it took longer than ``limit``."""
        if self._stopped():
            raise SearchStopped
        vocabulary = self._engine.info.vocab_size
        prompt = tuple(self._random.randrange(vocabulary) for _ in range(PROMPT_TOKENS))
        started = time.perf_counter()
        try:
            run_once(self._engine, Workload((prompt,), NEW_TOKENS), limit)
        except TooSlow:
            return float("inf")
        return time.perf_counter() - started
