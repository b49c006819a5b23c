"""The whole window over a scripted engine: columns, model, chats, stop while loading, and an end that leaves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication, QKeySequence
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QComboBox, QLabel
from pytestqt.qtbot import QtBot

from app import theme
from app.actions import ACTIONS, fill_menu, help_rows
from app.application import build
from app.chat.markdown import BlockKind
from app.chat.panel import READING_WIDTH, reading_column
from app.dock_place import DOCK_NARROWEST, OVERLAY_BELOW
from app.paths import Paths, find_paths
from app.settings import SettingsStore
from app.store import ChatStore
from engine.commands import Abort, CancelLoad, LoadModel, Submit
from engine.events import ModelLoading, OptionsRefused
from tests.app.scripted_service import Script, ScriptedService
from tests.app.window_parts import Parts, make_window

Open = Callable[..., Parts]


@pytest.fixture
def open_window(qtbot: QtBot, qapp, tmp_path: Path):
    theme.apply(qapp, "dark")
    opened: list[Parts] = []

    def make(script: Script | None = None, width: int = 1280, **more: object) -> Parts:
        parts = make_window(tmp_path, script, **more)  # type: ignore[arg-type]
        opened.append(parts)
        qtbot.addWidget(parts.window)
        parts.window.resize(width, 800)
        parts.window.show()
        parts.window.activateWindow()
        qtbot.waitUntil(parts.window.isActiveWindow, timeout=2000)  # shortcuts work only in the active window
        return parts

    yield make
    for parts in opened:
        parts.window.close()


def texts(parts: Parts) -> list[str]:
    return [message.text for message in parts.controller.messages(parts.window.panel.chat_id)]


# ---- the table of actions


def test_no_shortcut_is_used_twice_and_every_action_has_one_handler(open_window: Open) -> None:
    shortcuts = [QKeySequence(text).toString() for entry in ACTIONS for text in entry.shortcuts]
    assert len(shortcuts) == len(set(shortcuts))
    assert all(shortcuts)
    parts = open_window()
    assert list(parts.window.actions_by_key) == [entry.key for entry in ACTIONS]


def test_menu_and_help_are_built_from_the_table(open_window: Open) -> None:
    window = open_window().window
    titles = [action.text() for action in window._menu.actions() if not action.isSeparator()]
    assert titles == [entry.title for entry in ACTIONS]
    helped = {title for _, title, _ in help_rows()}
    assert {entry.title for entry in ACTIONS if entry.shortcuts} <= helped
    window.show_help()
    dialog = next(child for child in window.children() if child.objectName() == "" and hasattr(child, "exec"))
    assert dialog is not None
    assert callable(fill_menu)


def test_no_exclamation_marks_in_words_of_the_window(open_window: Open) -> None:
    window = open_window().window
    words = [label.text() for label in window.findChildren(QLabel)]
    words += [f"{entry.title} {entry.help}" for entry in ACTIONS]
    assert [text for text in words if "!" in text] == []


# ---- columns


@pytest.mark.parametrize("width", [900, 1044, 1204, 1700, 2324])
def test_the_reading_column_is_the_same_with_the_dock_open_and_hidden(width: int) -> None:
    dock = 373
    with_dock = reading_column(width - dock, 0)
    without = reading_column(width, dock)
    assert with_dock == without
    assert with_dock[1] <= READING_WIDTH


def test_opening_the_dock_does_not_move_the_text(open_window: Open) -> None:
    window = open_window(width=1280).window
    assert window.is_dock_shown
    before = window.panel.view.column
    QTest.keyClick(window, Qt.Key.Key_J, Qt.KeyboardModifier.ControlModifier)
    assert not window.is_dock_shown
    assert window.panel.view.column == before
    QTest.keyClick(window, Qt.Key.Key_J, Qt.KeyboardModifier.ControlModifier)
    assert window.is_dock_shown
    assert window.panel.view.column == before
    assert window.dock.width() == 372


def test_the_sidebar_hides_and_shows(open_window: Open) -> None:
    window = open_window().window
    QTest.keyClick(window, Qt.Key.Key_B, Qt.KeyboardModifier.ControlModifier)
    assert window._sidebar.isHidden()
    window.panel.composer.edit.setFocus()
    QTest.keyClick(window.panel.composer.edit, Qt.Key.Key_K, Qt.KeyboardModifier.ControlModifier)
    assert window._sidebar.isVisible()
    assert window._sidebar.isAncestorOf(QApplication.focusWidget())


def test_a_narrow_window_lays_the_dock_over_the_chat(open_window: Open) -> None:
    window = open_window(width=OVERLAY_BELOW - 40).window
    assert window.is_overlay
    assert not window.is_dock_shown
    centre = window.panel.width()
    column = window.panel.view.column
    window.dock_place.toggle()
    assert window.is_dock_shown
    assert window.dock.width() >= DOCK_NARROWEST
    assert (window.panel.width(), window.panel.view.column) == (centre, column)
    window.resize(1280, 800)
    assert not window.is_overlay
    assert window.is_dock_shown
    assert window.splitter.indexOf(window.dock) == 2


# ---- the panel in its own window


def is_beside(parts: Parts) -> bool:
    return parts.window.splitter.indexOf(parts.window.dock) == 2


def test_the_panel_goes_into_its_own_window_and_back_and_the_text_stays(open_window: Open) -> None:
    parts = open_window(width=1280)
    window, dock = parts.window, parts.window.dock_place._dock
    column = window.panel.view.column
    dock.detach_button.click()
    assert window.dock_place.is_detached
    own = window.dock_place.own_window
    assert own is not None
    assert own.isVisible()
    assert dock.isVisible()
    assert dock.window() is own
    assert window.panel.view.column == column
    assert window.actions_by_key["detach"].isChecked()
    own.resize(900, 700)
    QTest.qWait(0)
    assert dock.width() == 900
    own.close()
    assert not window.dock_place.is_detached
    assert is_beside(parts)
    assert dock.isVisible()
    assert (window.dock.width(), window.panel.view.column) == (372, column)
    assert "own window" in dock.detach_button.toolTip()


def test_a_double_click_beside_the_tabs_and_the_keys_move_the_panel(open_window: Open) -> None:
    parts = open_window()
    window, dock = parts.window, parts.window.dock_place._dock
    QTest.mouseDClick(dock._tab_row, Qt.MouseButton.LeftButton, pos=dock._tab_row.rect().center())
    assert window.dock_place.is_detached
    both = Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier
    QTest.keyClick(window, Qt.Key.Key_J, both)
    assert not window.dock_place.is_detached
    assert is_beside(parts)


def test_a_detached_panel_hides_and_shows_as_a_whole(open_window: Open) -> None:
    window = open_window().window
    window.dock_place.toggle_detached()
    own = window.dock_place.own_window
    assert own is not None
    window.dock_place.toggle()
    assert own.isHidden()
    assert window.dock_place.is_detached
    assert not window.is_dock_shown
    window.dock_place.toggle()
    assert own.isVisible()


def test_a_detached_panel_stays_out_when_the_window_gets_narrow(open_window: Open) -> None:
    parts = open_window(width=1280)
    window = parts.window
    window.dock_place.toggle_detached()
    window.resize(OVERLAY_BELOW - 40, 700)
    assert window.dock_place.is_detached
    assert window.is_overlay
    window.dock_place.toggle_detached()
    assert window.dock.parent() is window
    assert window.is_dock_shown
    window.resize(1280, 800)
    assert is_beside(parts)
    assert window.dock.width() == 372


def test_a_detached_panel_is_found_again_where_it_was(open_window: Open) -> None:
    first = open_window()
    first.window.dock_place.toggle_detached()
    own = first.window.dock_place.own_window
    assert own is not None
    own.setGeometry(90, 60, 510, 420)
    first.window.close()
    assert own.isHidden()
    kept = first.settings.settings
    assert (kept.dock_detached, kept.dock_visible) == (True, True)
    again = open_window()
    other = again.window.dock_place.own_window
    assert other is not None
    assert other.isVisible()
    assert other.geometry() == own.geometry()
    again.window.dock_place.toggle_detached()
    again.window.close()
    assert not again.settings.settings.dock_detached


# ---- preferences


def test_preferences_open_from_the_keyboard_and_change_the_window_at_once(open_window: Open) -> None:
    parts = open_window()
    window = parts.window
    QTest.keyClick(window.panel.composer.edit, Qt.Key.Key_Comma, Qt.KeyboardModifier.ControlModifier)
    dialog = window._preferences
    assert dialog is not None
    assert dialog.isVisible()
    colours = dialog.rows["theme"].editor
    assert isinstance(colours, QComboBox)
    colours.setCurrentIndex(colours.findData("light"))
    colours.activated.emit(colours.currentIndex())
    assert not theme.current().is_dark
    assert window.actions_by_key["theme_light"].isChecked()
    window.set_theme("dark")
    assert colours.currentData() == "dark"
    window.show_preferences()
    assert window._preferences is dialog
    window.close()
    assert dialog.isHidden()


def test_the_meter_follows_the_policy_and_the_system_prompt(open_window: Open, qtbot: QtBot) -> None:
    parts = open_window(Script(window=60, replies=("Yes.",)))
    parts.load()
    panel = parts.window.panel
    panel.send("Hello")
    parts.run()
    assert "the oldest messages are left out" in panel.composer.meter.toolTip()
    parts.window.show_preferences()
    dialog = parts.window._preferences
    assert dialog is not None
    dialog.rows["context_policy"].edited.emit("stop")
    assert "is not sent" in panel.composer.meter.toolTip()

    def count() -> str:
        parts.run()
        return panel.composer.meter_label.text()

    qtbot.waitUntil(lambda: count() == "10 of 60 tokens", timeout=3000)
    dialog.rows["system_prompt"].edited.emit("word " * 60)
    dialog.keep()
    qtbot.waitUntil(lambda: count() == "74 of 60 tokens: more than fits", timeout=3000)


# ---- the model


def test_without_a_model_the_window_offers_three_ways_to_one(open_window: Open) -> None:
    parts = open_window()
    empty = parts.window.panel.empty
    assert all(row.isVisible() for row in empty.sources)
    assert not any(row.isVisible() for row in empty.examples)
    parts.window.panel.composer.set_text("Hello")
    QTest.keyClick(parts.window.panel.composer.edit, Qt.Key.Key_Return)
    assert parts.window.panel.composer.text == "Hello"
    assert parts.window.notice.isVisible()
    empty.sources[0].click()
    assert isinstance(parts.service.posted[0], LoadModel)
    parts.run()
    assert parts.window.chooser.pill.words == "SmolLM2 135M Instruct int4, CPU"
    assert all(row.isVisible() for row in empty.examples)
    assert not parts.window.notice.isVisible()


def test_an_example_prompt_is_answered(open_window: Open) -> None:
    parts = open_window(Script(replies=("Paris.",)))
    parts.load()
    parts.window.panel.empty.examples[2].click()
    parts.run()
    assert texts(parts) == ["What is the capital of France?", "Paris."]
    assert parts.window.panel.stack.currentWidget() is parts.window.panel.view
    assert "capital of France" in parts.window.windowTitle()


def test_progress_of_a_load_is_shown_and_can_be_cancelled(open_window: Open, qtbot: QtBot) -> None:
    script = Script(load_stages=tuple(("Reading weights", i / 100) for i in range(100)), load_pause_seconds=0.05)
    parts = open_window(script, threaded=True)
    parts.window.chooser.load("starter")
    qtbot.waitUntil(lambda: parts.window.chooser.pill.words.startswith("Reading weights"), timeout=3000)
    parts.window.chooser.popup.cancel.click()
    qtbot.waitUntil(lambda: not parts.window.chooser.is_loading, timeout=3000)
    assert any(isinstance(command, CancelLoad) for command in parts.service.posted)
    assert "stopped" in parts.window.notice.words.text()


def test_a_failed_load_says_why_beside_the_chat_and_chats_stay_usable(open_window: Open) -> None:
    script = Script(replies=("One.", "Two."))
    parts = open_window(script)
    parts.load()
    parts.window.panel.send("First")
    parts.run()
    script.fail_load = "broken.gguf is cut short: 10 of 98 MB. Fetch it again."
    parts.window.chooser.load("broken.gguf")
    parts.run()
    notice, view = parts.window.notice, parts.window.panel.view
    assert notice.words.text().startswith(script.fail_load)
    assert notice.isVisible()
    QTest.qWait(0)
    assert not notice.geometry().intersects(parts.window.panel.stack.geometry())
    notice.copy.click()
    assert QGuiApplication.clipboard().text().startswith(script.fail_load)
    assert [row.block.kind for row in view.transcript.rows if row.block] == [BlockKind.PLAIN, BlockKind.PARAGRAPH]
    script.fail_load = None
    parts.window.chooser.load("starter")
    parts.run()
    parts.window.panel.send("Second")
    parts.run()
    assert texts(parts)[-1] == "Two."


def test_recent_models_are_remembered(open_window: Open) -> None:
    parts = open_window()
    parts.load()
    assert list(parts.window.chooser._recent()) == ["starter"]
    assert parts.settings.settings.model_source == "starter"


def test_a_missing_starter_is_fetched_and_then_loaded(open_window: Open, qtbot: QtBot) -> None:
    parts = open_window()
    chooser = parts.window.chooser
    chooser.find_starter = lambda: None
    seen: list[str] = []

    def fetch(_folder, progress, cancelled):
        progress("Fetching SmolLM2", 0.5)
        while not seen:
            time.sleep(0.01)
        return Path("starter.gguf")

    chooser.fetch._fetch = fetch
    parts.window.panel.empty.sources[0].click()
    qtbot.waitUntil(lambda: chooser.pill.words == "Fetching SmolLM2 50%", timeout=3000)
    assert not parts.services  # nothing was loaded yet
    seen.append("go on")
    qtbot.waitUntil(lambda: bool(parts.services), timeout=3000)
    parts.run()
    assert chooser.info is not None


def test_a_fetch_that_fails_says_why_and_a_cancelled_one_says_nothing(open_window: Open, qtbot: QtBot) -> None:
    parts = open_window()
    chooser = parts.window.chooser
    chooser.find_starter = lambda: None

    def offline(_folder, progress, cancelled):
        raise ValueError("This machine is offline. Connect it and try again.")

    chooser.fetch._fetch = offline
    chooser.get_starter()
    qtbot.waitUntil(lambda: not chooser.is_loading, timeout=3000)
    assert parts.window.notice.words.text() == "This machine is offline. Connect it and try again."
    assert parts.window.notice.remedy.text() == "Try again"

    def endless(_folder, progress, cancelled):
        while not cancelled():
            time.sleep(0.01)
        raise ValueError("cancelled")

    chooser.fetch._fetch = endless
    parts.window.notice.remedy.click()
    assert chooser.is_loading
    chooser.popup.cancel.click()
    qtbot.waitUntil(lambda: not chooser.is_loading, timeout=3000)
    assert not parts.window.notice.isVisible()


def test_reading_the_weights_again_is_shown_and_ends_either_way(open_window: Open) -> None:
    parts = open_window()
    parts.load()
    pill = parts.window.chooser.pill
    parts.bridge.set_options({"weights": "int8"})
    parts.run()
    assert pill.words == "SmolLM2 135M Instruct int8, CPU"
    parts.service.emit(ModelLoading("Reading weights", 0.5), OptionsRefused({"weights": "none"}, "Stopped."))
    parts.bridge._drain()
    assert pill.words == "SmolLM2 135M Instruct int8, CPU"
    parts.service.emit(ModelLoading("Reading weights", 0.5))
    parts.bridge._drain()
    assert pill.words == "Reading weights 50%"
    parts.service.emit(OptionsRefused({"weights": "none"}, "Stopped."))
    parts.bridge._drain()
    assert pill.words == "SmolLM2 135M Instruct int8, CPU"
    assert not parts.window.chooser.is_loading


def test_an_engine_error_is_said_once(open_window: Open) -> None:
    parts = open_window()
    parts.load()
    notice = parts.window.notice
    parts.service.fail("The template of this model cannot render the chat.")
    parts.bridge._drain()
    assert notice.isVisible()
    notice.close_button.click()
    parts.service.fail("The template of this model cannot render the chat.")
    parts.bridge._drain()
    assert not notice.isVisible()


# ---- replies


def test_stop_works_while_the_model_loads(open_window: Open) -> None:
    """FIELD 46: the request waits behind the load and is taken back."""
    parts = open_window()
    parts.window.chooser.load("starter")
    parts.window.panel.send("Are you there?")
    composer = parts.window.panel.composer
    assert composer.button.text() == "Stop"
    composer.button.click()
    assert composer.button.text() == "Send"
    posted = parts.service.posted
    assert [type(command) for command in posted if isinstance(command, Submit | Abort)] == [Submit, Abort]
    parts.run()
    message = parts.controller.messages(parts.window.panel.chat_id)[-1]
    assert (message.state, message.text) == ("stopped", "")


def test_escape_stops_just_after_sending(open_window: Open) -> None:
    parts = open_window(Script(reply_tokens=200))
    parts.load()
    parts.window.panel.send("Go on")
    QTest.keyClick(parts.window.panel.composer.edit, Qt.Key.Key_Escape)
    assert not parts.window.panel.composer.is_generating
    parts.run()
    assert parts.controller.messages(parts.window.panel.chat_id)[-1].state == "stopped"


def test_a_reply_streams_into_the_view_and_gets_its_figures(open_window: Open) -> None:
    parts = open_window(Script(replies=("Ice **floats**.\n\nIt does.",)))
    parts.load()
    parts.window.panel.composer.set_text("Why?")
    QTest.keyClick(parts.window.panel.composer.edit, Qt.Key.Key_Return)
    assert parts.window.panel.composer.text == ""
    parts.run()
    rows = parts.window.panel.view.transcript.rows
    assert [row.block.html for row in rows if row.block and row.block.html] == ["Ice <b>floats</b>.", "It does."]
    assert "tokens" in rows[-1].text
    assert parts.window.panel.composer.meter_label.text().endswith("of 8,192 tokens")


def test_regenerate_edit_and_branches_from_the_keyboard(open_window: Open) -> None:
    parts = open_window(Script(replies=("First answer.", "Second answer.", "Third answer.")))
    parts.load()
    panel = parts.window.panel
    panel.send("Question")
    parts.run()
    QTest.keyClick(parts.window, Qt.Key.Key_R, Qt.KeyboardModifier.ControlModifier)
    parts.run()
    assert texts(parts) == ["Question", "Second answer."]
    assert panel.view.transcript.rows[-1].branch == "2 of 2"
    panel.view.branch_requested.emit(panel.view.transcript.rows[-1].message_id, 0)
    assert texts(parts) == ["Question", "First answer."]
    QTest.keyClick(parts.window, Qt.Key.Key_E, Qt.KeyboardModifier.ControlModifier)
    assert panel.composer.text == "Question"
    panel.composer.set_text("Better question")
    QTest.keyClick(panel.composer.edit, Qt.Key.Key_Return)
    parts.run()
    assert texts(parts) == ["Better question", "Third answer."]


def test_drafts_stay_with_their_chats(open_window: Open) -> None:
    parts = open_window()
    parts.load()
    panel = parts.window.panel
    panel.send("Hello")
    parts.run()
    first = panel.chat_id
    panel.composer.set_text("half a thought")
    parts.window.new_chat()
    assert panel.composer.text == ""
    parts.window.show_chat(first)
    assert panel.composer.text == "half a thought"


def test_another_chat_generates_while_this_one_is_shown(open_window: Open) -> None:
    parts = open_window(Script(reply_tokens=50))
    parts.load()
    panel = parts.window.panel
    panel.send("Long one")
    parts.advance(5)
    first = panel.chat_id
    parts.window.new_chat()
    assert not panel.composer.is_generating
    parts.run()
    assert parts.controller.messages(first)[-1].state == "done"
    assert panel.view.transcript.rows == [] or panel.chat_id != first


def test_deleting_the_open_chat_opens_an_empty_one(open_window: Open) -> None:
    parts = open_window()
    parts.load()
    parts.window.panel.send("Hello")
    parts.run()
    gone = parts.window.panel.chat_id
    parts.controller.delete(gone)
    assert parts.window.panel.chat_id != gone
    assert parts.window.panel.stack.currentWidget() is not parts.window.panel.view


# ---- beginning and end


def test_closing_ends_the_engine_thread_and_keeps_the_layout(open_window: Open, qtbot: QtBot) -> None:
    parts = open_window(Script(reply_tokens=10_000), threaded=True)
    parts.window.chooser.load("starter")
    qtbot.waitUntil(lambda: parts.window.chooser.info is not None, timeout=5000)
    parts.window.panel.send("Talk on")
    qtbot.waitUntil(lambda: len(texts(parts)[-1]) > 10, timeout=5000)
    parts.window.toggle_sidebar()
    service = parts.service
    parts.window.close()
    assert parts.window.lifetime.has_ended is True
    assert not service.is_alive
    assert not [thread for thread in threading.enumerate() if "scripted" in thread.name or "engine" in thread.name]
    assert parts.settings.settings.sidebar_visible is False
    assert parts.settings.settings.window_geometry


def test_closing_while_the_model_loads_ends_too(open_window: Open) -> None:
    parts = open_window(Script(load_pause_seconds=0.2), threaded=True)
    parts.window.chooser.load("starter")
    parts.window.close()
    assert parts.window.lifetime.has_ended is True
    assert not parts.service.is_alive


@pytest.mark.parametrize("geometry", ["", "not base64 at all", "AdnQywADAAD//", "é"])
def test_a_damaged_geometry_opens_a_window_on_the_screen(open_window: Open, tmp_path: Path, geometry: str) -> None:
    SettingsStore(Paths(tmp_path, tmp_path / "config", tmp_path, tmp_path).settings_file).update(
        window_geometry=geometry
    )
    window = open_window().window
    screen = QGuiApplication.primaryScreen().availableGeometry()
    assert screen.intersects(window.geometry())
    assert window.width() >= 560


def test_the_window_does_without_torch(tmp_path: Path) -> None:
    """Importing and building everything must not bring torch to the GUI thread: the window is up before it."""
    code = (
        "import sys\n"
        "from app.application import build\n"
        "app, window = build()\n"
        "window.show()\n"
        "heavy = [n for n in ('torch', 'transformers', 'numba') if n in sys.modules]\n"
        "window.close()\n"
        "print(heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


RUN = """
import sys, threading
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication
from app import application
from tests.app.scripted_service import Script, ScriptedService
service = []
def make(wake):
    service.append(ScriptedService(wake, Script(reply_tokens=100000), threaded=True))
    return service[-1]
application.make_engine_service = make
def act():
    window = next(w for w in QApplication.topLevelWidgets() if w.objectName() == "" and hasattr(w, "panel"))
    if window.chooser.info is None:
        QTimer.singleShot(20, act)
        return
    window.panel.send("Hello")
    QTimer.singleShot(200, window.close)
application.qt_application()
QTimer.singleShot(0, act)
code = application.run("starter")
print(code, service[0].is_alive, [t.name for t in threading.enumerate()])
"""


def test_run_ends_in_the_middle_of_a_reply_and_leaves_no_thread(tmp_path: Path) -> None:
    """FIELD 46: the process is gone, exit code 0; what had streamed is on disk."""
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "0 False ['MainThread']", done.stderr[-2000:]
    assert done.returncode == 0
    store = ChatStore(find_paths().chats_file)
    (chat,) = store.conversations()
    question, reply = store.messages(chat.conversation_id)
    store.close()
    assert question.text == "Hello"
    assert reply.text


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no polite kill")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_closes_the_window_in_good_order(kind: signal.Signals) -> None:
    """FIELD 46: Ctrl+C in the terminal, or a kill, while a reply streams."""
    code = RUN.replace("QTimer.singleShot(200, window.close)", "print('ready', flush=True)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(kind)
        assert process.stdout.read() == "0 False ['MainThread']\n"
    assert process.returncode == 0


def test_the_model_is_loaded_only_after_the_window_was_drawn(qtbot: QtBot, tmp_path: Path) -> None:
    services: list[ScriptedService] = []

    def make(wake: Callable[[], None]) -> ScriptedService:
        services.append(ScriptedService(wake))
        return services[-1]

    paths = Paths(tmp_path, tmp_path / "config", tmp_path / "cache", tmp_path / "logs")
    _, window = build(paths=paths, make_service=make, model="some.gguf", theme_mode="dark")
    qtbot.addWidget(window)
    try:
        QTest.qWait(50)
        assert services == []
        window.show()
        qtbot.waitUntil(lambda: bool(services) and bool(services[0].posted), timeout=3000)
        assert services[0].posted[0] == LoadModel("some.gguf", {})
    finally:
        window.close()
