"""Ctrl+C in the terminal and a polite kill close the window as its own button would."""

from __future__ import annotations

import signal
import socket

from PySide6.QtCore import QObject, QSocketNotifier
from PySide6.QtWidgets import QWidget


class ClosesOnSignals(QObject):
    """Wakes Qt's loop when a signal comes, so that Python's handler runs at once and not with the next mouse move.

    Lives as long as ``window``; `close` gives the signals back.
    """

    def __init__(self, window: QWidget) -> None:
        super().__init__(window)
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self._before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
        signal.set_wakeup_fd(self._theirs.fileno())
        self._notifier = QSocketNotifier(self._ours.fileno(), QSocketNotifier.Type.Read, self)
        self._notifier.activated.connect(self._on_woken)
        for kind in self._before:
            signal.signal(kind, lambda _kind, _frame: window.close())

    def _on_woken(self) -> None:
        """Reading is enough: entering Python code is what lets the handler run."""
        self._ours.recv(64)

    def close(self) -> None:
        self._notifier.setEnabled(False)
        signal.set_wakeup_fd(-1)
        for kind, handler in self._before.items():
            signal.signal(kind, handler)
        self._ours.close()
        self._theirs.close()
