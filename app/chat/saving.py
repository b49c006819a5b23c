"""ReplySaver: brings replies to disk while they stream and when they end, and tries again when the disk refuses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtCore import QObject, QTimer, Signal

from app.chat.generation import Generation
from app.store import ChatStore, MessageState, MessageStats, StoreError

logger = logging.getLogger(__name__)

_LOOK_MILLISECONDS = 1000  # how often pieces are looked at; Generation decides which are due
_RETRY_MILLISECONDS = 5000


@dataclass(frozen=True, slots=True)
class EndedReply:
    chat_id: str
    message_id: str
    text: str
    state: MessageState
    error: str
    stats: MessageStats | None


class ReplySaver(QObject):
    """Writes pieces of streaming replies on a timer that runs only while something streams."""

    saved_later = Signal(object)  # EndedReply that could not be saved at first and now is
    failed = Signal(str, str)  # chat_id, what could not be saved and what to do

    def __init__(self, store: ChatStore, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._store = store
        self._clock = clock
        self._streaming: dict[int, Generation] = {}
        self._unsaved: dict[str, EndedReply] = {}
        self._look_timer = QTimer(self, interval=_LOOK_MILLISECONDS)
        self._look_timer.setObjectName("reply pieces")
        self._look_timer.timeout.connect(self.write_due_pieces)
        self._retry_timer = QTimer(self, interval=_RETRY_MILLISECONDS)
        self._retry_timer.setObjectName("unsaved replies")
        self._retry_timer.timeout.connect(self.retry)

    def watch(self, generation: Generation) -> None:
        self._streaming[generation.request_id] = generation
        if not self._look_timer.isActive():
            self._look_timer.start()

    def write_due_pieces(self) -> None:
        for generation in list(self._streaming.values()):
            if generation.piece_is_due(self._clock()) and not self._write_piece(generation):
                return

    def end(self, generation: Generation, reply: EndedReply) -> str:
        """Commit a reply that has ended. Returns "" or, when it could not be saved yet, why and what to do."""
        self._streaming.pop(generation.request_id, None)
        if not self._streaming:
            self._look_timer.stop()
        try:
            self._save(reply)
        except StoreError as error:
            self._unsaved[reply.message_id] = reply
            self._retry_timer.start()
            self.failed.emit(reply.chat_id, str(error))
            return f"{error} Ridgeline keeps the reply in memory and saves it as soon as it can."
        return ""

    def retry(self) -> None:
        for reply in list(self._unsaved.values()):
            try:
                self._save(reply)
            except StoreError:  # logged by the store; the next turn of the timer tries again
                return
            del self._unsaved[reply.message_id]
            self.saved_later.emit(reply)
        self._retry_timer.stop()

    def close(self) -> None:
        """Write what streams and what was not saved; a reply that still streams will read as interrupted."""
        self._look_timer.stop()
        for generation in self._streaming.values():
            if generation.pending_text():
                self._write_piece(generation)
        self._streaming.clear()
        self.retry()
        self._retry_timer.stop()

    def _save(self, reply: EndedReply) -> None:
        self._store.finish_reply(reply.message_id, reply.text, reply.state, reply.error, reply.stats)

    def _write_piece(self, generation: Generation) -> bool:
        try:
            self._store.append_text(generation.message_id, generation.num_pieces, generation.pending_text())
        except StoreError as error:
            self.failed.emit(generation.chat_id, str(error))
            # The text stays pending. Waiting a whole interval keeps a full disk from being asked every second.
            generation.last_piece_at = self._clock()
            return False
        generation.piece_written(self._clock())
        return True
