"""``ridgeline compare`` and ``--preset`` with the starter model and tiny budgets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app import cli
from app.commands import compare, session
from app.paths import find_paths
from engine.options import OPTIONS
from engine.presets import Found, keep_best, presets
from engine.roofline.machine import this_machine
from tests.engine.saved_models import save_tiny

SMALL = ["--rounds", "1", "--new-tokens", "4", "--quality-tokens", "12", "-p", "Hi"]


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kv.room.KV_BYTES_WANTED", 1 << 20)


@pytest.fixture
def starter(monkeypatch: pytest.MonkeyPatch, starter_path: Path) -> None:
    monkeypatch.setenv("RIDGELINE_STARTER", str(starter_path))


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.run(["compare", *SMALL, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_weights_are_compared_in_speed_memory_and_quality(starter: None, capsys: pytest.CaptureFixture[str]) -> None:
    said = report(capsys, "--a", "weights=int8,fused_ops=on", "--b", "weights=int4")
    a, b = said["a"], said["b"]
    assert said["an_engine_each"]
    assert (a["options"]["weights"], b["options"]["weights"]) == ("int8", "int4")
    assert list(a["options"]) == [option.key for option in OPTIONS]
    assert a["weight_bytes"] > 1.2 * b["weight_bytes"]
    assert a["bytes_per_token"]["median"] > 1.2 * b["bytes_per_token"]["median"]
    assert said["speed_ratio"] == pytest.approx(b["tokens_per_second"]["median"] / a["tokens_per_second"]["median"])
    for side in (a, b):
        assert (
            side["tokens_per_second"]["least"]
            <= side["tokens_per_second"]["median"]
            <= side["tokens_per_second"]["most"]
        )
        assert side["quality"]["num_tokens"] == 12
        assert 0 < side["quality"]["mean_kl"] < 0.5
        assert side["quality"]["token_agreement"] > 0.5
        assert side["cached_tokens"] == 0
        estimate = side["weight_bytes"] + side["pool_bytes"]
        assert side["process_bytes"] == pytest.approx(estimate, rel=0.25)
    assert "memory side of the ridge point" in said["sentence"]


def test_without_room_for_two_engines_one_is_switched_at_each_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = str(save_tiny("llama", tmp_path))
    monkeypatch.setattr(compare, "free_bytes", lambda: 1)
    settings = ["--a", "weights=none,fused_ops=off", "--b", "preset=latency,weights=none"]
    assert cli.run(["compare", "-m", tiny, *SMALL, "--quality-tokens", "0", *settings]) == 0
    text = capsys.readouterr().out
    assert "A: speculation=off, fused_ops=off" in text
    assert "B: speculation=ngram, fused_ops=on" in text
    assert "perplexity" not in text
    for title in ("tokens/s", "first token, s", "weights, MB", "KV pool, MB"):
        assert title in text
    assert "process gained" not in text  # one process holds one engine: there is nothing to tell apart


@pytest.mark.parametrize("free_bytes", [1, 1 << 40])
def test_a_draft_model_guesses_on_the_side_that_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    """With an engine for each side, and with one that is switched between them."""
    tiny = str(save_tiny("llama", tmp_path))
    monkeypatch.setattr(compare, "free_bytes", lambda: free_bytes)
    sides = ["--a", "weights=none", "--b", "weights=none,speculation=draft", "--draft", tiny]
    said = report(capsys, "-m", tiny, "--quality-tokens", "0", *sides)
    assert said["an_engine_each"] == (free_bytes > 1)
    assert [said[side]["options"]["speculation"] for side in ("a", "b")] == ["off", "draft"]


def test_drafting_without_a_draft_model_is_told_before_anything_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = str(save_tiny("llama", tmp_path))
    assert cli.run(["chat", "-m", tiny, "-p", "Hi", "--set", "speculation=draft"]) == 1
    assert "--draft MODEL" in capsys.readouterr().err
    arguments = ["bench", "-m", tiny, "--draft", str(tmp_path / "nothing.gguf"), "--set", "weights=none"]
    assert cli.run(arguments) == 1
    assert "nothing.gguf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--a", "weights=int3"], "Choose one of: none, int8, int4"),
        (["--a", "int8"], "key=value"),
        (["--b", "preset=quick"], "Presets are: latency"),
        (["--new-tokens", "1"], "at least 2"),
        (["--quality-tokens", "1"], "at least 2"),
        (["-p", " "], "-p TEXT"),
        (["-m", "nowhere.gguf"], "Check the path"),
    ],
)
def test_mistakes_are_told_before_anything_loads(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.run(["compare", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert remedy in err


def test_a_preset_sets_every_switch_and_set_goes_over_it() -> None:
    arguments = cli._parser().parse_args(["chat", "--preset", "small-memory", "--set", "max_batch=2"])
    settings = session.chosen_settings(arguments)
    small = next(row for row in presets() if row.name == "small_memory")
    assert settings == {**small.settings(), "max_batch": "2"}


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that the best setting was searched for with, which takes no time here and finds fused_ops=off."""
    models: list[str] = []

    def search(model: str, file: Path) -> Found:
        models.append(model)
        found = found_with(Path(model).name)
        keep_best(found, file)
        return found

    monkeypatch.setattr(session, "_search_best", search)
    return models


def found_with(name: str, machine: str | None = None) -> Found:
    return Found(machine or this_machine(), name, "2026-11-30T12:00:00+00:00", 1.5, {"fused_ops": "off"})


def two_models(folder: Path) -> tuple[str, str]:
    for name in ("one", "the other"):
        (folder / name).mkdir()
        save_tiny("llama", folder / name)
    return str(folder / "one"), str(folder / "the other")


def test_the_best_setting_is_searched_for_once(searched: list[str], tmp_path: Path) -> None:
    one, _ = two_models(tmp_path)
    for _ in range(2):
        assert session.preset_settings("best here", one)["fused_ops"] == "off"
    assert searched == [one]
    assert find_paths().best_here_file.is_file()


@pytest.mark.parametrize(
    "command", [["chat", "-p", "Hi", "--preset", "best_here"], ["compare", "--a", "preset=best_here"]]
)
def test_the_best_setting_of_another_model_is_refused_with_the_command_that_measures(
    command: list[str], searched: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = two_models(tmp_path)
    session.preset_settings("best here", one)
    assert cli.run([*command, "-m", other]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"was measured for one on {this_machine()}, not for the other on {this_machine()}." in err
    remedy = f"ridgeline bench -m '{other}' --preset best_here"  # its name has a space
    assert remedy in err
    assert searched == [one]


def test_the_best_setting_of_another_machine_is_refused(searched: list[str], tmp_path: Path) -> None:
    one, _ = two_models(tmp_path)
    keep_best(found_with("one", "Z80, 1 thread"), find_paths().create().best_here_file)
    with pytest.raises(ValueError, match=r"for one on Z80, 1 thread, not for one on .*ridgeline bench -m"):
        session.preset_settings("best here", one)
    assert searched == []


def test_bench_measures_the_best_setting_for_another_model_in_its_place(searched: list[str], tmp_path: Path) -> None:
    one, other = two_models(tmp_path)
    session.preset_settings("best here", one)
    sizes = ["--prompt-tokens", "4", "--new-tokens", "4", "--batch", "1", "--context", "4"]
    for _ in range(2):
        assert cli.run(["bench", "-m", other, "--preset", "best_here", *sizes]) == 0
    assert searched == [one, other]
    assert session.preset_settings("best here", other)["fused_ops"] == "off"
