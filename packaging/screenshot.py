"""Draw the README's picture: the real window, the real engine, the starter model, three chats at once.

    python packaging/screenshot.py [FILE]

Nothing is staged but the questions and one flipped switch. The picture is taken while replies stream.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "resources" / "screenshot.png"
SIZE = (1440, 900)
PATIENCE_SECONDS = 240.0
QUESTIONS = (
    "Write a short poem about the sea.",
    "What is a good breakfast?",
    "Why does ice float on water? Answer in two short paragraphs.",
)
FLIPPED = {"activations": "int8"}
SECONDS_BEFORE_THE_FLIP = SECONDS_AFTER_IT = 10.0
_CHARACTERS_WANTED = 420  # of the shown reply, before the picture is taken


def wait_until(done: Callable[[], bool], what: str) -> None:
    """Run the event loop until ``done``; RuntimeError after a long while."""
    from PySide6.QtWidgets import QApplication

    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited too long for {what}")
        QApplication.processEvents()
        time.sleep(0.01)


def main(arguments: list[str]) -> int:
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    target = Path(arguments[0]) if arguments else FILE
    with tempfile.TemporaryDirectory() as data:
        os.environ["RIDGELINE_DATA_DIR"] = data
        draw(target)
    print(target)
    return 0


def draw(target: Path) -> None:
    """Open the window, ask, and save what it looks like to ``target`` (PNG)."""
    from app.application import build
    from app.bridge import EngineBridge
    from app.chat.controller import ChatController

    app, window = build(model="starter", theme_mode="dark")
    try:
        controller = window.findChild(ChatController)
        bridge = window.findChild(EngineBridge)
        assert isinstance(controller, ChatController)
        assert isinstance(bridge, EngineBridge)
        loaded: list[object] = []
        bridge.model_loaded.connect(loaded.append)
        window.resize(*SIZE)
        window.show()
        wait_until(lambda: bool(loaded), "the model")
        controller.set_sampling(temperature=0.6, seed=3, max_tokens=6000)
        for question in QUESTIONS[:-1]:
            ask(controller, window.show_chat, question)
        pause(SECONDS_BEFORE_THE_FLIP)
        bridge.set_options(FLIPPED)
        pause(SECONDS_AFTER_IT)
        shown = ask(controller, window.show_chat, QUESTIONS[-1])
        wait_until(lambda: reply_length(controller, shown) >= _CHARACTERS_WANTED, "the reply")
        target.parent.mkdir(parents=True, exist_ok=True)
        assert window.grab().save(str(target)), f"{target} cannot be written"
    finally:
        window.close()
        window.lifetime.shut_down()
        app.processEvents()


def ask(controller: object, show: Callable[[str], None], question: str) -> str:
    """Ask in a chat of its own, which is shown from then on. Returns its id."""
    from app.chat.controller import ChatController

    assert isinstance(controller, ChatController)
    chat = controller.new_chat()
    show(chat)
    controller.send(chat, question)
    return chat


def pause(seconds: float) -> None:
    """Let the window live for a while."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, "time to pass")


def reply_length(controller: object, chat: str) -> int:
    """Characters of the chat's last reply; enough at once when it has ended early."""
    from app.chat.controller import ChatController

    assert isinstance(controller, ChatController)
    last = controller.messages(chat)[-1]
    return len(last.text) if last.state == "streaming" else _CHARACTERS_WANTED


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
