"""What a test may have left behind: running threads, ticking Qt timers."""

from __future__ import annotations

import gc
import threading
import time

GRACE_SECONDS = 3.0


def threads_left(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads started since ``before`` that still run after a short grace."""
    deadline = time.monotonic() + GRACE_SECONDS
    started = [thread for thread in threading.enumerate() if thread not in before]
    # A dummy stands for a thread that Qt or C started; it never leaves the list, so it says nothing.
    started = [thread for thread in started if not isinstance(thread, threading._DummyThread)]
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in started if thread.is_alive()]


def active_timers() -> dict[int, str]:
    """id -> description of every ticking QTimer that Python knows."""
    import shiboken6
    from PySide6.QtCore import QTimer

    found = {}
    for candidate in gc.get_objects():
        if type(candidate) is QTimer and shiboken6.isValid(candidate) and candidate.isActive():
            owner = type(candidate.parent()).__name__
            found[id(candidate)] = f"{candidate.objectName() or 'unnamed'} of {owner}, {candidate.interval()} ms"
    return found


def deliver_deferred_deletes() -> None:
    """Destroy what ``deleteLater`` was called on."""
    from PySide6.QtCore import QCoreApplication, QEvent

    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete.value)
    QCoreApplication.processEvents()
