"""One reply that is being generated: text not yet on disk, and its figures while it runs. Knows no Qt and no disk."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.store.records import MessageStats
from engine.events import RequestProgress

# A piece on disk costs about two pages of 4 KB, so pieces are coarse: bytes written stay a small multiple of the reply.
# (seconds since the last piece, characters waiting) from which on a piece is due
_PIECE_RULES = ((2.0, 2048), (8.0, 512), (30.0, 1))


@dataclass(slots=True)
class Generation:
    """Times are perf_counter seconds of this process, on the engine thread too."""

    request_id: int
    chat_id: str
    message_id: str
    submitted_at: float
    is_stopped: bool = False  # the user stopped it; the engine's last word is still to come
    num_pieces: int = 0
    context_tokens: int = 0
    new_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    last_piece_at: float = 0.0
    _pending: list[str] = field(default_factory=list)
    _pending_characters: int = 0

    def __post_init__(self) -> None:
        self.last_piece_at = self.submitted_at

    def grow(self, text: str) -> None:
        self._pending.append(text)
        self._pending_characters += len(text)

    def piece_is_due(self, now: float) -> bool:
        age = now - self.last_piece_at
        return any(age >= seconds and self._pending_characters >= size for seconds, size in _PIECE_RULES)

    def pending_text(self) -> str:
        return "".join(self._pending)

    def piece_written(self, now: float) -> None:
        self.num_pieces += 1
        self.last_piece_at = now
        self._pending.clear()
        self._pending_characters = 0

    def record(self, progress: RequestProgress, ended_at: float) -> None:
        """Count one step of this request."""
        self.context_tokens = progress.context_tokens
        if progress.num_new <= 0:
            return
        if self.first_token_at is None:
            self.first_token_at = ended_at
        self.new_tokens += progress.num_new
        self.last_token_at = ended_at

    def stats(self) -> MessageStats:
        """The figures so far, by the same definitions as the engine's final ones."""
        if self.first_token_at is None:
            return MessageStats(new_tokens=0)
        seconds = self.last_token_at - self.first_token_at
        measurable = self.new_tokens >= 2 and seconds > 0
        return MessageStats(
            new_tokens=self.new_tokens,
            tokens_per_second=(self.new_tokens - 1) / seconds if measurable else None,
            first_token_seconds=max(0.0, self.first_token_at - self.submitted_at),
        )
