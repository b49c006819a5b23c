"""The preferences dialog: built from the schema, checked while typing, kept at once, undone when reset by mistake."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QComboBox, QLineEdit, QPlainTextEdit
from pytestqt.qtbot import QtBot

from app import theme
from app.preferences import places as places_module
from app.preferences.dialog import PreferencesDialog
from app.preferences.table import SECTIONS, preferences
from app.settings import SamplingSettings, Settings, SettingsStore


@pytest.fixture
def store(tmp_path: Path) -> SettingsStore:
    return SettingsStore(tmp_path / "settings.json")


@pytest.fixture
def dialog(qtbot: QtBot, qapp: QApplication, store: SettingsStore) -> Iterator[PreferencesDialog]:
    theme.apply(qapp, "dark")
    made = PreferencesDialog(store)
    qtbot.addWidget(made)
    made.show()
    yield made
    made.close()


def type_into(dialog: PreferencesDialog, key: str, text: str) -> None:
    """As a person would: empty the field, then type."""
    editor = dialog.rows[key].editor
    editor.setFocus()
    if isinstance(editor, QLineEdit | QPlainTextEdit):
        editor.selectAll()
        QTest.keyClick(editor, Qt.Key.Key_Delete)
    QTest.keyClicks(editor, text)


def on_disk(store: SettingsStore) -> Settings:
    return SettingsStore(store.path).settings


# ---- the table


def test_every_preference_says_what_it_is_and_how_to_choose() -> None:
    assert len({preference.key for preference in preferences()}) == len(preferences()) >= 11
    for preference in preferences():
        assert preference.title
        assert preference.description.endswith(".")
        assert "!" not in preference.title + preference.description
        assert (preference.kind == "choice") == bool(preference.choices)
        assert all(label != value for value, label in preference.choices)
    assert all(section.note for section in SECTIONS)


def test_each_value_reads_back_as_it_is_shown() -> None:
    sampling = SamplingSettings(temperature=0, top_p=0.123456789, seed=7, max_tokens=9, stop=("END", "a\nb", "ü"))
    settings = Settings(theme="light", sampling=sampling, system_prompt="Be\nbrief.", context_policy="stop")
    for preference in preferences():
        for whole in (settings, Settings()):
            shown = preference.shown(whole)
            assert preference.check(whole, shown) == preference.value(whole), preference.key


@pytest.mark.parametrize(
    ("key", "typed", "words"),
    [
        ("sampling.temperature", "-1", "It must be 0 or more."),
        ("sampling.temperature", "", "Write a number, such as 0.7."),
        ("sampling.temperature", "0,7", "Write a number, such as 0.7."),
        ("sampling.temperature", "nan", "Write a number, such as 0.7."),
        ("sampling.top_p", "1.5", "It must be 1 or less."),
        ("sampling.repetition_penalty", "0", "It must be more than 0."),
        ("sampling.top_k", "2.5", "Write a whole number."),
        ("sampling.max_tokens", "0", "It must be 1 or more."),
        ("sampling.max_tokens", "1,000", "Write a whole number."),
        ("sampling.seed", "1" * 30, "It must be 9,223,372,036,854,775,807 or less."),
        ("sampling.seed", "x", "Write a whole number."),
    ],
)
def test_what_is_wrong_is_said_in_plain_words(key: str, typed: str, words: str) -> None:
    preference = next(preference for preference in preferences() if preference.key == key)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        preference.check(Settings(), typed)
    assert str(caught.value) == words


# ---- the dialog


def test_the_dialog_has_an_editor_for_every_preference_and_shows_its_value(dialog: PreferencesDialog) -> None:
    assert list(dialog.rows) == [preference.key for preference in preferences()]
    kinds = {"choice": QComboBox, "number": QLineEdit, "text": QPlainTextEdit, "lines": QPlainTextEdit}
    for row in dialog.rows.values():
        assert isinstance(row.editor, kinds[row.preference.kind])
        assert row.shown == row.preference.shown(Settings())
        assert row.editor.accessibleName() == row.preference.title
    assert dialog.rows["sampling.seed"].editor.placeholderText() == "random"


def test_what_is_typed_is_kept_on_disk_and_told(dialog: PreferencesDialog, store: SettingsStore, qtbot: QtBot) -> None:
    with qtbot.waitSignal(dialog.changed, timeout=2000) as told:
        type_into(dialog, "sampling.temperature", "0.25")
    assert told.args == [frozenset({"sampling.temperature"})]
    assert on_disk(store).sampling.temperature == 0.25
    type_into(dialog, "system_prompt", "Be brief.")
    type_into(dialog, "sampling.stop", "END")
    type_into(dialog, "sampling.max_tokens", "64")
    dialog.keep()
    kept = on_disk(store)
    assert (kept.system_prompt, kept.sampling.stop, kept.sampling.max_tokens) == ("Be brief.", ("END",), 64)
    type_into(dialog, "sampling.max_tokens", "")
    dialog.keep()
    assert on_disk(store).sampling.max_tokens is None


def test_a_wrong_value_is_marked_at_once_and_never_kept(dialog: PreferencesDialog, store: SettingsStore) -> None:
    row = dialog.rows["sampling.top_p"]
    type_into(dialog, "sampling.top_p", "1.5")
    assert row.problem.isVisible()
    assert row.problem.text() == "It must be 1 or less. Until then it stays 1."
    assert row.editor.property("wrong") is True
    dialog.refresh()
    assert row.shown == "1.5"  # what is being typed is left alone
    dialog.keep()
    assert on_disk(store).sampling.top_p == 1.0
    QTest.keyClick(row.editor, Qt.Key.Key_Backspace)
    QTest.keyClick(row.editor, Qt.Key.Key_Backspace)
    assert row.shown == "1"
    assert row.problem.isHidden()
    assert row.editor.property("wrong") is False


def test_closing_keeps_the_last_words_and_forgets_what_was_wrong(
    dialog: PreferencesDialog, store: SettingsStore
) -> None:
    type_into(dialog, "sampling.top_k", "40")
    type_into(dialog, "sampling.min_p", "7")
    QTest.keyClick(dialog, Qt.Key.Key_Escape)
    assert dialog.isHidden()
    assert (on_disk(store).sampling.top_k, on_disk(store).sampling.min_p) == (40, 0.0)
    dialog.show()
    assert dialog.rows["sampling.min_p"].shown == "0"
    assert dialog.rows["sampling.min_p"].problem.isHidden()


def test_a_choice_is_kept_at_once(dialog: PreferencesDialog, store: SettingsStore) -> None:
    editor = dialog.rows["context_policy"].editor
    assert isinstance(editor, QComboBox)
    assert editor.currentText() == "Leave out the oldest messages"
    editor.setFocus()
    QTest.keyClick(editor, Qt.Key.Key_Down)
    QTest.keyClick(editor, Qt.Key.Key_Up)
    other = next(value for value, _ in dialog.rows["context_policy"].preference.choices if value != "drop_oldest")
    editor.setCurrentIndex(editor.findData(other))
    editor.activated.emit(editor.currentIndex())
    assert on_disk(store).context_policy == "stop"


def test_reset_gives_the_defaults_and_can_be_undone(dialog: PreferencesDialog, store: SettingsStore) -> None:
    store.update(dock_width=333)
    type_into(dialog, "system_prompt", "A long and careful prompt.")
    type_into(dialog, "sampling.seed", "7")
    dialog.reset_button.click()
    assert on_disk(store).system_prompt == ""
    assert on_disk(store).sampling == SamplingSettings()
    assert dialog.rows["system_prompt"].shown == ""
    assert dialog.reset_button.text() == "Undo reset"
    dialog.reset_button.click()
    assert on_disk(store).system_prompt == "A long and careful prompt."
    assert on_disk(store).sampling.seed == 7
    assert dialog.reset_button.text() == "Reset to defaults"
    assert on_disk(store).dock_width == 333  # what is no preference stays


def test_tab_goes_through_every_editor_from_top_to_bottom(dialog: PreferencesDialog, qtbot: QtBot) -> None:
    dialog.activateWindow()
    qtbot.waitUntil(dialog.isActiveWindow, timeout=2000)
    editors = [row.editor for row in dialog.rows.values()]
    assert QApplication.focusWidget() is editors[0]
    seen = []
    for _ in range(len(editors)):
        focused = QApplication.focusWidget()
        seen.append(focused)
        QTest.keyClick(focused, Qt.Key.Key_Tab)
    assert seen == editors
    assert QApplication.focusWidget() is dialog.places.rows[0].button


def test_a_full_disk_is_told_in_the_dialog(dialog: PreferencesDialog, store: SettingsStore, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("app.settings.write_atomically", full)
    type_into(dialog, "sampling.top_k", "3")
    dialog.keep()
    assert dialog.trouble.isVisible()
    assert "No space left" in dialog.trouble.text()


# ---- files


def test_folders_are_shown_and_opened(dialog: PreferencesDialog, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(places_module, "open_folder", opened.append)
    for row in dialog.places.rows:
        row.button.click()
    assert len(opened) == len(dialog.places.rows) == 4
    paths = places_module.find_paths()
    assert opened[1:] == [paths.data, paths.settings_file.parent, paths.log_file.parent]


def test_diagnostics_are_collected_on_their_own_thread_and_copied(
    qtbot: QtBot, qapp: QApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def report() -> str:
        threads.append(threading.current_thread().name)
        return "python 3\nmodels 2"

    places = places_module.Places(make_report=report)
    qtbot.addWidget(places)
    places.copy.click()
    assert not places.copy.isEnabled()
    qtbot.waitUntil(places.copy.isEnabled, timeout=3000)
    assert threads == ["diagnostics"]
    assert QGuiApplication.clipboard().text() == "python 3\nmodels 2"
    assert places.said.text().startswith("Copied, 2 lines.")


def test_the_report_is_what_doctor_prints_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"python": "3", "note": "token=abcdefghijkl", "problems": [], "notes": []}
    monkeypatch.setattr(places_module.doctor, "examine", lambda: facts)
    text = places_module.diagnostics()
    assert "python" in text
    assert "abcdefghijkl" not in text
