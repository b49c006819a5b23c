"""Refresher: the panel's one timer. Its rate follows what a refresh costs; it stands still while hidden or idle."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from PySide6.QtCore import QObject, Qt, QTimer, Signal

from app.tuning.pace import Meter, Pace

IDLE_SECONDS = 2.5  # after the last sign of work


class Refresher(QObject):
    """Calls ``refresh(now)`` while the panel is shown and work goes on.

    Signals:
        refreshed: after each refresh; the panel's share of one core, 0 to 1.
        fell_idle: the timer stopped because nothing happens.
    """

    refreshed = Signal(float)
    fell_idle = Signal()

    def __init__(
        self,
        refresh: Callable[[float], None],
        meter: Meter,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.perf_counter,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self.pace = pace or Pace()
        self.num_refreshes = 0
        self._refresh, self._meter, self._clock = refresh, meter, clock
        self._last_work = -math.inf
        self._is_shown = False
        self._timer = QTimer(self)
        self._timer.setObjectName("tuning.refresh")
        self._timer.setTimerType(Qt.TimerType.CoarseTimer)
        self._timer.timeout.connect(self._on_timeout)

    @property
    def is_running(self) -> bool:
        return self._timer.isActive()

    @property
    def interval_milliseconds(self) -> int:
        return self._timer.interval()

    def note_work(self) -> None:
        """Something happened that the panel shows."""
        self._last_work = self._clock()
        if self._is_shown and not self._timer.isActive():
            self._timer.start(self.pace.interval_milliseconds)

    def set_shown(self, shown: bool) -> None:
        """Only a visible panel refreshes; one that appears does so at once."""
        self._is_shown = shown
        if not shown:
            self._timer.stop()
            return
        self.refresh_now()
        if self._clock() - self._last_work < IDLE_SECONDS:
            self._timer.start(self.pace.interval_milliseconds)

    def refresh_now(self) -> None:
        """One refresh outside the beat."""
        if not self._is_shown:
            return
        self.num_refreshes += 1
        with self._meter:
            self._refresh(self._clock())

    def _on_timeout(self) -> None:
        # what the last refresh cost, its painting included, is known only now
        self.pace.note(self._meter.take())
        self.refresh_now()
        self.refreshed.emit(self._meter.share_of_core())
        if self._clock() - self._last_work >= IDLE_SECONDS:
            self._timer.stop()
            self.fell_idle.emit()
            return
        interval = self.pace.interval_milliseconds
        if abs(interval - self._timer.interval()) > 0.1 * self._timer.interval():
            self._timer.setInterval(interval)
