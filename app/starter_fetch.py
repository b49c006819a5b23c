"""Fetching the starter model on a thread of its own, with progress on the GUI thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.library.starter import fetch_starter

# (folder, progress, cancelled) -> path, as app.library.starter.fetch_starter
Fetch = Callable[[Path | None, Callable[[str, float], None], Callable[[], bool]], Path]


class StarterFetch(QObject):
    """One fetch at a time.

    Signals:
        progressed: stage in plain words, fraction 0 to 1.
        fetched: the model is on disk.
        failed: why not, and what to do; empty when it was cancelled.
    """

    progressed = Signal(str, float)
    fetched = Signal()
    failed = Signal(str)

    def __init__(self, fetch: Fetch = fetch_starter, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._fetch = fetch
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        if self.is_running:
            return
        self._cancelled.clear()
        self._thread = threading.Thread(target=self._run, name="ridgeline-starter-fetch", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self, timeout_seconds: float = 3.0) -> bool:
        """Cancel and wait; whether the thread ended."""
        self.cancel()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return not self.is_running

    def _run(self) -> None:
        """On the fetching thread; signals cross to the GUI thread by themselves."""
        try:
            self._fetch(None, self.progressed.emit, self._cancelled.is_set)
        except (ValueError, OSError) as error:
            self.failed.emit("" if self._cancelled.is_set() else str(error))
        else:
            self.fetched.emit()
