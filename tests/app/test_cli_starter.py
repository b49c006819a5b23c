"""The command line with a real model: acceptance points 2 and 10, and bench's JSON from a real engine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from app import cli

resource = pytest.importorskip("resource", reason="needs Unix resource limits")
ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data folder for this file, so that the machine is measured once."""
    return tmp_path_factory.mktemp("data of Zoë 数据")


@pytest.fixture(autouse=True)
def shared_data_dir(data_dir: Path, starter_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_DATA_DIR", str(data_dir))
    monkeypatch.setenv("RIDGELINE_STARTER", str(starter_path))


def _ridgeline(*arguments: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=before,
    )


def test_paris_on_stdout_alone() -> None:
    result = _ridgeline("chat", "-m", "starter", "-p", QUESTION, "--temperature", "0")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "tokens/s" not in result.stdout
    assert "tokens/s" in result.stderr
    assert "Traceback" not in result.stderr


def _no_file_can_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def test_an_answer_comes_although_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_DATA_DIR", str(tmp_path / "full"))
    arguments = ("chat", "-p", QUESTION, "--temperature", "0", "--max-tokens", "4")
    result = _ridgeline(*arguments, before=_no_file_can_grow)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "Traceback" not in result.stderr


def test_a_data_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    result = _ridgeline("--data-dir", str(tmp_path / "file" / "inside"), "chat", "-p", "Hi")
    assert result.returncode == 1
    assert "--data-dir" in result.stderr
    assert "Traceback" not in result.stderr


def test_bench_json_from_the_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt-tokens", "64", "--new-tokens", "8", "--batch", "1,2", "--context", "16"]
    assert cli.run(["bench", *arguments, "--json", "--set", "prefix=off"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(run["phase"], run["batch"]) for run in report["runs"]] == [("prefill", 1), ("decode", 1), ("decode", 2)]
    for run in report["runs"]:
        assert all(math.isfinite(value) and value > 0 for key, value in run.items() if key != "phase"), run
        assert run["bandwidth_share"] == pytest.approx(
            run["bytes_per_step"] / run["measured_seconds"] / report["machine"]["read_bytes_per_second"], rel=0.01
        )
    prefill, one, two = report["runs"]
    assert prefill["flops_per_step"] > 30 * one["flops_per_step"]
    assert two["bytes_per_step"] < 1.5 * one["bytes_per_step"], "two chats share one read of the weights"
    assert report["options"]["prefix"] == "off"
    assert report["active_paths"]


def _truncated(path: Path, starter: Path) -> None:
    with starter.open("rb") as source:
        path.write_bytes(source.read(5_000_000))


def _web_page(path: Path, starter: Path) -> None:
    path.write_text("<!DOCTYPE html><title>Sign in</title>")


def _pickle(path: Path, starter: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")


def _empty(path: Path, starter: Path) -> None:
    path.touch()


def _folder_without_weights(path: Path, starter: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')


@pytest.mark.parametrize("make", [_truncated, _web_page, _pickle, _empty, _folder_without_weights])
def test_a_bad_model_is_told_in_plain_words(
    make: Callable[[Path, Path], None], starter_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.gguf"
    make(path, starter_path)
    assert cli.run(["chat", "-m", str(path), "-p", "Hi"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    (message,) = [line for line in err.splitlines() if line.startswith("ridgeline: ")]
    assert len(message) < 400


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "locked.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    assert cli.run(["chat", "-m", str(path), "-p", "Hi"]) == 1
    assert "permission" in capsys.readouterr().err.lower()


def test_a_prompt_beyond_the_window(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["chat", "-p", "word " * 20_000]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "window" in err
    assert "Shorten" in err
