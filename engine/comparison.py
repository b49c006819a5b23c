"""Two settings measured against each other: the same work, in turns, from a fresh state, so that noise hits both alike.

One round runs the workload once on each side, in an order that alternates; before each run the prefix index is emptied.
The first round only warms up and is dropped. What is reported is the median and the spread of the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.commands import Prompt
from engine.events import Event, Finished, FinishReason, StepRecord
from engine.params import SamplingParams

NOISE = 0.05  # differences below this share are not called differences


@dataclass(frozen=True, slots=True)
class Workload:
    """What one run does: all ``prompts`` at once, ``new_tokens`` of reply each, whatever the model would rather say.

    before: prompts answered by one token first, unmeasured (an earlier turn of the same chat).
    """

    prompts: tuple[Prompt, ...]
    new_tokens: int
    before: tuple[Prompt, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. tokens_per_second: tokens after the first one of all chats, over the seconds since that first one.

    first_token_seconds: median over the chats. The other figures are per token after the first: bytes and FLOPs by the
    ledger, seconds of memory and arithmetic they take on this machine, and the clock's. kv_bytes: pages held at the peak.
    """

    tokens_per_second: float
    first_token_seconds: float
    bytes_per_token: float
    flops_per_token: float
    memory_seconds: float
    compute_seconds: float
    step_seconds: float
    kv_bytes: int
    recomputed_tokens: int
    cached_tokens: int

    @property
    def overhead_seconds(self) -> float:
        return max(0.0, self.step_seconds - max(self.memory_seconds, self.compute_seconds))


class Spread(NamedTuple):
    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


class Runs(Protocol):
    """What a comparison asks of an Engine."""

    def forget(self) -> None: ...

    def submit(self, prompt: Prompt, params: SamplingParams) -> int: ...

    def abort(self, request_id: int) -> None: ...

    def step(self) -> list[Event]: ...

    @property
    def has_work(self) -> bool: ...


class TooSlow(Exception):  # noqa: N818  (not an error: a run was cut short as asked)
    """A run took longer than its limit and was stopped."""


def run_once(engine: Runs, workload: Workload, limit_seconds: float = float("inf")) -> Sample:
    """One run from a fresh state. Raises ValueError when a request fails, TooSlow beyond ``limit_seconds``."""
    engine.forget()
    if workload.before:
        _drive(engine, workload.before, 1, float("inf"))
    records, endings = _drive(engine, workload.prompts, workload.new_tokens, time.perf_counter() + limit_seconds)
    firsts = [end.usage.first_token_seconds or 0.0 for end in endings]
    first = next((index for index, record in enumerate(records) if record.num_new_tokens), len(records) - 1)
    after = records[first + 1 :]
    num_new = sum(record.num_new_tokens for record in after)

    def per_token(total: float) -> float:
        return total / num_new if num_new else 0.0

    elapsed = records[-1].ended_at - records[first].ended_at
    return Sample(
        tokens_per_second=num_new / elapsed if num_new and elapsed > 0 else 0.0,
        first_token_seconds=statistics.median(firsts),
        bytes_per_token=per_token(sum(record.cost.total_bytes for record in after)),
        flops_per_token=per_token(sum(record.cost.total_flops for record in after)),
        memory_seconds=per_token(sum(record.memory_seconds for record in after)),
        compute_seconds=per_token(sum(record.compute_seconds for record in after)),
        step_seconds=per_token(sum(record.step_seconds for record in after)),
        kv_bytes=max((record.pool.used * record.pool.page_bytes for record in records), default=0),
        recomputed_tokens=sum(end.usage.recomputed_tokens for end in endings),
        cached_tokens=sum(end.usage.cached_tokens for end in endings),
    )


def _drive(
    engine: Runs, prompts: Sequence[Prompt], new_tokens: int, until: float
) -> tuple[list[StepRecord], list[Finished]]:
    """Every step of answering all prompts, and how each ended, in order of ending."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    waiting = {engine.submit(prompt, params) for prompt in prompts}
    records: list[StepRecord] = []
    endings: list[Finished] = []
    while waiting:
        if time.perf_counter() > until:
            _stop(engine, waiting)
            raise TooSlow
        for event in engine.step():
            if isinstance(event, StepRecord):
                records.append(event)
            elif isinstance(event, Finished) and event.request_id in waiting:
                waiting.discard(event.request_id)
                endings.append(event)
    failed = [end.message for end in endings if end.reason is FinishReason.ERROR]
    if failed:
        raise ValueError(failed[0])
    return records, endings


def _stop(engine: Runs, requests: set[int]) -> None:
    for request in requests:
        engine.abort(request)
    while engine.has_work:
        engine.step()


@dataclass(slots=True)
class Measured:
    """One side's samples, in order of their rounds (the warm-up is not among them)."""

    samples: list[Sample] = field(default_factory=list)

    def spread(self, figure: str) -> Spread:
        return Spread.of([getattr(sample, figure) for sample in self.samples])

    def median(self, figure: str) -> float:
        return self.spread(figure).median


def compare(
    first: Callable[[], Runs],
    second: Callable[[], Runs],
    workload: Workload,
    rounds: int,
    progress: Callable[[float], None] = lambda share: None,
    seconds: float = float("inf"),
) -> tuple[Measured, Measured]:
    """``rounds`` measured rounds after one that warms up, fewer when ``seconds`` are over, but at least one.

    ``first`` and ``second`` hand out the engine of their side.
    """
    until = time.perf_counter() + seconds
    sides = (first, second)
    measured = (Measured(), Measured())
    for index in range(rounds + 1):
        if index > 1 and time.perf_counter() > until:
            break
        progress(index / (rounds + 1))
        for side in (0, 1) if index % 2 == 0 else (1, 0):
            sample = run_once(sides[side](), workload)
            if index:
                measured[side].samples.append(sample)
    return measured


def acts_on(a: Measured, b: Measured) -> str:
    """In plain words: which side of the ridge point the difference between A and B acts on, and who is faster.

    The ledger's counts decide before the clock does: other machines would see the same bytes and the same arithmetic.
    """
    moved, computed = (_times(a, b, f"{figure}_per_token") for figure in ("bytes", "flops"))
    if max(moved, computed) > 1 + NOISE:
        words = [_side_sentence(a, b, is_memory=moved >= computed)]
        words += [_overhead(a, b)] if _overhead_dominates(a, b) else []
    elif _times(a, b, "first_token_seconds") > 1 + 2 * NOISE:
        words = [_first_token(a, b)]
    elif abs(_gain(a, b, "overhead")) > NOISE * a.median("step_seconds"):
        words = [f"Both move the same bytes and compute the same. {_overhead(a, b)}"]
    else:
        words = ["For this work the two settings move the same bytes and do the same arithmetic in the same time."]
    return " ".join([*words, f"While writing, A is {_bound(a)} and B is {_bound(b)}.", _verdict(a, b)]).strip()


def _times(a: Measured, b: Measured, figure: str) -> float:
    """How many times the smaller figure the larger is; 1 when one of them is nothing."""
    less, more = sorted((a.median(figure), b.median(figure)))
    return more / less if less > 0 else 1.0


def _gain(a: Measured, b: Measured, part: str) -> float:
    return a.median(f"{part}_seconds") - b.median(f"{part}_seconds")


def _side_sentence(a: Measured, b: Measured, is_memory: bool) -> str:
    part, figure = ("memory", "bytes_per_token") if is_memory else ("compute", "flops_per_token")
    name = "B" if b.median(figure) > a.median(figure) else "A"
    what = "moves {:.2g} times the bytes per token" if is_memory else "computes {:.2g} times the operations per token"
    before, after = (1e3 * side.median(f"{part}_seconds") for side in (a, b))
    return (
        f"{name} {what.format(_times(a, b, figure))}: the difference acts on the {part} side of the ridge point "
        f"({before:.2g} ms per token with A, {after:.2g} with B)."
    )


def _overhead_dominates(a: Measured, b: Measured) -> bool:
    return abs(_gain(a, b, "overhead")) > max(abs(_gain(a, b, "memory")), abs(_gain(a, b, "compute")))


def _overhead(a: Measured, b: Measured) -> str:
    before, after = (1e3 * side.median("overhead_seconds") for side in (a, b))
    return (
        f"By the clock most of the difference is overhead, on neither side: {before:.2g} ms with A, {after:.2g} with B."
    )


def _first_token(a: Measured, b: Measured) -> str:
    sooner = "B" if b.median("first_token_seconds") < a.median("first_token_seconds") else "A"
    times = _times(a, b, "first_token_seconds")
    return (
        "The difference is in reading the prompt, on the compute side of the ridge point: "
        f"{sooner} gives its first token {times:.1f} times sooner."
    )


def _verdict(a: Measured, b: Measured) -> str:
    before, after = a.median("tokens_per_second"), b.median("tokens_per_second")
    ratio = after / before if before > 0 else 1.0
    if abs(ratio - 1) < NOISE:
        return "Both write equally fast, within the noise."
    return (
        f"B writes {ratio:.2f} times as fast as A." if ratio > 1 else f"B is slower: {ratio:.2f} times the speed of A."
    )


def _bound(side: Measured) -> str:
    parts = {name: side.median(f"{name}_seconds") for name in ("memory", "compute", "overhead")}
    return f"{max(parts, key=lambda name: parts[name])}-bound"
