"""How often the panel may refresh, and what it costs. Knows no Qt.

A panel that takes time from the decoder slows down what it displays: an evenly split two-thread product waits for its
slower half. So the rate follows the measured cost of a refresh.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

FASTEST_HZ = 30.0
USUAL_LOWEST_HZ = 5.0
LOWEST_HZ = 2.0  # when even 5 Hz would cost too much
BUDGET = 0.01  # share of the whole machine the panel aims for; half of the 2 % it may never exceed
SHARE_SECONDS = 5.0


def thread_clock() -> Callable[[], float]:
    """Processor seconds of this thread; on Windows, whose thread times tick in 15.6 ms, the plain clock."""
    return time.perf_counter if sys.platform == "win32" else time.thread_time


class Meter:
    """Adds up the processor time of the sections it guards (``with meter:``), nested ones once."""

    def __init__(
        self, cpu_clock: Callable[[], float] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._cpu_clock = cpu_clock or thread_clock()
        self._clock = clock
        self._depth = 0
        self._entered = 0.0
        self._pending = 0.0  # since the last `take`
        self._spent: deque[tuple[float, float]] = deque()  # (when, seconds)

    def __enter__(self) -> Meter:
        if self._depth == 0:
            self._entered = self._cpu_clock()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._pending += self._cpu_clock() - self._entered

    def take(self) -> float:
        """Processor seconds since the last call."""
        spent, self._pending = self._pending, 0.0
        self._spent.append((self._clock(), spent))
        self._drop_old()
        return spent

    def share_of_core(self) -> float:
        """What the sections took of one core over the latest five seconds, 0 to 1."""
        self._drop_old()
        return sum(seconds for _, seconds in self._spent) / SHARE_SECONDS

    def _drop_old(self) -> None:
        horizon = self._clock() - SHARE_SECONDS
        while self._spent and self._spent[0][0] < horizon:
            self._spent.popleft()


class Pace:
    """The interval between refreshes: as fast as the eye allows, as slowly as the budget asks."""

    def __init__(self, num_cores: int | None = None, budget: float = BUDGET) -> None:
        self._core_seconds_per_second = budget * (num_cores or os.cpu_count() or 1)
        self._cost = 0.0
        self.useful_hz = FASTEST_HZ  # no faster than the plots move by a pixel

    def note(self, cost_seconds: float) -> None:
        """A refresh took ``cost_seconds`` of processor time. The rate falls faster than it recovers."""
        weight = 0.3 if cost_seconds > self._cost else 0.15
        self._cost += weight * (cost_seconds - self._cost)

    @property
    def hz(self) -> float:
        affordable = self._core_seconds_per_second / self._cost if self._cost > 0 else FASTEST_HZ
        wanted = min(FASTEST_HZ, max(USUAL_LOWEST_HZ, self.useful_hz))
        return max(LOWEST_HZ, min(wanted, affordable))

    @property
    def interval_milliseconds(self) -> int:
        return round(1000 / self.hz)
