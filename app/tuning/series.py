"""Ring buffers for the live plots: preallocated float64, one column per slice of time. Knows no Qt.

Two kinds of channel: what happens *during* a span of time is added and spread over the slices it covers (`add`);
what *is* the case from a moment on is put and holds until the next value (`put`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BUCKET_SECONDS = 0.125
NUM_BUCKETS = 1024  # 128 s: twice the plotted minute, so that merging and scrolling never run out


class TimeRing:
    """``num_channels`` sums (or held values) per slice of ``bucket_seconds``, the latest ``num_buckets`` of them.

    Times are seconds of any steady clock (time.perf_counter). Nothing is allocated after construction but the arrays
    that `window` hands out. What is older than the ring is forgotten; what is added there is ignored.
    """

    def __init__(
        self, num_channels: int, bucket_seconds: float = BUCKET_SECONDS, num_buckets: int = NUM_BUCKETS
    ) -> None:
        assert num_channels > 0 and bucket_seconds > 0 and num_buckets > 0
        self.bucket_seconds = bucket_seconds
        self._num_buckets = num_buckets
        self._data: Floats = np.zeros((num_channels, num_buckets), dtype=np.float64)
        self._newest: int | None = None  # absolute number of the newest bucket

    def bucket_of(self, time: float) -> int:
        return math.floor(time / self.bucket_seconds)

    def clear(self) -> None:
        self._data[:] = 0.0
        self._newest = None

    def add(self, start: float, end: float, values: Sequence[float]) -> None:
        """Spread ``values`` (one per channel) evenly over [start, end]."""
        last = self.bucket_of(end)
        self._advance(last, held=False)
        first = min(self.bucket_of(start), last)
        amount = np.asarray(values, dtype=np.float64)
        if first == last:
            self._put_in(last, amount)
            return
        for bucket in range(max(first, self._oldest()), last + 1):
            begin = max(start, bucket * self.bucket_seconds)
            covered = min(end, (bucket + 1) * self.bucket_seconds) - begin
            self._put_in(bucket, amount * (max(0.0, covered) / (end - start)))

    def put(self, time: float, values: Sequence[float]) -> None:
        """From ``time`` on the channels have ``values``; slices in between keep the values before."""
        bucket = self.bucket_of(time)
        self._advance(bucket, held=True)
        if bucket >= self._oldest():
            self._data[:, bucket % self._num_buckets] = values

    def window(self, last: int, count: int, hold: bool = False) -> Floats:
        """[channels, count] of the buckets up to number ``last``; NaN where the ring has nothing (yet, or any more).

        hold: buckets after the newest carry its values instead.
        """
        numbers = np.arange(last - count + 1, last + 1)
        if self._newest is None:
            return np.full((self._data.shape[0], count), np.nan)
        if hold:
            numbers = np.minimum(numbers, self._newest)
        found = self._data[:, numbers % self._num_buckets]
        outside = (numbers > self._newest) | (numbers < self._oldest())
        found[:, outside] = np.nan
        return found

    def _oldest(self) -> int:
        assert self._newest is not None
        return self._newest - self._num_buckets + 1

    def _put_in(self, bucket: int, amount: Floats) -> None:
        if bucket >= self._oldest():
            self._data[:, bucket % self._num_buckets] += amount

    def _advance(self, bucket: int, held: bool) -> None:
        """Make ``bucket`` the newest, with the ones before it empty (or holding the last values)."""
        if self._newest is None:
            self._newest = bucket
            self._data[:] = np.nan if held else 0.0
            return
        steps = min(bucket - self._newest, self._num_buckets)
        if steps <= 0:
            return
        fill = self._data[:, self._newest % self._num_buckets].copy() if held else None
        for number in range(bucket - steps + 1, bucket + 1):
            self._data[:, number % self._num_buckets] = 0.0 if fill is None else fill
        self._newest = bucket


class SlidingSums:
    """Sums of the latest rows whose first number (seconds) adds up to at most ``seconds``.

    The window is one of *working* time: pauses between rows do not thin it out. `clear` it where rows must not mix.
    """

    def __init__(self, seconds: float, num_values: int) -> None:
        self._seconds = seconds
        self._rows: list[tuple[float, ...]] = []
        self._first = 0  # rows before it have left the window
        self._sums = [0.0] * num_values

    def __len__(self) -> int:
        return len(self._rows) - self._first

    def add(self, row: tuple[float, ...]) -> None:
        assert len(row) == len(self._sums)
        self._rows.append(row)
        for i, value in enumerate(row):
            self._sums[i] += value
        while len(self) > 1 and self._sums[0] > self._seconds:
            for i, value in enumerate(self._rows[self._first]):
                self._sums[i] -= value
            self._first += 1
        if self._first > 1000:
            del self._rows[: self._first]
            self._first = 0

    def sums(self) -> tuple[float, ...]:
        return tuple(self._sums)

    def clear(self) -> None:
        self._rows.clear()
        self._first = 0
        self._sums = [0.0] * len(self._sums)


class Scale:
    """The top of a value axis: a round number that grows when it must and shrinks when it may, at most once a second."""

    STEPS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
    SHRINK_BELOW = 0.45  # of the top: anything fuller stays as it is

    def __init__(self, smallest: float = 1.0) -> None:
        self.top = smallest
        self._smallest = smallest
        self._changed_at = -math.inf

    def fit(self, largest: float, now: float) -> bool:
        """Adapt to the ``largest`` value in view; True when ``top`` changed."""
        if not math.isfinite(largest) or now - self._changed_at < 1.0:
            return False
        if self.SHRINK_BELOW * self.top <= largest <= self.top:
            return False
        top = max(self._smallest, self.rounded(largest))
        if top == self.top:
            return False
        self.top, self._changed_at = top, now
        return True

    @classmethod
    def rounded(cls, value: float) -> float:
        """The smallest round number that leaves a little air above ``value``."""
        if value <= 0:
            return 0.0
        wanted = value * 1.05
        power = 10.0 ** math.floor(math.log10(wanted))
        return next(step * power for step in (*cls.STEPS, 20.0) if step * power >= wanted * (1 - 1e-9))
