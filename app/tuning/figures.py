"""LiveFigures: what the live panel says, computed from StepRecords. A view-model; knows no Qt.

Definitions (the same everywhere in the app):
- tokens/s: accepted tokens over the seconds of the steps that decoded, the latest 2 s of them. The first token of a
  reply comes out of its prefill and is not counted, nor are the seconds of steps that only prefilled.
- first token: from submit to the first generated token of any kind.
- memory and compute time are predictions (counted bytes / measured bandwidth, counted FLOPs / measured throughput);
  overhead is the measured step minus the larger of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from app.tuning.series import SlidingSums, TimeRing
from engine.events import Finished, ModelInfo, Phase, PoolSnapshot, StepRecord

WINDOW_SECONDS = 2.0
PAUSE_SECONDS = 2.0  # without a step this long, figures are of the past
MAX_MARKS = 32

# channels of the step ring: one lane for steps that only decode, one for those that prefill (mixed ones included)
TOKENS, DECODING = 0, 1
DECODE_LANE, PREFILL_LANE = 2, 7
STEPS, STEP, MEMORY, COMPUTE, OVERHEAD = range(5)  # within a lane
NUM_STEP_CHANNELS = 12
# channels of the page ring
USED, SHARED, CACHED, STRANDED, TOTAL = range(5)
NUM_PAGE_CHANNELS = 5


@dataclass(frozen=True, slots=True)
class Mark:
    """A flipped switch in the time plots."""

    time: float
    name: str


@dataclass(frozen=True, slots=True)
class PhaseMeans:
    """One phase's mean step in the window. Seconds; memory, weights, kv and compute are predicted, step is measured."""

    num_steps: int
    step: float
    memory: float
    compute: float
    overhead: float
    weights: float
    kv_read: float
    batch: float

    @property
    def memory_share(self) -> float:
        return min(1.0, self.memory / self.step) if self.step > 0 else 0.0

    @property
    def compute_share(self) -> float:
        return min(1.0, self.compute / self.step) if self.step > 0 else 0.0

    @property
    def overhead_share(self) -> float:
        return min(1.0, self.overhead / self.step) if self.step > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Now:
    """The figures at one moment. None where nothing was measured yet; is_past when nothing runs any more."""

    is_past: bool
    tokens_per_second: float | None
    first_token_seconds: float | None
    batch: int
    waiting: int
    bandwidth_share: float | None
    context_tokens: int | None
    pool: PoolSnapshot | None
    acceptance: float | None = None  # share of the compared drafts that were right; None when there were none


class LiveFigures:
    """Folds StepRecords into rings (for the plots) and windows (for the numbers)."""

    def __init__(self) -> None:
        self.steps = TimeRing(NUM_STEP_CHANNELS)
        self.pages = TimeRing(NUM_PAGE_CHANNELS)
        self.marks: list[Mark] = []
        self.info: ModelInfo | None = None
        self.last: StepRecord | None = None
        self.first_token_seconds: float | None = None
        self._submitted: dict[int, float] = {}
        self._generating: set[int] = set()
        self._rate = SlidingSums(WINDOW_SECONDS, 2)
        self._drafts = SlidingSums(WINDOW_SECONDS, 3)  # seconds, compared, accepted
        # seconds, steps, memory, compute, overhead, weights, kv_read, batch
        self._decode = SlidingSums(WINDOW_SECONDS, 8)
        self._prefill = SlidingSums(WINDOW_SECONDS, 8)
        self._last_phase = Phase.DECODE

    # ---- what comes in

    def on_model(self, info: ModelInfo | None) -> None:
        """Another model (or none): its figures start from nothing."""
        self.info = info
        self.last = None
        self.first_token_seconds = None
        self._forget()
        self._generating.clear()
        self.pages.clear()

    def on_switched(self, time: float, names: Iterable[str], info: ModelInfo | None) -> None:
        """Switches took effect: mark the plots, and do not mix steps from before with those after."""
        self.marks = [*self.marks, *(Mark(time, name) for name in names)][-MAX_MARKS:]
        self.info = info or self.info
        self._forget()

    def on_submitted(self, request_id: int, time: float) -> None:
        self._submitted[request_id] = time

    def on_finished(self, finished: Finished) -> None:
        self._submitted.pop(finished.request_id, None)
        self._generating.discard(finished.request_id)
        if finished.usage.first_token_seconds is not None:
            self.first_token_seconds = finished.usage.first_token_seconds

    def fold(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            self._fold(record)

    def _forget(self) -> None:
        for window in (self._rate, self._drafts, self._decode, self._prefill):
            window.clear()

    def _fold(self, record: StepRecord) -> None:
        if self.last is not None and record.ended_at - record.step_seconds - self.last.ended_at > PAUSE_SECONDS:
            self._forget()  # a new burst of work; the one before says nothing about it
        self.last = record
        tokens = self._decoded_tokens(record)
        step, decodes = record.step_seconds, record.phase is not Phase.PREFILL
        values = [0.0] * NUM_STEP_CHANNELS
        if decodes:
            values[TOKENS], values[DECODING] = tokens, step
            self._rate.add((step, tokens))
            self._drafts.add((step, float(record.num_drafted), float(record.num_accepted)))
        lane = DECODE_LANE if record.phase is Phase.DECODE else PREFILL_LANE
        overhead = record.overhead_seconds
        values[lane : lane + 5] = (1.0, step, record.memory_seconds, record.compute_seconds, overhead)
        self.steps.add(record.ended_at - step, record.ended_at, values)
        cost, total = record.cost, max(1, record.cost.total_bytes)
        per_byte = record.memory_seconds / total
        row = (
            *(step, 1.0, record.memory_seconds, record.compute_seconds, overhead),
            *(cost.weight_bytes * per_byte, cost.kv_read_bytes * per_byte, float(record.batch)),
        )
        (self._decode if record.phase is Phase.DECODE else self._prefill).add(row)
        self._last_phase = record.phase
        pool = record.pool
        self.pages.put(record.ended_at, (pool.used, pool.shared, pool.cached, pool.stranded, pool.total))

    def _decoded_tokens(self, record: StepRecord) -> float:
        """Tokens this step gained, without the first one of each reply."""
        tokens = 0
        for progress in record.requests:
            if progress.num_new <= 0:
                continue
            tokens += progress.num_new
            if progress.request_id not in self._generating:
                self._generating.add(progress.request_id)
                tokens -= 1
                submitted = self._submitted.get(progress.request_id)
                if submitted is not None:
                    self.first_token_seconds = max(0.0, record.ended_at - submitted)
        return float(tokens)

    # ---- what goes out

    def now(self, time: float) -> Now:
        last = self.last
        if last is None:
            return Now(True, None, self.first_token_seconds, 0, 0, None, None, None)
        is_past = self.is_past(time)
        seconds, tokens = self._rate.sums()
        _, drafted, accepted = self._drafts.sums()
        means = self.means(Phase.DECODE) or self.means(Phase.PREFILL)
        context = max((progress.context_tokens for progress in last.requests), default=None)
        return Now(
            is_past=is_past,
            tokens_per_second=tokens / seconds if seconds > 0 and tokens > 0 else None,
            first_token_seconds=self.first_token_seconds,
            batch=0 if is_past else last.batch,
            waiting=0 if is_past else last.waiting,
            bandwidth_share=means.memory / means.step if means and means.step > 0 else None,
            context_tokens=context,
            pool=last.pool,
            acceptance=accepted / drafted if drafted > 0 else None,
        )

    def is_past(self, time: float) -> bool:
        return self.last is None or time - self.last.ended_at > max(PAUSE_SECONDS, 3 * self.last.step_seconds)

    def means(self, phase: Phase) -> PhaseMeans | None:
        """Mean step of DECODE steps, or (any other ``phase``) of those that prefill; None when there was none."""
        window = self._decode if phase is Phase.DECODE else self._prefill
        seconds, steps, memory, compute, overhead, weights, kv_read, batch = window.sums()
        if len(window) == 0 or seconds <= 0:
            return None
        n = max(1.0, steps)
        return PhaseMeans(
            round(n), seconds / n, memory / n, compute / n, overhead / n, weights / n, kv_read / n, batch / n
        )

    def spoken_phase(self) -> Phase | None:
        """The phase the words should be about: decode when there was any, else prefill; None when nothing ran."""
        if self.means(Phase.DECODE) is not None:
            return Phase.DECODE
        return Phase.PREFILL if self.means(Phase.PREFILL) is not None else None

    def active_paths(self) -> Mapping[str, str]:
        if self.last is not None:
            return self.last.active_paths
        return self.info.active_paths if self.info else {}
