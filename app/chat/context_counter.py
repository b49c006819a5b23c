"""ContextCounter: asks the engine how many tokens a chat with its draft takes, once typing pauses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer, Signal

from engine.commands import Message
from engine.events import ContextMeasured

if TYPE_CHECKING:
    from app.bridge import EngineBridge

_PAUSE_MILLISECONDS = 200

# chat_id, draft -> what would be sent; None while the chat generates (its steps count) or is gone
MakePrompt = Callable[[str, str], tuple[Message, ...] | None]


class ContextCounter(QObject):
    """The count is the engine's own: tokens of the rendered template, never an estimate from the text's length."""

    counted = Signal(str, int)  # chat_id, tokens

    def __init__(self, bridge: EngineBridge, make_prompt: MakePrompt) -> None:
        super().__init__()
        self._bridge = bridge
        self._make_prompt = make_prompt
        self._wanted: tuple[str, str] | None = None
        self._query: tuple[int, str] | None = None  # only the newest question's answer counts
        self._timer = QTimer(self, interval=_PAUSE_MILLISECONDS, singleShot=True)
        self._timer.setObjectName("context count")
        self._timer.timeout.connect(self._ask)
        bridge.context_measured.connect(self._on_context_measured)
        bridge.model_loaded.connect(self._on_model_loaded)

    def want(self, chat_id: str, draft: str) -> None:
        self._wanted = (chat_id, draft)
        self._timer.start()

    def close(self) -> None:
        self._timer.stop()

    def _ask(self) -> None:
        if self._wanted is None:
            return
        chat_id, draft = self._wanted
        prompt = self._make_prompt(chat_id, draft)
        if prompt is None:
            return
        if all(message.role == "system" for message in prompt):
            self._query = None
            self.counted.emit(chat_id, 0)
            return
        self._query = (self._bridge.measure_context(prompt), chat_id)

    def _on_context_measured(self, measured: ContextMeasured) -> None:
        if self._query is None or self._query[0] != measured.query_id:
            return
        chat_id = self._query[1]
        self._query = None
        if self._make_prompt(chat_id, "") is not None:
            self.counted.emit(chat_id, measured.num_tokens)

    def _on_model_loaded(self, _: object) -> None:
        if self._wanted is not None:  # another model counts differently
            self._timer.start()
