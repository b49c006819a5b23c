"""A program that chats without end until it is killed; used by test_store_kill.py.

It prints a line when the engine is given a message (after which the message must survive anything) and a line when a
reply is shown as finished (after which the reply must). ``python -m tests.app.kill_target FOLDER SEED``
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QCoreApplication

from app.bridge import EngineBridge
from app.chat.controller import ChatController
from app.chat.conversation import MessageView
from app.settings import SettingsStore
from app.store import ChatStore
from engine.commands import Command, Message, Submit
from tests.app.scripted_service import Script, ScriptedService


def say(kind: str, text: str) -> None:
    sys.stdout.write(json.dumps([kind, text]) + "\n")
    sys.stdout.flush()


class TellingService(ScriptedService):
    def post(self, command: Command) -> None:
        if isinstance(command, Submit):
            last = command.prompt[-1]
            assert isinstance(last, Message)
            say("asked", last.content)
        super().post(command)


def main(folder: Path, seed: int) -> None:
    app = QCoreApplication([])
    chance = random.Random(seed)
    counter = iter(range(1_000_000))

    def reply(_prompt: object) -> str:
        return f"reply {seed}-{next(counter)} " + "word " * chance.randrange(2, 60)

    def make(wake: Callable[[], None]) -> ScriptedService:
        return TellingService(wake, Script(replies=reply, step_seconds=0.001), threaded=True)

    bridge = EngineBridge(make)
    controller = ChatController(ChatStore(folder / "chats.db"), bridge, SettingsStore(folder / "settings.json"))

    def ask(chat_id: str) -> None:
        controller.send(chat_id, f"question {seed}-{next(counter)} " + "x" * chance.randrange(3000))

    def on_changed(chat_id: str, view: MessageView) -> None:
        if view.state == "done":
            say("finished", view.text)
            ask(chat_id if chance.random() < 0.7 else controller.new_chat())

    controller.message_changed.connect(on_changed)
    bridge.model_loaded.connect(lambda _: [ask(controller.new_chat()) for _ in range(4)])
    bridge.load_model("starter")
    app.exec()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
