"""EngineBridge over the real EngineService: the two agree on the interface, and nothing is left behind."""

from __future__ import annotations

import threading

from app.bridge import EngineBridge
from engine.events import FinishReason
from engine.params import SamplingParams
from engine.service import EngineService


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ridgeline-engine"]


def test_a_missing_model_fails_with_words_and_the_engine_lives_on(qtbot, tmp_path):
    bridge = EngineBridge(lambda wake: EngineService(wake))
    failed, finished = [], []
    bridge.model_load_failed.connect(failed.append)
    bridge.generation_finished.connect(finished.append)
    bridge.load_model(str(tmp_path / "nothing-here.gguf"))
    qtbot.waitUntil(lambda: bool(failed), timeout=30_000)
    assert "nothing-here.gguf" in failed[0].message
    request = bridge.submit("hello", SamplingParams())
    qtbot.waitUntil(lambda: bool(finished), timeout=10_000)
    assert (finished[0].request_id, finished[0].reason) == (request, FinishReason.ERROR)
    assert not bridge.is_busy
    qtbot.waitUntil(lambda: not bridge.is_draining, timeout=3_000)
    assert bridge.shutdown()
    assert engine_threads() == []


def test_shutdown_at_once_leaves_no_thread(qtbot, tmp_path):
    bridge = EngineBridge(lambda wake: EngineService(wake))
    bridge.load_model(str(tmp_path / "nothing-here.gguf"))
    assert bridge.shutdown()
    assert engine_threads() == []
