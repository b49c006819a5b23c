"""The guards of conftest.py catch what they are for."""

from __future__ import annotations

import threading
from pathlib import Path

from PySide6.QtCore import QObject, QTimer
from pytestqt.qtbot import QtBot

from tests import leftovers


def test_a_running_thread_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(leftovers, "GRACE_SECONDS", 0.01)
    before = set(threading.enumerate())
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-over")
    thread.start()
    assert [found.name for found in leftovers.threads_left(before)] == ["left-over"]
    release.set()
    thread.join()
    assert leftovers.threads_left(before) == []


def test_a_ticking_timer_is_noticed(qtbot: QtBot) -> None:
    owner = QObject()
    timer = QTimer(owner)
    timer.setObjectName("refresh")
    assert id(timer) not in leftovers.active_timers()
    timer.start(10_000)
    assert "refresh of QObject" in leftovers.active_timers()[id(timer)]
    timer.stop()
    assert id(timer) not in leftovers.active_timers()


def test_folders_are_the_tests_own(own_folders: Path, monkeypatch) -> None:
    from app.library.starter import models_folder

    assert models_folder().is_relative_to(own_folders)
