"""VerdictLabel: records drive it, it keeps its tense, and it needs no timer."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QTimer

from app.bridge import EngineBridge
from app.tuning.verdict import VerdictLabel
from engine.events import ModelLoadFailed
from engine.params import SamplingParams
from tests.app.scripted_service import Script, ScriptedService


class Bench:
    def __init__(self, qtbot) -> None:
        self.script = Script(reply_tokens=200, step_seconds=0.01)
        self.services: list[ScriptedService] = []
        self.now = 100.0
        self.bridge = EngineBridge(self._make)
        self.label = VerdictLabel(self.bridge, clock=lambda: self.now)
        qtbot.addWidget(self.label)
        self.label.show()

    def _make(self, wake):
        service = ScriptedService(wake, self.script)
        service.clock = self.now
        self.services.append(service)
        return service

    def steps(self, count: int) -> None:
        self.services[-1].advance(count)
        self.now = self.services[-1].clock
        self.bridge._drain()


@pytest.fixture
def bench(qtbot):
    bench = Bench(qtbot)
    bench.bridge.load_model("starter")
    bench.steps(1)
    yield bench
    bench.bridge.shutdown()


def test_says_when_there_is_no_model_or_nothing_measured(qtbot, bench):
    assert VerdictLabelText(qtbot) == "No model loaded"
    assert bench.label.text == "Nothing measured yet"


def VerdictLabelText(qtbot) -> str:  # noqa: N802
    bridge = EngineBridge(lambda wake: ScriptedService(wake))
    label = VerdictLabel(bridge)
    qtbot.addWidget(label)
    return label.text


def test_records_make_the_verdict(bench):
    bench.bridge.submit("hello", SamplingParams())
    bench.steps(100)
    assert bench.label.text.startswith("Decode waits for memory: ")
    assert bench.label.text.endswith(" % of each step")
    assert bench.label.accessibleName() == bench.label.text


def test_overhead_is_named_when_it_rules(bench):
    bench.script.step_seconds = 0.1
    bench.bridge.submit("hello", SamplingParams())
    bench.steps(100)
    assert "on overhead" in bench.label.text


def test_past_tense_when_the_reply_is_done(bench):
    bench.bridge.submit("hello", SamplingParams(max_tokens=50))
    bench.steps(60)
    assert bench.label.text.startswith("Decode waited for memory: ")


def test_text_changes_at_most_twice_a_second(bench):
    bench.bridge.submit("hello", SamplingParams())
    bench.steps(60)
    before = bench.label.text
    bench.script.step_seconds = 0.03
    bench.steps(10)  # 0.3 s
    assert bench.label.text == before
    bench.steps(30)
    assert bench.label.text != before


def test_a_failed_load_says_no_model(bench):
    bench.bridge.model_load_failed.emit(ModelLoadFailed("x", "bad"))
    assert bench.label.text == "No model loaded"


def test_it_has_no_timer_and_paints_when_narrow(bench, qtbot):
    assert bench.label.findChildren(QTimer) == []
    bench.bridge.submit("hello", SamplingParams())
    bench.steps(100)
    bench.label.resize(130, 26)
    assert not bench.label.grab().isNull()


def test_the_number_does_not_move_the_words(bench):
    bench.bridge.submit("hello", SamplingParams())
    bench.steps(100)
    width = bench.label.sizeHint().width()
    bench.script.step_seconds = 0.0101
    bench.steps(200)
    if bench.label.text.startswith("Decode waits for memory"):
        assert bench.label.sizeHint().width() == width
