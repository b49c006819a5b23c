"""The terminal chat against an engine that replies from a script: what goes to stdout, what Ctrl+C does, figures."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest

from app import cli
from app.commands import bench, chat, session
from engine.commands import Message, Overflow, Prompt
from engine.events import (
    Event,
    Finished,
    FinishReason,
    MachineFigures,
    Phase,
    PoolSnapshot,
    RequestUsage,
    StepCost,
    StepRecord,
    TokenDelta,
)
from engine.options import Options
from engine.params import SamplingParams


def step_record(phase: Phase = Phase.DECODE, batch: int = 1, seconds: float = 0.02) -> StepRecord:
    return StepRecord(
        index=0,
        ended_at=0.0,
        phase=phase,
        step_seconds=seconds,
        memory_seconds=0.007,
        compute_seconds=0.001,
        cost=StepCost(70_000_000, 0, 0, 0, 0, 270_000_000, 0),
        num_prefill_tokens=0,
        num_decode_tokens=batch,
        num_new_tokens=batch,
        batch=batch,
        waiting=0,
        pool=PoolSnapshot(8, 1, 0, 0, 7, 0, 16, 1024),
        requests=(),
        active_paths={},
    )


class ScriptedEngine:
    """Replies with the same words to every prompt, one per step; remembers what it was asked."""

    def __init__(self, words: tuple[str, ...] = ("Paris", " is", " it", "."), has_chat_template: bool = True) -> None:
        self.words = words
        self.prompts: list[Prompt] = []
        self.overflows: list[Overflow] = []
        self.num_dropped = 0
        self.options = Options()
        self.closed = False
        self.before_step: Callable[[], None] = lambda: None
        self.failure = ""
        self.info = SimpleNamespace(
            name="Scripted",
            stored_format="GGUF",
            weight_bytes=1,
            has_chat_template=has_chat_template,
            context_length=1000,
            vocab_size=50,
            active_paths={"linear": "scripted"},
            machine=MachineFigures("cpu", "Test", 2, 1e10, {"fp32": 1e11}, 1e-6, "2026-11-30"),
        )
        self._left: dict[int, list[str]] = {}
        self._limits: dict[int, int] = {}

    def submit(self, prompt: Prompt, params: SamplingParams, overflow: Overflow = "stop") -> int:
        self.prompts.append(prompt)
        self.overflows.append(overflow)
        request = len(self.prompts)
        self._left[request] = list(self.words) if not params.ignore_eos else ["x"] * (params.max_tokens or 1)
        return request

    def abort(self, request: int) -> None:
        self._left[request] = []
        self._limits[request] = 0

    def apply(self, changes: Mapping[str, str]) -> None:
        self.options = self.options.replaced(changes)

    def step(self) -> list[Event]:
        self.before_step()
        events: list[Event] = [step_record(batch=len(self._left))]
        usage = RequestUsage(prompt_tokens=5, new_tokens=4, first_token_seconds=0.1, decode_seconds=0.06)
        usage = replace(usage, dropped_messages=self.num_dropped)
        for request, words in list(self._left.items()):
            if words and not self.failure:
                events.append(TokenDelta(request, words.pop(0), (1,)))
                continue
            reason = FinishReason.ABORT if request in self._limits else FinishReason.STOP
            reason = FinishReason.ERROR if self.failure else reason
            events.append(Finished(request, reason, usage, self.failure))
            del self._left[request]
        return events

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    scripted = ScriptedEngine()
    for module in (chat, bench):
        monkeypatch.setattr(module, "open_engine", lambda model, settings, draft=None: scripted)
    return scripted


def _type(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """A person at the terminal types these lines, then Ctrl+D."""
    waiting = list(lines)

    def read(prompt: str = "") -> str:
        if not waiting:
            raise EOFError
        line = waiting.pop(0)
        if line == "^C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(chat.sys, "stdin", SimpleNamespace(isatty=lambda: True))


def test_answer_alone_on_stdout_figures_on_stderr(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["chat", "-p", "Where?", "--system", "Be brief."]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris is it.\n"
    assert "4 tokens at 50.0 tokens/s" in err
    assert "first after 0.10 s" in err
    assert "reading memory takes 7.0, arithmetic 1.0, everything else 13.0 (overhead-bound)" in err
    assert engine.prompts == [(Message("system", "Be brief."), Message("user", "Where?"))]
    assert engine.closed


def test_a_piped_prompt_is_answered(engine: ScriptedEngine, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("From a pipe\n"))
    assert cli.run(["chat"]) == 0
    assert engine.prompts == [(Message("user", "From a pipe"),)]
    assert capsys.readouterr().out == "Paris is it.\n"


def test_a_model_without_template_continues_the_text(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.info.has_chat_template = False
    assert cli.run(["chat", "-p", "Once upon"]) == 0
    assert engine.prompts == ["Once upon"]


def test_a_failed_reply_is_an_error_code(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.failure = "The prompt has 9000 tokens; the window holds 8192. Shorten it."
    assert cli.run(["chat", "-p", "long"]) == 1
    assert "Shorten it" in capsys.readouterr().err


def test_interrupt_stops_the_reply_and_keeps_what_was_said(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = iter(range(10))
    engine.before_step = lambda: os.kill(os.getpid(), signal.SIGINT) if next(steps) == 1 else None
    before = signal.getsignal(signal.SIGINT)
    assert cli.run(["chat", "-p", "Where?"]) == 130
    assert capsys.readouterr().out == "Paris is\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_conversation_remembers_its_turns(
    engine: ScriptedEngine, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _type(monkeypatch, "One", "", "^C", "Two", "/new", "Three")
    assert cli.run(["chat"]) == 0
    answer = Message("assistant", "Paris is it.")
    assert engine.prompts == [
        (Message("user", "One"),),
        (Message("user", "One"), answer, Message("user", "Two")),
        (Message("user", "Three"),),
    ]
    assert capsys.readouterr().out.count("Paris is it.\n") == 3


@pytest.mark.parametrize(("arguments", "overflow"), [((), "drop_oldest"), (("--when-full", "stop"), "stop")])
def test_a_conversation_says_what_was_left_out_and_the_policy_is_the_users(
    engine: ScriptedEngine, monkeypatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], overflow: str
) -> None:
    engine.num_dropped = 4
    _type(monkeypatch, "One")
    assert cli.run(["chat", *arguments]) == 0
    assert engine.overflows == [overflow]
    assert "4 oldest messages left out" in capsys.readouterr().err


def test_switches_flip_between_turns(engine: ScriptedEngine, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    _type(monkeypatch, "/set prefix=off", "/set prefix=sideways", "/options", "/help", "/quit")
    assert cli.run(["chat"]) == 0
    err = capsys.readouterr().err
    assert engine.options["prefix"] == "off"
    assert "Choose one of: on, off" in err
    assert "prefix=off" in err
    assert "/set KEY=VALUE" in err


def test_no_terminal_gives_one_demonstration(
    engine: ScriptedEngine, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert chat.run_in_terminal("starter") == 0
    assert engine.prompts == [(Message("user", chat.DEMO_QUESTION),)]
    out, err = capsys.readouterr()
    assert out == "Paris is it.\n"
    assert 'ridgeline chat -p "' in err


def test_the_starter_is_fetched_when_it_is_missing(monkeypatch) -> None:
    fetched: list[bool] = []
    monkeypatch.setattr(session, "find_starter", lambda: None)
    monkeypatch.setattr(session, "fetch_starter", lambda progress: fetched.append(True))
    monkeypatch.setattr(session.catalog, "resolve", lambda model: (_ for _ in ()).throw(ValueError("stop here")))
    with pytest.raises(ValueError, match="stop here"):
        session.open_engine("starter", {})
    assert fetched == [True]


def test_bench_json_has_every_run(engine: ScriptedEngine, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    monkeypatch.setattr(bench, "_prefill", _scripted_prefill)
    assert cli.run(["bench", "--json", "--new-tokens", "8", "--batch", "1,2", "--context", "16,32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"runs", "options", "machine", "active_paths"} <= set(report)
    cells = [(run["phase"], run["batch"], run["context"]) for run in report["runs"]]
    assert cells == [
        ("prefill", 1, 512),
        ("decode", 1, 16),
        ("decode", 2, 16),
        ("decode", 1, 32),
        ("decode", 2, 32),
    ]
    two = report["runs"][2]
    assert two["tokens_per_s"] == pytest.approx(2 / 0.02)
    assert two["bandwidth_share"] == pytest.approx(70e6 / 0.02 / 1e10)
    assert report["machine"]["flops_per_second"] == {"fp32": 1e11}
    assert len(set(engine.prompts)) == len(engine.prompts), "no prompt twice: prefixes are not shared"


def _scripted_prefill(engine: ScriptedEngine, prompts: object, num_tokens: int, bandwidth: float) -> bench.Run:
    return bench._row("prefill", 1, num_tokens, 1.0, [step_record(Phase.PREFILL)], bandwidth)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [(["--context", "990"], "window of 1000"), (["--batch", "32"], "--set max_batch=32")],
)
def test_bench_refuses_what_does_not_fit(
    engine: ScriptedEngine, arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", *arguments]) == 1
    assert remedy in capsys.readouterr().err
    assert engine.closed


def test_bench_drops_the_warm_up_and_mixed_steps() -> None:
    slow = [step_record(seconds=9.0)] * 2
    records = [step_record(Phase.MIXED, batch=2, seconds=5.0), *slow, *[step_record(seconds=0.02)] * 5]
    assert bench._decode(records, 1, 16, 1e10).measured_seconds == pytest.approx(0.02)
