"""Measuring this machine: plausible figures, kept once, measured again when the file is not ours or broken."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

from engine.events import MachineFigures
from engine.roofline import machine


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small: these tests ask whether figures are kept, not whether they are right."""
    monkeypatch.setattr(machine, "_READ_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "_LEAST_READ_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "_PRODUCT_SIZE", 64)
    monkeypatch.setattr(machine, "_CALLS", 3)


@pytest.fixture
def num_measured(monkeypatch: pytest.MonkeyPatch, quick: None) -> list[str]:
    calls: list[str] = []
    measure = machine.measure

    def counted(device: str = "cpu") -> MachineFigures:
        calls.append(device)
        return measure(device)

    monkeypatch.setattr(machine, "measure", counted)
    return calls


def test_figures_are_plausible() -> None:
    figures = machine.measure()
    assert 0.5e9 < figures.read_bytes_per_second < 2e12
    assert set(figures.flops_per_second) == {"fp32", "bf16", "int8"}
    assert all(1e9 < rate < 1e15 for rate in figures.flops_per_second.values())
    assert 1e-8 < figures.launch_seconds < 1e-2
    assert figures.threads == torch.get_num_threads()
    assert machine.cpu_name() in figures.name
    assert 0.01 < figures.ridge_point("fp32") < 1e5


def test_figures_are_measured_once_and_kept(tmp_path: Path, num_measured: list[str]) -> None:
    cache = tmp_path / "new folder" / "machine.json"
    first = machine.measured_once(cache)
    assert machine.measured_once(cache) == first
    assert len(num_measured) == 1
    assert [path.name for path in cache.parent.iterdir()] == ["machine.json"]


@pytest.mark.parametrize(("days", "wanted"), [(0.9, 5e9), (1.1, 8e9), (400, 8e9), (-3, 8e9)])
def test_a_bandwidth_measured_on_a_busy_machine_is_measured_again_the_next_day(
    tmp_path: Path, num_measured: list[str], monkeypatch: pytest.MonkeyPatch, days: float, wanted: float
) -> None:
    cache = tmp_path / "machine.json"
    figures = machine.measured_once(cache)
    then = (datetime.now().astimezone() - timedelta(days=days)).isoformat()
    busy = replace(figures, read_bytes_per_second=5e9, measured_at=then)
    machine._keep(busy, cache)
    monkeypatch.setattr(machine, "_read_bandwidth", lambda: 8e9)
    again = machine.measured_once(cache)
    assert again.read_bytes_per_second == wanted
    assert replace(again, read_bytes_per_second=0, measured_at="") == replace(
        figures, read_bytes_per_second=0, measured_at=""
    )
    assert machine.cached(cache) == again
    monkeypatch.setattr(machine, "_read_bandwidth", lambda: 3e9)
    machine._keep(replace(again, measured_at=then), cache)
    assert machine.measured_once(cache).read_bytes_per_second == wanted
    assert len(num_measured) == 1


def test_the_buffer_is_read_whole_and_in_more_than_one_way(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((2.0, 0.5))
    monkeypatch.setattr(machine, "_best_seconds", lambda run, tries: (run(), next(seconds))[1])
    assert machine._read_bandwidth() == (1 << 20) / 0.5


def test_without_a_path_nothing_is_kept(num_measured: list[str]) -> None:
    machine.measured_once()
    machine.measured_once()
    assert len(num_measured) == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"version": 1}', '{"version": 1, "device": "cpu", "extra": 3}', "\x00\x00"],
)
def test_a_broken_file_is_replaced(tmp_path: Path, num_measured: list[str], content: str) -> None:
    cache = tmp_path / "machine.json"
    cache.write_text(content)
    assert machine.cached(cache) is None
    figures = machine.measured_once(cache)
    assert machine.cached(cache) == figures


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "Abacus, 2 threads"),
        ("threads", 977),
        ("device", "cuda:0"),
        ("version", 0),
        ("read_bytes_per_second", 0),
        ("read_bytes_per_second", "fast"),
        ("launch_seconds", None),
        ("flops_per_second", {"fp32": 1e9}),
        ("flops_per_second", [1e9]),
    ],
)
def test_figures_of_another_machine_or_nonsense_are_measured_again(
    tmp_path: Path, num_measured: list[str], field: str, value: object
) -> None:
    cache = tmp_path / "machine.json"
    machine.measured_once(cache)
    cache.write_text(json.dumps({**json.loads(cache.read_text()), field: value}))
    machine.measured_once(cache)
    assert len(num_measured) == 2


def test_a_place_that_cannot_be_written_is_no_failure(tmp_path: Path, num_measured: list[str]) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    figures = machine.measured_once(blocker / "machine.json")
    assert figures.read_bytes_per_second > 0


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="cuda:7"):
        machine.measure("cuda:7")


@pytest.mark.parametrize(("given", "wanted"), [(None, "2000"), ("77", "77")])
def test_waiting_threads_spin_briefly_unless_the_user_says_otherwise(given: str | None, wanted: str) -> None:
    """It must be set before torch loads its thread library, and importing the engine's vocabulary must not load torch."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if given is not None:
        environment["GOMP_SPINCOUNT"] = given
    code = "import os, sys, engine; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [wanted, "False"]
