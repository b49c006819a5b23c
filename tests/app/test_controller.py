"""ChatController over a real store on disk, the real bridge and a scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.bridge import EngineBridge
from app.chat.controller import ChatController
from app.settings import SettingsStore
from app.store import ChatStore
from tests.app.scripted_service import Script, ScriptedService


class Desk:
    """One run of the app without its widgets; ``restart`` is closing it and starting it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = Script(replies=("one two three four five",))
        self.open()

    def open(self) -> None:
        self.services: list[ScriptedService] = []
        self.bridge = EngineBridge(self._make)
        self.store = ChatStore(self.folder / "chats.db")
        self.controller = ChatController(self.store, self.bridge, SettingsStore(self.folder / "settings.json"))
        self.signals: list[tuple[str, tuple[Any, ...]]] = []
        for name in (
            "chats_changed", "message_appended", "message_text_grew", "message_changed",
            "stats_changed", "chat_reset", "context_counted", "storage_failed",
        ):  # fmt: skip
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
        for _ in range(count):
            self.service.advance()
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

    def restart(self) -> None:
        self.close()
        self.open()

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [args for key, args in self.signals if key == name]

    def texts(self, chat_id: str) -> list[tuple[str, str, str]]:
        return [(view.role, view.text, view.state) for view in self.controller.messages(chat_id)]


@pytest.fixture
def desk(tmp_path: Path, qapp: object) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    desk.load()
    yield desk
    desk.close()


def test_a_message_is_answered_and_survives_a_restart(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hello there")
    desk.run()
    wanted = [("user", "Hello there", "done"), ("assistant", "one two three four five", "done")]
    assert desk.texts(chat) == wanted
    assert "".join(args[2] for args in desk.of("message_text_grew")) == "one two three four five"
    desk.restart()
    assert desk.texts(chat) == wanted
    assert [row.title for row in desk.controller.chats()] == ["Hello there"]
