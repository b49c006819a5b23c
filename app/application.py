"""The application: wires paths, settings, store, bridge, controller and window, and takes them down again.

Shutdown has three stages, and none can be skipped by a slow one: the window goes and what is unsaved is written; the
engine thread is asked to end and waited for; what is left is named in the log, and the process ends.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from PySide6.QtWidgets import QApplication, QWidget

from app import log, theme
from app.bridge import EngineBridge, Service
from app.chat.controller import ChatController
from app.chat.sidebar import Sidebar
from app.library import catalog
from app.paths import Paths, find_paths
from app.settings import SettingsStore
from app.signals import ClosesOnSignals
from app.starter_fetch import StarterFetch
from app.store import ChatStore
from app.window import MainWindow
from engine.service import EngineService

if TYPE_CHECKING:
    from app.tuning.dock import Dock

logger = logging.getLogger(__name__)

MakeService = Callable[[Callable[[], None]], Service]
NOT_ENDED = "The engine thread did not end in time; the process ends without it."


class Lifetime:
    """Everything that must end, in the order of its ending.

    Attributes:
        has_ended: the engine thread is gone; None before shutdown.
    """

    def __init__(
        self, bridge: EngineBridge, controller: ChatController, fetch: StarterFetch, panels: Sequence[QWidget]
    ) -> None:
        self._bridge, self._controller, self._fetch, self._panels = bridge, controller, fetch, panels
        self.has_ended: bool | None = None

    def shut_down(self) -> None:
        """Once: stop what draws, write what streams, end the engine thread."""
        if self.has_ended is not None:
            return
        for panel in self._panels:
            panel.close()
        self._fetch.close()
        try:
            self._controller.close()
        finally:
            self.has_ended = self._bridge.shutdown()
        if not self.has_ended:
            logger.error(NOT_ENDED)


def make_engine_service(wake: Callable[[], None]) -> Service:
    """The real engine; torch is imported on its thread with the first model."""
    return EngineService(wake, find=catalog.resolve, machine_file=find_paths().machine_file)


def qt_application() -> QApplication:
    """The QApplication, made on first use, with the names that desktops show."""
    existing = QApplication.instance()
    app = existing if isinstance(existing, QApplication) else QApplication(sys.argv[:1])
    app.setApplicationName("Ridgeline")
    app.setApplicationDisplayName("")
    app.setDesktopFileName("ridgeline")
    return app


def build(
    paths: Paths | None = None,
    settings: SettingsStore | None = None,
    make_service: MakeService | None = None,
    model: str | None = None,
    theme_mode: theme.Mode | None = None,
) -> tuple[QApplication, MainWindow]:
    """The window with everything behind it, not yet shown. ``model`` overrides the remembered one.

    Raises ValueError with the remedy when the data folders cannot be made.
    """
    where = (paths or find_paths()).create()
    app = qt_application()
    kept = settings or SettingsStore(where.settings_file)
    theme.apply(app, theme_mode or kept.settings.theme)
    bridge = EngineBridge(make_service or make_engine_service)
    controller = ChatController(ChatStore(where.chats_file), bridge, kept)
    dock, verdict = _make_dock(bridge, controller, kept)
    sidebar = Sidebar(controller)
    window = MainWindow(
        controller, bridge, dock, kept, sidebar=sidebar, verdict=verdict, list_models=lambda: catalog.models()
    )
    lifetime = Lifetime(bridge, controller, window.chooser.fetch, (dock, verdict, sidebar, window.panel.view))
    window.on_close = lifetime.shut_down
    window.lifetime = lifetime
    for part in (bridge, controller):
        part.setParent(window)
    _open_first_chat(window, controller, kept)
    _say_troubles(window, controller, kept)
    # Importing torch holds the interpreter for seconds, even on its own thread: the window is painted first.
    window.first_painted.connect(lambda: window.chooser.load(model or kept.settings.model_source))
    return app, window


def _make_dock(bridge: EngineBridge, controller: ChatController, settings: SettingsStore) -> tuple[Dock, QWidget]:
    from app.tuning.dock import Dock
    from app.tuning.verdict import VerdictLabel

    dock = Dock(bridge, controller, settings, list_models=lambda: catalog.models())
    return dock, VerdictLabel(bridge)


def _open_first_chat(window: MainWindow, controller: ChatController, settings: SettingsStore) -> None:
    known = {chat.chat_id for chat in controller.chats()}
    last = settings.settings.last_chat
    window.show_chat(last if last in known else controller.new_chat())


def _say_troubles(window: MainWindow, controller: ChatController, settings: SettingsStore) -> None:
    """What was wrong with the files at start; the chats file first, for it matters more."""
    words = controller.trouble or settings.message
    if words:
        window.panel.say_trouble(words)


def run(model: str | None = None) -> int:
    """Open the window and stay until it is closed; the exit code."""
    paths = find_paths().create()
    log.start_logging(paths.log_file)
    app, window = build(paths=paths, model=model)
    signals = ClosesOnSignals(window)
    window.show()
    code = app.exec()
    signals.close()
    window.lifetime.shut_down()  # the session may end without a close event
    if window.lifetime.has_ended is False:
        logging.shutdown()
        os._exit(code)  # a native call that never returns must not keep the process (FIELD 46)
    return code
