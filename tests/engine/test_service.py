"""The service thread with the real starter model: commands in, events out, whatever the order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import best_here
from engine.commands import (
    Abort,
    CancelLoad,
    FindBest,
    JudgeDraft,
    LoadModel,
    MeasureContext,
    Message,
    SetDraft,
    SetOptions,
    Submit,
    WatchPages,
)
from engine.events import (
    BestFound,
    BestRefused,
    ContextMeasured,
    DraftChanged,
    DraftJudged,
    DraftRefused,
    EngineError,
    Event,
    Finished,
    FinishReason,
    ModelLoaded,
    ModelLoadFailed,
    ModelLoading,
    OptionsApplied,
    OptionsRefused,
    PageMap,
    StepRecord,
    TokenDelta,
)
from engine.params import SamplingParams
from engine.service import EngineService

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
QUESTION = (Message("user", "What is the capital of France?"),)


class Client:
    def __init__(self, starter: Path) -> None:
        self.starter = str(starter)
        self.wakes = 0
        self.events: list[Event] = []
        self.service = EngineService(self.count_wake)
        self.service.start()

    def count_wake(self) -> None:
        self.wakes += 1

    def until(self, found: Callable[[Event], bool], seconds: float = 60) -> Event:
        deadline = time.monotonic() + seconds
        seen = 0
        while time.monotonic() < deadline:
            self.events += self.service.take_events()
            for event in self.events[seen:]:
                seen += 1
                if found(event):
                    return event
            time.sleep(0.002)
        raise AssertionError(f"waited {seconds} s in vain; last events: {self.events[-5:]}")

    def until_a(self, kind: type, seconds: float = 60) -> Event:
        return self.until(lambda event: isinstance(event, kind), seconds)

    def finished(self, number: int) -> Finished:
        event = self.until(lambda event: isinstance(event, Finished) and event.request_id == number)
        assert isinstance(event, Finished)
        return event

    def load(self, weights: str = "int8") -> None:
        self.service.post(LoadModel(self.starter, {"weights": weights}))


@pytest.fixture
def client(starter_path: Path) -> Iterator[Client]:
    client = Client(starter_path)
    yield client
    assert client.service.shutdown(30)


def test_load_chat_and_flip_switches(client: Client) -> None:
    client.load()
    loaded = client.until_a(ModelLoaded)
    assert isinstance(loaded, ModelLoaded)
    assert loaded.options["weights"] == "int8"
    assert any(isinstance(event, ModelLoading) for event in client.events)
    client.service.post(WatchPages(0.001))  # one map, and the one when nothing runs any more
    client.service.post(MeasureContext(7, QUESTION))
    client.service.post(Submit(1, QUESTION, GREEDY))
    client.service.post(SetOptions({"prefix": "off"}))
    client.service.post(SetOptions({"prefix": "sideways"}))
    assert client.finished(1).reason is FinishReason.LENGTH
    counted = client.until_a(ContextMeasured)
    assert counted == ContextMeasured(7, client.finished(1).usage.prompt_tokens)
    assert isinstance(client.until_a(OptionsApplied), OptionsApplied)
    refused = client.until_a(OptionsRefused)
    assert isinstance(refused, OptionsRefused)
    assert "Choose one of: on, off" in refused.message
    for kind in (TokenDelta, StepRecord, PageMap):
        client.until_a(kind)
    client.until(lambda event: isinstance(event, PageMap) and not any(owner > 0 for owner in event.owners))
    assert client.wakes > 0


def test_sending_before_any_model_says_what_to_do(client: Client) -> None:
    client.service.post(Submit(1, QUESTION, GREEDY))
    finished = client.finished(1)
    assert (finished.reason, finished.message) == (FinishReason.ERROR, "No model is loaded. Choose one first.")
    client.service.post(SetOptions({"prefix": "off"}))
    client.until_a(OptionsRefused)


def test_stop_works_for_a_message_sent_while_the_model_loads(client: Client) -> None:
    client.load()
    client.service.post(Submit(1, QUESTION, GREEDY))
    client.service.post(Submit(2, QUESTION, GREEDY))
    client.service.post(Abort(1))
    assert client.finished(1).reason is FinishReason.ABORT
    assert not any(isinstance(event, ModelLoaded) for event in client.events), "stop waited for the load"
    assert client.finished(2).reason is FinishReason.LENGTH


def test_a_bad_model_is_reported_and_the_one_loaded_stays(client: Client, tmp_path: Path) -> None:
    client.load()
    client.until_a(ModelLoaded)
    bad = tmp_path / "page.gguf"
    bad.write_text("<html>Not found</html>")
    client.service.post(LoadModel(str(bad)))
    failed = client.until_a(ModelLoadFailed)
    assert isinstance(failed, ModelLoadFailed)
    assert failed.kept
    assert "page.gguf" in failed.message
    client.service.post(LoadModel(str(tmp_path / "missing.gguf")))
    client.until(lambda event: isinstance(event, ModelLoadFailed) and "missing.gguf" in event.message)
    client.service.post(Submit(1, QUESTION, GREEDY))
    assert client.finished(1).reason is FinishReason.LENGTH


def test_loading_another_model_overtakes_the_load_that_runs(client: Client) -> None:
    client.load("none")
    client.until_a(ModelLoading)
    client.load("int4")
    loaded = client.until_a(ModelLoaded)
    assert isinstance(loaded, ModelLoaded)
    assert loaded.options["weights"] == "int4"
    assert any(isinstance(event, ModelLoadFailed) and "stopped" in event.message for event in client.events)


def test_a_running_reply_ends_with_a_word_when_the_model_changes(client: Client) -> None:
    client.load()
    client.service.post(Submit(1, QUESTION, SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)))
    client.until_a(TokenDelta)
    client.load("int4")
    assert "Another model was loaded" in client.finished(1).message


def test_closing_while_loading_ends_the_thread(starter_path: Path) -> None:
    client = Client(starter_path)
    client.load("none")
    client.until_a(ModelLoading)
    assert client.service.shutdown(10)
    assert not client.service.is_alive


def test_closing_in_the_middle_of_a_reply_ends_the_thread(client: Client) -> None:
    client.load()
    client.service.post(Submit(1, QUESTION, SamplingParams(max_tokens=4000, ignore_eos=True)))
    client.until_a(TokenDelta)
    assert client.service.shutdown(10)


def test_an_over_long_prompt_fails_alone(client: Client) -> None:
    client.load()
    client.service.post(Submit(1, tuple([5] * 100_000), GREEDY))
    client.service.post(Submit(2, QUESTION, GREEDY))
    assert "Shorten the prompt" in client.finished(1).message
    assert client.finished(2).reason is FinishReason.LENGTH


def test_an_unexpected_error_in_a_command_leaves_the_engine_alive(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.load()
    client.until_a(ModelLoaded)
    assert client.service._engine is not None

    def broken(*_: object) -> int:
        raise KeyError("surprise")

    monkeypatch.setattr(client.service._engine, "count_tokens", broken)
    client.service.post(MeasureContext(1, QUESTION))
    error = client.until_a(EngineError)
    assert isinstance(error, EngineError)
    assert "surprise" in error.message
    client.service.post(Submit(1, QUESTION, GREEDY))
    assert client.finished(1).reason is FinishReason.LENGTH


def test_a_draft_model_is_judged_loaded_and_let_go(client: Client, gemma_path: Path) -> None:
    client.service.post(SetDraft(client.starter))
    client.until(lambda event: isinstance(event, DraftRefused) and "No model is loaded" in event.message)
    client.load()
    for source in (str(gemma_path), client.starter, "nothing-here.gguf"):
        client.service.post(JudgeDraft(source))
    client.service.post(SetDraft(str(gemma_path)))
    client.until(lambda event: isinstance(event, DraftRefused) and "Its vocabulary has" in event.message)
    judged = [event for event in client.events if isinstance(event, DraftJudged)]
    assert [event.target for event in judged] == [client.starter] * 3
    assert "Its vocabulary has" in judged[0].reason
    assert (judged[1].reason, bool(judged[1].note)) == ("", True)
    assert "nothing-here.gguf" in judged[2].reason
    client.service.post(SetDraft(client.starter))
    client.service.post(SetOptions({"speculation": "draft"}))
    client.service.post(Submit(1, QUESTION, GREEDY))
    client.until(lambda event: isinstance(event, DraftChanged) and event.draft is not None)
    client.service.post(SetDraft(""))
    changed = client.until(lambda event: isinstance(event, DraftChanged) and event.draft is None)
    assert isinstance(changed, DraftChanged)
    assert changed.options["speculation"] == "off"
    assert any(isinstance(event, ModelLoading) and event.stage.startswith("Draft model") for event in client.events)
    assert client.finished(1).reason is FinishReason.LENGTH


def test_a_draft_model_comes_with_the_load_and_its_load_can_be_stopped(client: Client, gemma_path: Path) -> None:
    client.service.post(LoadModel(client.starter, {"weights": "int8"}, str(gemma_path)))
    refused = client.until_a(DraftRefused)
    assert any(isinstance(event, ModelLoaded) and event.draft is None for event in client.events)
    assert isinstance(refused, DraftRefused)
    assert refused.source == str(gemma_path)
    client.service.post(SetDraft(client.starter))
    client.service.post(CancelLoad())
    client.until(lambda event: isinstance(event, DraftRefused) and "stopped" in event.message)


def test_the_best_setting_is_searched_for_and_a_message_ends_the_search(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.service.post(FindBest())
    client.until(lambda event: isinstance(event, BestRefused) and "No model is loaded" in event.message)
    client.load()
    client.service.post(SetOptions({"prefix": "off"}))
    client.service.post(FindBest())
    client.until(lambda event: isinstance(event, ModelLoading) and event.stage.startswith("Trying"))
    client.service.post(Submit(1, QUESTION, GREEDY))
    client.until(lambda event: isinstance(event, BestRefused) and "as before" in event.message)
    assert client.finished(1).reason is FinishReason.LENGTH
    engine = client.service._engine
    assert engine is not None
    assert (engine.options["weights"], engine.options["prefix"]) == ("int8", "off")
    monkeypatch.setattr(best_here, "_tries", lambda engine: [("fused_ops", "off")])
    client.service.post(FindBest())
    found = client.until_a(BestFound)
    assert isinstance(found, BestFound)
    assert found.found.model == engine.info.name
    applied = [event for event in client.events if isinstance(event, OptionsApplied)][-1]
    assert dict(applied.options) == dict(engine.options)
    assert engine.options["prefix"] == "on"  # the search starts from the defaults
