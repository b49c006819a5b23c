"""A whole window over a scripted engine, for tests and screenshots. Only the engine is pretended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import theme
from app.application import Lifetime
from app.bridge import EngineBridge, MakeService
from app.chat.controller import ChatController
from app.chat.sidebar import Sidebar
from app.paths import Paths
from app.settings import SettingsStore
from app.store import ChatStore
from app.tuning.dock import Dock
from app.tuning.verdict import VerdictLabel
from app.window import MainWindow
from tests.app.scripted_service import Script, ScriptedService


@dataclass
class Parts:
    """What a test may want to reach."""

    window: MainWindow
    controller: ChatController
    bridge: EngineBridge
    settings: SettingsStore
    services: list[ScriptedService]
    dock: Dock

    @property
    def service(self) -> ScriptedService:
        return self.services[-1]

    def advance(self, steps: int = 1) -> None:
        """Let the engine do some steps and the bridge deliver what came of them."""
        for _ in range(steps):
            self.service.advance()
        self.bridge._drain()

    def run(self) -> None:
        self.service.run()
        self.bridge._drain()

    def load(self) -> None:
        self.window.chooser.load("starter")
        self.run()


def make_window(
    folder: Path,
    script: Script | None = None,
    threaded: bool = False,
    list_models: Callable[[], Sequence[Any]] = tuple,
    make_engine: MakeService | None = None,
) -> Parts:
    """A window with real store, settings, bridge and controller; dock and verdict are the real ones too.

    make_engine: a service other than the scripted one, the real one say; ``services`` stays empty then.
    """
    paths = Paths(folder, folder / "config", folder / "cache", folder / "logs").create()
    settings = SettingsStore(paths.settings_file)
    services: list[ScriptedService] = []

    def make_service(wake):
        services.append(ScriptedService(wake, script or Script(), threaded=threaded))
        return services[-1]

    bridge = EngineBridge(make_engine or make_service)
    controller = ChatController(ChatStore(paths.chats_file), bridge, settings)
    dock, verdict = Dock(bridge, controller, settings, list_models=list_models), VerdictLabel(bridge)
    sidebar = Sidebar(controller)
    window = MainWindow(controller, bridge, dock, settings, sidebar, verdict, list_models)
    window.chooser.find_starter = lambda: folder / "starter.gguf"  # no test fetches anything
    lifetime = Lifetime(bridge, controller, window.chooser.fetch, (dock, verdict, sidebar, window.panel.view))
    window.on_close, window.lifetime = lifetime.shut_down, lifetime
    bridge.setParent(window)
    controller.setParent(window)
    window.show_chat(controller.new_chat())
    return Parts(window, controller, bridge, settings, services, dock)


__all__ = ["Parts", "make_window", "theme"]
