"""Presets: rows that the options table understands, and the measured one, kept and found again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from saved_models import save_tiny

from engine import best_here
from engine.best_here import SearchStopped, search
from engine.commands import Message
from engine.engine import Engine
from engine.model.load import name_of
from engine.options import OPTIONS, Capabilities, Kind, Options, entry
from engine.params import SamplingParams
from engine.presets import BEST_HERE, Found, Preset, keep_best, parse, preset, presets, stored_best
from engine.roofline.machine import this_machine

GREEDY = SamplingParams(temperature=0, max_tokens=8)
FOUND = Found("Test", "Tiny", "2026-11-30T12:00:00+00:00", 1.5, {"fused_ops": "off", "weights": "int8"})


def test_the_file_has_the_four_purposes() -> None:
    assert [row.name for row in presets()] == ["latency", "throughput", "long_context", "small_memory"]
    assert all(row.title and row.note and row.values for row in presets())


@pytest.mark.parametrize("row", presets(), ids=lambda row: row.name)
def test_each_preset_is_a_full_setting_that_can_be_used_here(row) -> None:
    settings = row.settings()
    assert list(settings) == [option.key for option in OPTIONS]
    assert dict(Options(settings)) == {**settings, **row.values}  # nothing it names was replaced by the default


@pytest.mark.parametrize(
    ("line", "remedy"),
    [('weight = "int4"', "Options are: weights"), ('weights = "int3"', "Choose one of: none, int8, int4")],
)
def test_a_row_with_an_unknown_key_or_value_is_refused(line: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        parse(f'[x]\ntitle = "X"\nnote = "x"\n[x.values]\n{line}\n')


def test_what_cannot_be_used_here_goes_to_its_default() -> None:
    small = replace(presets()[0], values={"weights": "int8", "prefix": "off"})
    settings = small.settings(Capabilities(is_fallback=True))
    assert settings["weights"] == entry("weights").default
    assert settings["prefix"] == "off"


def test_an_unknown_name_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="latency, throughput, long_context, small_memory, best_here"):
        preset("quick")
    with pytest.raises(ValueError, match="ridgeline bench --preset best_here"):
        preset("best here", stored_best(tmp_path / "nothing.json"))
    assert preset("Long-Context").name == "long_context"


def test_a_found_setting_is_kept_with_its_date_and_machine(tmp_path: Path) -> None:
    file = tmp_path / "best.json"
    keep_best(FOUND, file)
    best = preset(BEST_HERE, stored_best(file))
    assert best.values == FOUND.values
    for said in ("2026-11-30", "Tiny", "Test", "1.50 times"):
        assert said in best.note
    found = stored_best(file)
    assert found == FOUND
    assert found.is_of("Test", "Tiny")
    assert not found.is_of("Another", "Tiny")
    assert not found.is_of("Test", "Another")


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: "{",
        lambda row: json.dumps([]),
        lambda row: json.dumps({**row, "values": {"gone": "on"}}),
        lambda row: json.dumps({key: value for key, value in row.items() if key != "speedup"}),
    ],
)
def test_a_damaged_or_outdated_file_is_as_none(tmp_path: Path, damage) -> None:
    file = tmp_path / "best.json"
    keep_best(FOUND, file)
    file.write_text(damage(json.loads(file.read_text())))
    assert stored_best(file) is None


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine.load(
        str(save_tiny("llama", tmp_path_factory.mktemp("tiny"))), {"weights": "int8"}, kv_bytes=1 << 20
    )
    yield engine
    engine.close()


class ScriptedTimer:
    """Says what each setting takes instead of timing it."""

    def __init__(self, seconds: Mapping[tuple[str, str], float], engine: Engine) -> None:
        self.asked: list[dict[str, str]] = []
        self._seconds, self._engine = seconds, engine

    def seconds(self, limit: float = float("inf")) -> float:
        self.asked.append(dict(self._engine.options))
        took = 1.0
        for (key, value), factor in self._seconds.items():
            took *= factor if self._engine.options[key] == value else 1.0
        return took if took <= limit else float("inf")


def scripted_search(engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: Mapping[tuple[str, str], float]):
    timers: list[ScriptedTimer] = []

    def make(its: Engine, stopped: object) -> ScriptedTimer:
        timers.append(ScriptedTimer(seconds, its))
        return timers[-1]

    monkeypatch.setattr(best_here, "_Timer", make)
    return search(engine), timers[0]


def test_the_search_keeps_what_is_faster_and_nothing_else(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {("weights", "int8"): 0.5, ("fused_ops", "off"): 1.2, ("kv_cache", "off"): 40.0}
    found, timer = scripted_search(engine, monkeypatch, costs)
    assert found.values == {"weights": "int8"}
    assert found.speedup == pytest.approx(2.0)
    assert engine.options["weights"] == "int8"
    assert (engine.options["fused_ops"], engine.options["kv_cache"]) == ("on", "on")
    assert {"off"} <= {options["fused_ops"] for options in timer.asked}


def test_the_search_does_not_take_noise_for_a_gain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = scripted_search(engine, monkeypatch, {("fused_ops", "off"): 0.97})
    assert found.values == {}
    assert found.speedup == 1.0


def test_the_search_never_trades_the_text_for_speed_except_for_the_weights(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, timer = scripted_search(engine, monkeypatch, {})
    for option in OPTIONS:
        tried = {options[option.key] for options in timer.asked}
        if option.key == "weights":
            assert tried == {"int8", "int4"}
        elif not option.lossless or option.kind is Kind.WEIGHTS:
            assert tried == {option.default}


@pytest.mark.parametrize("suffix", ["", "model.safetensors"])
def test_the_name_and_machine_of_a_result_are_known_without_loading(engine: Engine, suffix: str) -> None:
    """Else a kept result would be taken for another model's, and measured again each time."""
    assert name_of(Path(engine.info.source) / suffix) == engine.info.name
    assert this_machine() == engine.info.machine.name


def test_the_name_of_a_gguf_file_is_known_without_loading(starter_path: Path, starter: Engine) -> None:
    assert name_of(starter_path) == starter.info.name


def test_the_search_really_times_the_engine(engine: Engine) -> None:
    found = search(engine, seconds=0.0)  # only the warm-up
    assert found.values == {}
    assert (found.machine, found.model) == (engine.info.machine.name, engine.info.name)
    assert best_here._Timer(engine).seconds() > 0
    assert best_here._Timer(engine).seconds(limit=0.0) == float("inf")
    engine.check_integrity()


def test_a_search_that_is_stopped_says_so(engine: Engine) -> None:
    with pytest.raises(SearchStopped):
        search(engine, stopped=lambda: True)
    assert not engine.has_work


@pytest.fixture(scope="module")
def starter(starter_path: Path) -> Iterator[Engine]:
    engine = Engine.load("starter", kv_bytes=1 << 26, find=lambda name: starter_path)
    yield engine
    engine.close()


@pytest.mark.parametrize("row", presets(), ids=lambda row: row.name)
def test_each_preset_works_on_the_starter(starter: Engine, row: Preset) -> None:
    starter.apply(row.settings(starter.capabilities))
    assert {key: starter.options[key] for key in row.values} == row.values
    # "What is the capital of France?" is a near tie to this model, which the rounding of some presets turns
    question = "Which city is the capital of France? Answer in one sentence."
    (done,) = starter.generate([(Message("user", question),)], GREEDY)
    assert "Paris" in done.text
    starter.check_integrity()
