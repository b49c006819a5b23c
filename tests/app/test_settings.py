"""Settings: read field by field, written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from app import settings as module
from app.settings import SamplingSettings, Settings, SettingsStore, write_atomically
from engine.params import SamplingParams


def read(tmp_path: Path, data: Any) -> SettingsStore:
    path = tmp_path / "settings.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return SettingsStore(path)


def test_what_is_set_is_there_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "settings.json"
    SettingsStore(path).update(theme="light", options={"weights": "int8"}, dock_width=400)
    again = SettingsStore(path).settings
    assert (again.theme, again.options, again.dock_width) == ("light", {"weights": "int8"}, 400)


def test_a_bad_value_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store = SettingsStore(tmp_path / "settings.json")
    with pytest.raises(ValueError, match="theme"):
        store.update(theme="purple")
    assert store.settings == Settings()
    assert not store.path.exists()


@pytest.mark.parametrize("field", sorted(Settings.model_fields))
@pytest.mark.parametrize("bad", [None, [], {"a": [None]}, "nonsense", 1e999, -5])
def test_one_bad_field_costs_only_that_field(tmp_path: Path, field: str, bad: Any) -> None:
    fine = {"theme": "dark", "model_source": "m", "system_prompt": "p", "dock_width": 400}
    store = read(tmp_path, {**fine, field: bad})
    for name, value in fine.items():
        if name != field:
            assert getattr(store.settings, name) == value
    assert store.message == ""


def test_each_bad_field_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {
        "sampling": {"temperature": None, "top_p": 0.5, "top_k": "many"},
        "options": {"weights": None, "prefix": "off"},
    }
    settings = read(tmp_path, data).settings
    assert settings.sampling == SamplingSettings(top_p=0.5)
    assert settings.options == {"prefix": "off"}
    for name in ("sampling.temperature", "sampling.top_k", "options.weights"):
        assert f"Settings: {name} is ignored" in caplog.text


def test_unknown_fields_are_kept_at_every_depth(tmp_path: Path) -> None:
    store = read(tmp_path, {"from_the_future": {"a": 1}, "sampling": {"mirostat": 2, "top_k": 3}})
    store.update(theme="dark")
    written = json.loads(store.path.read_text(encoding="utf-8"))
    assert written["from_the_future"] == {"a": 1}
    assert written["sampling"]["mirostat"] == 2
    assert written["sampling"]["top_k"] == 3


@pytest.mark.parametrize("content", ["", "\0\0\0\0", '{"theme": "dark"', "[1, 2]", "[" * 100_000])
def test_an_unreadable_file_is_kept_aside_with_a_message(tmp_path: Path, content: str) -> None:
    store = read(tmp_path, content)
    assert store.settings == Settings()
    assert "kept as" in store.message
    kept = list(tmp_path.glob("settings-unreadable-*.json"))
    assert [path.read_text(encoding="utf-8") for path in kept] == [content]
    store.update(theme="dark")
    assert SettingsStore(store.path).settings.theme == "dark"


def test_a_file_that_is_not_utf8_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(b"\xff\xfe{")
    assert "kept as" in SettingsStore(path).message


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SettingsStore(tmp_path / "settings.json")
    store.update(theme="dark")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    store.update(theme="light")
    assert store.settings.theme == "light"
    assert "No space left" in store.message
    assert "free some space" in store.message
    assert SettingsStore(store.path).settings.theme == "dark"
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_the_new_content_is_synced_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    seen: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(path.read_text()))
    write_atomically(path, "new")
    assert seen[0] == "old"
    assert path.read_text() == "new"


def test_numbered_migrations_run_once_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (
        lambda data: {**data, "trail": "a"},
        lambda data: {**data, "trail": data["trail"] + "b"},
    )
    monkeypatch.setattr(module, "MIGRATIONS", steps)
    monkeypatch.setattr(module, "VERSION", 2)
    store = read(tmp_path, {"theme": "dark"})
    assert store.settings.model_extra == {"trail": "ab"}
    assert (store.settings.version, store.settings.theme) == (2, "dark")
    store.update(theme="light")
    assert SettingsStore(store.path).settings.model_extra == {"trail": "ab"}


def test_a_newer_versions_number_and_fields_are_kept(tmp_path: Path) -> None:
    store = read(tmp_path, {"version": 99, "theme": "dark", "new": True})
    store.update(dock_width=333)
    written = json.loads(store.path.read_text(encoding="utf-8"))
    assert (written["version"], written["theme"], written["new"]) == (99, "dark", True)


def test_sampling_settings_become_parameters() -> None:
    params = SamplingSettings(temperature=0, top_k=5, seed=7, max_tokens=9, stop=("END", "")).to_params()
    assert params == SamplingParams(temperature=0, top_k=5, seed=7, max_tokens=9, stop=("END",))
    assert SamplingSettings().to_params() == SamplingParams()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["temperature", "stop", "x"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(Settings.model_fields)), _JSON, max_size=6))
@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_object_gives_usable_settings(data: dict[str, Any]) -> None:
    settings = module._validated(module._migrated(data))
    assert 320 <= settings.dock_width <= 560
    settings.sampling.to_params()
    json.dumps(settings.model_dump(mode="json"))
