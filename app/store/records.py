"""What the store holds, as values. Reading is tolerant: a null, missing or foreign field costs that field, not the chat."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from engine.events import RequestUsage

logger = logging.getLogger(__name__)

Role = Literal["system", "user", "assistant"]
# streaming: being generated now. stopped: by the user. interrupted: the program ended while it streamed.
MessageState = Literal["done", "streaming", "stopped", "failed", "interrupted"]

INTERRUPTED = "Ridgeline closed before this reply was finished. Regenerate to ask again."


class StoreError(Exception):
    """Something could not be saved or read. The message says what and what to do about it."""


@dataclass(frozen=True, slots=True)
class MessageStats:
    """What a reply cost, from the engine's own counts. A rate or a time is None when it cannot be measured."""

    new_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix index
    tokens_per_second: float | None = None
    first_token_seconds: float | None = None
    dropped_messages: int = 0  # the chat's oldest, left out because the window was full
    num_drafted: int = 0  # guessed tokens that were compared with the model's choice
    num_accepted: int = 0  # of these, found right

    @staticmethod
    def of(usage: RequestUsage) -> MessageStats:
        return MessageStats(
            new_tokens=usage.new_tokens,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            tokens_per_second=usage.tokens_per_second,
            first_token_seconds=usage.first_token_seconds,
            dropped_messages=usage.dropped_messages,
            num_drafted=usage.num_drafted,
            num_accepted=usage.num_accepted,
        )


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    conversation_id: str
    title: str
    created_at: float  # seconds since the epoch, as all times here
    updated_at: float
    colour_index: int = 0
    active_root: str | None = None
    deleted_at: float | None = None


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """One node of the tree. ``parent_id`` is None for a first message; ``active_child`` is the branch shown below it."""

    message_id: str
    parent_id: str | None
    role: Role
    text: str
    state: MessageState
    created_at: float
    error: str = ""
    stats: MessageStats | None = None
    active_child: str | None = None


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A message that holds what was searched for, or a chat whose title does (then ``message_id`` is None)."""

    chat_id: str
    title: str
    message_id: str | None
    snippet: str


Row = Mapping[str, Any]


def conversation_from(row: Row) -> ConversationRecord:
    created_at = _time(row.get("created_at"))
    return ConversationRecord(
        conversation_id=str(row["conversation_id"]),
        title=_text(row.get("title")),
        created_at=created_at,
        updated_at=_time(row.get("updated_at")) or created_at,
        colour_index=_count(row.get("colour_index")),
        active_root=_text(row.get("active_root")) or None,
        deleted_at=_time(row.get("deleted_at")) or None,
    )


def message_from(row: Row, streamed: str = "") -> MessageRecord:
    """The message in ``row``; ``streamed`` is the text of its chunks, which an unfinished reply has instead of its own."""
    role, state = row.get("role"), row.get("state")
    known_state = cast(MessageState, state) if state in get_args(MessageState) else "done"
    return MessageRecord(
        message_id=_text(row.get("message_id")) or f"unnamed-{row.get('seq')}",
        parent_id=_text(row.get("parent_id")) or None,
        role=cast(Role, role) if role in get_args(Role) else "assistant",
        text=_text(row.get("text")) or streamed,
        state="interrupted" if known_state == "streaming" else known_state,
        created_at=_time(row.get("created_at")),
        error=_text(row.get("error")) or (INTERRUPTED if known_state == "streaming" else ""),
        stats=stats_from(row.get("stats")),
        active_child=_text(row.get("active_child")) or None,
    )


def stats_text(stats: MessageStats | None) -> str:
    return json.dumps(asdict(stats)) if stats else ""


def stats_from(text: Any) -> MessageStats | None:
    if not isinstance(text, str) or not text:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        logger.warning("The figures of a message are unreadable and left out")
        return None
    if not isinstance(data, dict):
        return None
    return MessageStats(
        new_tokens=_count(data.get("new_tokens")),
        prompt_tokens=_count(data.get("prompt_tokens")),
        cached_tokens=_count(data.get("cached_tokens")),
        tokens_per_second=_figure(data.get("tokens_per_second")),
        first_token_seconds=_figure(data.get("first_token_seconds")),
        dropped_messages=_count(data.get("dropped_messages")),
        num_drafted=_count(data.get("num_drafted")),
        num_accepted=_count(data.get("num_accepted")),
    )


def storable(text: str) -> str:
    """``text`` as UTF-8 can hold it: half a surrogate pair (a torn emoji from a paste) becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)


def _figure(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _time(value: Any) -> float:
    return _figure(value) or 0.0


def _count(value: Any) -> int:
    return max(0, int(_figure(value) or 0))
