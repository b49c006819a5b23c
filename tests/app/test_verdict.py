"""VerdictLabel: records drive it, it keeps its tense, and it needs no timer."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QTimer

from app.bridge import EngineBridge
from app.tuning import verdict as verdict_module
from app.tuning.advice import Verdict
from app.tuning.verdict import VerdictLabel
from engine.events import ModelLoadFailed
from engine.params import SamplingParams
from tests.app.scripted_service import Script, ScriptedService
from tests.app.window_parts import make_window


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


def drawn_texts(label, monkeypatch) -> str:
    """What a painting writes."""
    written = []
    monkeypatch.setattr(
        verdict_module, "QFontMetricsF", lambda font, real=verdict_module.QFontMetricsF: _Watched(real(font), written)
    )
    label.grab()
    monkeypatch.undo()
    return "".join(written)


class _Watched:
    def __init__(self, metrics, written) -> None:
        self._metrics, self._written = metrics, written

    def horizontalAdvance(self, text):  # noqa: N802
        return self._metrics.horizontalAdvance(text)

    def elidedText(self, text, mode, width):  # noqa: N802
        self._written.append(self._metrics.elidedText(text, mode, width))
        return self._written[-1]


@pytest.mark.parametrize("limit", ["memory", "overhead"])
def test_where_the_whole_does_not_fit_it_says_less_and_is_not_cut(bench, limit, monkeypatch):
    bench.script.step_seconds = 0.01 if limit == "memory" else 0.1
    bench.bridge.submit("hello", SamplingParams())
    bench.steps(100)
    label = bench.label
    whole = label.text
    widest = label.sizeHint().width()
    shown = []
    for width in [*range(widest, label.minimumSizeHint().width(), -10), label.minimumSizeHint().width()]:
        label.resize(width, 26)
        assert "…" not in drawn_texts(label, monkeypatch)
        assert drawn_texts(label, monkeypatch) == label.shown_text
        if label.shown_text not in shown:
            shown.append(label.shown_text)
    assert shown[0] == whole
    assert shown[1] == (whole.replace(" of each step", ""))
    assert shown[2] == f"{'Memory' if limit == 'memory' else 'Overhead'} {whole.partition('%')[0].split()[-1]} %"
    assert label.toolTip()
    assert label.accessibleName() == whole  # always the whole


def test_at_1280_pixels_with_the_panel_open_no_verdict_is_cut(qtbot, tmp_path, monkeypatch):
    parts = make_window(tmp_path, Script(reply_tokens=200))
    qtbot.addWidget(parts.window)
    parts.window.resize(1280, 800)
    parts.window.show()
    qtbot.waitExposed(parts.window)
    parts.load()
    label = parts.window.findChild(VerdictLabel)
    for limit, lead in (("memory", "Decode waited for memory:"), ("compute", "Prefill waited for arithmetic:")):
        label._verdict = Verdict(lead, 0.9, "of each step", "", limit)
        label.updateGeometry()
        qtbot.wait(20)
        assert "…" not in drawn_texts(label, monkeypatch)
    label._verdict = Verdict("Prefill spends", 0.55, "of each step on overhead", "on overhead", "overhead")
    label.updateGeometry()
    qtbot.wait(20)
    assert label.shown_text in ("Prefill spends 55 % of each step on overhead", "Prefill spends 55 % on overhead")
    assert "…" not in drawn_texts(label, monkeypatch)
    parts.window.close()
