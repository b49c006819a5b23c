"""EngineBridge: order and batching of facts, one timer, death and shutdown."""

from __future__ import annotations

import threading

import pytest
from PySide6.QtCore import QTimer

from app.bridge import EngineBridge
from engine.commands import LoadModel, Message, SetOptions
from engine.events import FinishReason
from engine.params import SamplingParams
from tests.app.scripted_service import Script, ScriptedService


class Log:
    """Every signal of a bridge in the order it came."""

    NAMES = (
        "tokens_arrived",
        "generation_finished",
        "steps_recorded",
        "pages_mapped",
        "model_loading",
        "model_loaded",
        "model_load_failed",
        "options_applied",
        "options_refused",
        "context_measured",
        "engine_failed",
    )

    def __init__(self, bridge: EngineBridge) -> None:
        self.entries: list[tuple[str, object]] = []
        for name in self.NAMES:
            getattr(bridge, name).connect(lambda value, name=name: self.entries.append((name, value)))

    def of(self, name: str) -> list:
        return [value for key, value in self.entries if key == name]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.entries]


class Bench:
    """A bridge over a stepwise scripted service; ``services`` lists all it ever made."""

    def __init__(self, script: Script | None = None, threaded: bool = False) -> None:
        self.services: list[ScriptedService] = []
        self.script, self.threaded = script or Script(), threaded
        self.bridge = EngineBridge(self._make)
        self.log = Log(self.bridge)

    def _make(self, wake):
        service = ScriptedService(wake, self.script, self.threaded)
        self.services.append(service)
        return service

    @property
    def service(self) -> ScriptedService:
        return self.services[-1]


@pytest.fixture
def bench(qtbot):
    bench = Bench()
    yield bench
    bench.bridge.shutdown()


@pytest.fixture
def threaded(qtbot):
    bench = Bench(Script(step_seconds=0.002), threaded=True)
    yield bench
    assert bench.bridge.shutdown()


def loaded(bench: Bench, qtbot) -> Bench:
    bench.bridge.load_model("starter", {"weights": "int8"})
    bench.service.run()
    qtbot.waitUntil(lambda: bool(bench.log.of("model_loaded")))
    bench.log.entries.clear()
    return bench


def test_no_service_before_the_first_command(bench):
    assert bench.services == []
    bench.bridge.load_model("starter")
    assert bench.service.posted == [LoadModel("starter", {})]


def test_loading_is_told_with_settings(bench, qtbot):
    bench.bridge.load_model("starter", {"weights": "int8"})
    assert bench.bridge.is_busy
    bench.service.run()
    qtbot.waitUntil(lambda: bool(bench.log.of("model_loaded")))
    assert bench.log.of("model_loaded")[0].options["weights"] == "int8"
    assert not bench.bridge.is_busy


def test_deltas_come_in_one_signal_before_their_finished(bench, qtbot):
    loaded(bench, qtbot)
    ids = [bench.bridge.submit("hello there", SamplingParams(max_tokens=n)) for n in (3, 5)]
    bench.service.run()
    qtbot.waitUntil(lambda: len(bench.log.of("generation_finished")) == 2)
    assert bench.log.names == ["tokens_arrived", "steps_recorded", "generation_finished", "generation_finished"]
    deltas = bench.log.of("tokens_arrived")[0]
    assert [delta.request_id for delta in deltas].count(ids[0]) == 3
    assert [delta.request_id for delta in deltas].count(ids[1]) == 5
    assert len(bench.log.of("steps_recorded")[0]) == 5


def test_request_ids_differ_and_the_text_is_whole(bench, qtbot):
    loaded(bench, qtbot)
    first = bench.bridge.submit("a", SamplingParams())
    second = bench.bridge.submit("b", SamplingParams())
    assert first != second
    bench.service.run()
    qtbot.waitUntil(lambda: not bench.bridge.is_busy)
    text = "".join(d.text for batch in bench.log.of("tokens_arrived") for d in batch if d.request_id == first)
    assert text == bench.script.replies[0]


def test_a_new_model_splits_the_drain(bench, qtbot):
    """What the old model said must not arrive after the news of the new one, nor the other way round."""
    loaded(bench, qtbot)
    bench.bridge.submit("old", SamplingParams())
    bench.service.advance(2)
    bench.bridge.load_model("other")
    new = bench.bridge.submit("new", SamplingParams())
    bench.service.advance(2)
    qtbot.waitUntil(lambda: len(bench.log.of("tokens_arrived")) == 2)
    order = [name for name in bench.log.names if name in ("tokens_arrived", "model_loaded")]
    assert order == ["tokens_arrived", "model_loaded", "tokens_arrived"]
    assert {delta.request_id for delta in bench.log.of("tokens_arrived")[1]} == {new}


def test_only_the_latest_map_and_progress_of_a_drain(bench, qtbot):
    loaded(bench, qtbot)
    bench.bridge.watch_pages(1000.0)
    bench.bridge.submit("a b c", SamplingParams())
    bench.service.advance(6)
    qtbot.waitUntil(lambda: bool(bench.log.of("pages_mapped")))
    assert len(bench.log.of("pages_mapped")) == 1


def test_progress_never_comes_after_the_end(bench, qtbot):
    loaded(bench, qtbot)
    bench.bridge.set_options({"weights": "int4"})
    bench.bridge.load_model("other")
    bench.service.run()
    qtbot.waitUntil(lambda: bool(bench.log.of("model_loaded")))
    assert bench.log.names == ["model_loading", "options_applied", "model_loaded"]


def test_timer_runs_only_while_events_flow(bench, qtbot):
    loaded(bench, qtbot)
    qtbot.waitUntil(lambda: not bench.bridge.is_draining)
    bench.bridge.submit("a", SamplingParams())
    bench.service.run()
    qtbot.waitUntil(lambda: not bench.bridge.is_busy)
    qtbot.waitUntil(lambda: not bench.bridge.is_draining)


def test_there_is_one_timer_and_it_is_no_faster_than_33_ms(bench):
    timers = bench.bridge.findChildren(QTimer)
    assert len(timers) == 1
    assert timers[0].interval() >= 33


def test_context_query_is_answered_by_its_id(bench, qtbot):
    loaded(bench, qtbot)
    ids = [bench.bridge.measure_context((Message("user", text),)) for text in ("one", "one two three")]
    bench.service.run()
    qtbot.waitUntil(lambda: len(bench.log.of("context_measured")) == 2)
    answers = {answer.query_id: answer.num_tokens for answer in bench.log.of("context_measured")}
    assert answers == {ids[0]: 5, ids[1]: 7}


def test_options_applied_and_refused(bench, qtbot):
    loaded(bench, qtbot)
    bench.script.refuse = {"paging": "Not with this model."}
    bench.bridge.set_options({"prefix": "off"})
    bench.bridge.set_options({"paging": "off"})
    bench.service.run()
    qtbot.waitUntil(lambda: bool(bench.log.of("options_refused")))
    assert SetOptions({"prefix": "off"}) in bench.service.posted
    assert bench.log.of("options_applied")[0].changed == ("prefix",)
    assert bench.log.of("options_refused")[0].message == "Not with this model."


def test_abort_ends_the_reply(bench, qtbot):
    loaded(bench, qtbot)
    request = bench.bridge.submit("a", SamplingParams())
    bench.service.advance(3)
    bench.bridge.abort(request)
    bench.service.run()
    qtbot.waitUntil(lambda: bool(bench.log.of("generation_finished")))
    assert bench.log.of("generation_finished")[0].reason is FinishReason.ABORT


def test_death_is_reported_with_a_remedy_and_a_new_service_is_made(bench, qtbot):
    loaded(bench, qtbot)
    request = bench.bridge.submit("a", SamplingParams())
    bench.service.advance(2)
    bench.service.die()
    qtbot.waitUntil(lambda: bool(bench.log.of("engine_failed")))
    assert "Load the model again" in bench.log.of("engine_failed")[0].message
    finished = bench.log.of("generation_finished")[0]
    assert (finished.request_id, finished.reason) == (request, FinishReason.ERROR)
    assert bench.log.of("tokens_arrived"), "its last words are not lost"
    assert not bench.bridge.is_draining
    bench.bridge.load_model("starter")
    assert len(bench.services) == 2
    bench.service.run()
    qtbot.waitUntil(lambda: bool(bench.log.of("model_loaded")))
    assert len(bench.log.of("engine_failed")) == 1


def test_death_while_loading_fails_the_load(bench, qtbot):
    bench.bridge.load_model("starter")
    bench.service.die()
    qtbot.waitUntil(lambda: bool(bench.log.of("model_load_failed")), timeout=3000)
    assert bench.log.of("model_load_failed")[0].source == "starter"
    assert not bench.bridge.is_busy


def test_a_command_to_a_dead_service_reaches_a_new_one(bench, qtbot):
    loaded(bench, qtbot)
    bench.service.die()
    bench.bridge.load_model("again")
    assert len(bench.services) == 2
    assert bench.service.posted[-1].source == "again"
    assert bench.log.of("engine_failed")


def test_after_shutdown_nothing_is_posted_or_told(bench, qtbot):
    loaded(bench, qtbot)
    service = bench.service
    assert bench.bridge.shutdown()
    before = list(service.posted)
    bench.bridge.submit("late", SamplingParams())
    bench.bridge.set_options({"prefix": "off"})
    service.fail("too late")
    qtbot.wait(80)
    assert service.posted == before
    assert len(bench.services) == 1
    assert bench.log.of("engine_failed") == []
    assert not bench.bridge.is_draining


def test_threaded_reply_and_no_thread_left(threaded, qtbot):
    threaded.bridge.load_model("starter")
    request = threaded.bridge.submit("hello", SamplingParams())
    qtbot.waitUntil(lambda: bool(threaded.log.of("generation_finished")), timeout=5000)
    text = "".join(d.text for batch in threaded.log.of("tokens_arrived") for d in batch if d.request_id == request)
    assert text == threaded.script.replies[0]
    assert threaded.bridge.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name == "scripted-engine"]


def test_threaded_signals_come_on_the_gui_thread(threaded, qtbot):
    threads = set()
    threaded.bridge.tokens_arrived.connect(lambda _: threads.add(threading.current_thread()))
    threaded.bridge.load_model("starter")
    threaded.bridge.submit("hello", SamplingParams())
    qtbot.waitUntil(lambda: bool(threaded.log.of("generation_finished")), timeout=5000)
    assert threads == {threading.main_thread()}
