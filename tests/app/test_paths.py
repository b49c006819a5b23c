"""Folders: the system's, one of the user's choice, a portable one; with names that others stumbled over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.paths import PORTABLE_MARKER, find_paths, long_path
from app.settings import SettingsStore
from app.store import ChatStore, ConversationRecord, MessageRecord

AWKWARD = (
    "with spaces and  two",
    "Übung_日本語_עברית_🙂",
    'per%cent & quote\' "double" #hash ?question',
    "combining e\u0301 and a dot .",
)


@pytest.mark.parametrize("name", AWKWARD)
def test_chats_and_settings_live_in_a_folder_with_any_name(tmp_path: Path, name: str) -> None:
    paths = find_paths(tmp_path / name / "data").create()
    store = ChatStore(paths.chats_file)
    chat = ConversationRecord("c", "Title", 1.0, 1.0)
    store.add_message(chat, MessageRecord("m", None, "user", "Hello", "done", 1.0))
    store.close()
    again = ChatStore(paths.chats_file)
    assert [message.text for message in again.messages("c")] == ["Hello"]
    again.close()
    SettingsStore(paths.settings_file).update(model_source="x")
    assert SettingsStore(paths.settings_file).settings.model_source == "x"
    assert paths.chats_file.is_relative_to(tmp_path / name)


def _folder_of(root: Path, length: int) -> Path:
    """A path below ``root`` of exactly ``length`` bytes."""
    path = root
    while length - len(str(path)) > 201:
        path = path / ("d" * 199)
    path = path / ("e" * (length - len(str(path)) - 1))
    assert len(str(path)) == length
    return path


def test_the_longest_folder_that_is_accepted_holds_a_database(tmp_path: Path) -> None:
    paths = find_paths(_folder_of(tmp_path, 480)).create()
    store = ChatStore(paths.chats_file)
    store.create_conversation(ConversationRecord("c", "Title", 1.0, 1.0))
    assert store.conversations()[0].title == "Title"
    store.close()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit with its long-path prefix")
def test_a_longer_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"481 bytes long.*--data-dir"):
        find_paths(_folder_of(tmp_path, 481))


def test_a_folder_that_cannot_be_made_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot be created.*--data-dir"):
        find_paths(tmp_path / "file" / "data").create()


@pytest.mark.parametrize("below", ["", "bin"])
def test_a_portable_marker_beside_the_program_keeps_everything_there(
    tmp_path: Path, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RIDGELINE_DATA_DIR")
    (tmp_path / PORTABLE_MARKER).touch()
    paths = find_paths(program=tmp_path / below / "ridgeline")
    assert paths.is_portable
    for folder in (paths.data, paths.config, paths.cache, paths.logs, paths.models):
        assert folder.is_relative_to(tmp_path / "data")


def test_data_dir_beats_the_marker_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_DATA_DIR", str(tmp_path / "environment"))
    (tmp_path / PORTABLE_MARKER).touch()
    program = tmp_path / "ridgeline"
    assert find_paths(tmp_path / "chosen", program).data == tmp_path / "chosen"
    assert find_paths(None, program).data == tmp_path / "environment"


def test_without_a_choice_the_systems_folders_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIDGELINE_DATA_DIR")
    paths = find_paths(program=tmp_path / "ridgeline")
    assert not paths.is_portable
    assert paths.data.name == "ridgeline"
    assert paths.data != paths.config


def test_long_paths_get_windows_prefix_only_there() -> None:
    long = Path("C:\\" + "x" * 300)
    assert str(long_path(long, on_windows=True)) == "\\\\?\\C:\\" + "x" * 300
    assert long_path(long, on_windows=False) == long
    assert long_path(Path("C:\\short"), on_windows=True) == Path("C:\\short")
    assert str(long_path(Path("\\\\server\\" + "x" * 300), on_windows=True)).startswith("\\\\?\\UNC\\server\\")
