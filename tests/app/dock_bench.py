"""A dock over a stepwise scripted service, with a clock that the test moves. For the tests of app/tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from app.bridge import EngineBridge
from app.tuning.dock import Dock
from app.tuning.pace import Pace
from engine.commands import SetOptions
from engine.params import SamplingParams
from tests.app.scripted_service import Script, ScriptedService


class FakeChats:
    """What Live asks of the chat controller: request n belongs to chat cN."""

    def owner_of(self, request_id: int) -> str | None:
        return f"c{request_id}"

    def colour_index(self, chat_id: str) -> int:
        return int(chat_id[1:]) - 1

    def title(self, chat_id: str) -> str:
        return f"Chat {chat_id[1:]}"


class FakeSettings:
    """A settings store whose fields may be anything."""

    def __init__(self, dock_tab: Any = 0) -> None:
        self.settings = SimpleNamespace(dock_tab=dock_tab, drafts={})

    def update(self, **changes: Any) -> object:
        self.settings = SimpleNamespace(**{**vars(self.settings), **changes})
        return self.settings


class DockBench:
    """dock, bridge, service; ``now`` is the dock's clock, kept at the service's scripted time by `steps`."""

    def __init__(self, qtbot, script: Script | None = None, list_models: Callable[[], Sequence[Any]] = tuple) -> None:
        self.script = script or Script(reply_tokens=500)
        self.services: list[ScriptedService] = []
        self.now = 1000.0
        self.settings = FakeSettings()
        self.bridge = EngineBridge(self._make)
        self.dock = Dock(
            *(self.bridge, FakeChats(), self.settings),
            clock=lambda: self.now,
            pace=Pace(num_cores=2),
            list_models=list_models,
        )
        self.dock.resize(372, 1000)
        qtbot.addWidget(self.dock)
        self._qtbot = qtbot

    def _make(self, wake):
        service = ScriptedService(wake, self.script)
        service.clock = self.now
        self.services.append(service)
        return service

    @property
    def service(self) -> ScriptedService:
        return self.services[-1]

    def load(self, **settings: str) -> DockBench:
        self.bridge.load_model("starter", settings)
        self.service.advance()
        self.drain()
        return self

    def chat(self, prompt: str = "one two three", **params: Any) -> int:
        return self.bridge.submit(prompt, SamplingParams(**params))

    def steps(self, count: int = 1) -> None:
        self.service.advance(count)
        self.now = self.service.clock
        self.drain()

    def drain(self) -> None:
        self._qtbot.waitUntil(lambda: not self.service._events)
        self.bridge._drain()

    def refresh(self, seconds: float = 1.5) -> None:
        """Time passes and the panel refreshes, numbers and words included."""
        self.now += seconds
        self.dock.refresher.refresh_now()

    def asked(self) -> list[dict[str, str]]:
        return [dict(command.changes) for command in self.service.posted if isinstance(command, SetOptions)]

    def close(self) -> None:
        self.dock.close()
        self.bridge.shutdown()
