"""Desk: the app without its widgets, for tests: a store on disk, the real bridge, a scripted engine driven by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.bridge import EngineBridge
from app.chat.controller import ChatController
from app.settings import SettingsStore
from app.store import ChatStore
from tests.app.scripted_service import Script, ScriptedService

SIGNALS = (
    "chats_changed", "message_appended", "message_text_grew", "message_changed",
    "stats_changed", "chat_reset", "context_counted", "storage_failed",
)  # fmt: skip


class Desk:
    """``signals`` holds (name, arguments) of all the controller said; ``restart`` closes the app and starts it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = Script(replies=("one two three four five",))
        self.open()

    def open(self) -> None:
        self.services: list[ScriptedService] = []
        self.bridge = EngineBridge(self._make)
        self.store = ChatStore(self.folder / "chats.db")
        self.settings = SettingsStore(self.folder / "settings.json")
        self.controller = ChatController(self.store, self.bridge, self.settings)
        self.signals: list[tuple[str, tuple[Any, ...]]] = []
        for name in SIGNALS:
            getattr(self.controller, name).connect(lambda *args, name=name: self.signals.append((name, args)))

    def _make(self, wake: Callable[[], None]) -> ScriptedService:
        service = ScriptedService(wake, self.script)
        self.services.append(service)
        return service

    @property
    def service(self) -> ScriptedService:
        return self.services[-1]

    def drain(self) -> None:
        self.bridge._drain()

    def step(self, count: int = 1) -> None:
        self.service.advance(count)
        self.drain()

    def run(self) -> None:
        self.service.run()
        self.drain()

    def load(self) -> None:
        self.bridge.load_model("starter")
        self.run()

    def close(self) -> None:
        self.bridge.shutdown()
        self.controller.close()

    def restart(self, load: bool = True) -> None:
        self.close()
        self.open()
        if load:
            self.load()

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [args for key, args in self.signals if key == name]

    def texts(self, chat_id: str) -> list[tuple[str, str, str]]:
        """(role, text, state) of each message that is shown."""
        return [(view.role, view.text, view.state) for view in self.controller.messages(chat_id)]

    def fill_disk(self) -> None:
        pages = self.store._connection.execute("PRAGMA page_count").fetchone()["page_count"]
        self.store._connection.execute(f"PRAGMA max_page_count = {pages}")

    def free_disk(self) -> None:
        self.store._connection.execute("PRAGMA max_page_count = 1000000")
