"""One conversation as a tree of messages, and the branch of it that is shown. Knows no Qt and no disk.

An edit or a regeneration adds a sibling; nothing is ever replaced or removed. Below each node one child is *active*;
following the active children from the top gives the branch that is shown and sent to the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from app.store.records import MessageRecord, MessageState, MessageStats, Role
from engine.commands import Message

_LONGEST_TITLE = 60  # characters


@dataclass(frozen=True, slots=True)
class MessageView:
    """One message as the chat shows it. ``branch_index`` counts from 0 among ``branch_count`` siblings.

    ``error`` is to be shown under the message whenever it is not empty, whatever the state.
    """

    message_id: str
    role: Role
    text: str
    state: MessageState
    error: str = ""
    stats: MessageStats | None = None
    branch_index: int = 0
    branch_count: int = 1
    created_at: float = 0.0  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class ChatSummary:
    """One row of the chat list. ``updated_at`` is in seconds since the epoch; ``colour_index`` goes into Theme.chats."""

    chat_id: str
    title: str
    updated_at: float
    is_generating: bool
    colour_index: int


class Conversation:
    """The tree. Built from records in the order they were made; tolerant of parents that are missing or form a circle."""

    def __init__(self, records: Iterable[MessageRecord] = (), active_root: str | None = None) -> None:
        self._records: dict[str, MessageRecord] = {}
        self._children: dict[str | None, list[str]] = {None: []}
        self._active: dict[str | None, str] = {}
        self._growing: dict[str, list[str]] = {}
        remembered: dict[str | None, str] = {None: active_root} if active_root else {}
        for record in records:
            # A parent that is unknown so far is damage: the message becomes a first message, so that it stays reachable.
            parent_id = record.parent_id if record.parent_id in self._records else None
            self.add(replace(record, parent_id=parent_id))
            if record.active_child:
                remembered[record.message_id] = record.active_child
        for parent, child in remembered.items():
            if child in self._children.get(parent, ()):
                self._active[parent] = child

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._records

    def __getitem__(self, message_id: str) -> MessageRecord:
        """The record with its text so far."""
        record = self._records[message_id]
        pieces = self._growing.get(message_id)
        if not pieces:
            return record
        if len(pieces) > 1:
            pieces[:] = ["".join(pieces)]
        return replace(record, text=pieces[0])

    def add(self, record: MessageRecord) -> None:
        """Append a message below its parent; it becomes the active branch there."""
        assert record.message_id not in self._records, f"{record.message_id} is in the tree already"
        assert record.parent_id is None or record.parent_id in self._records, f"{record.parent_id} is not in the tree"
        self._records[record.message_id] = record
        self._children[record.message_id] = []
        self._children[record.parent_id].append(record.message_id)
        self._active[record.parent_id] = record.message_id

    def grow(self, message_id: str, text: str) -> None:
        """Add text at the end of a streaming reply, in constant time."""
        assert self._records[message_id].state == "streaming", f"{message_id} does not stream"
        self._growing.setdefault(message_id, []).append(text)

    def settle(self, message_id: str, state: MessageState, error: str = "", stats: MessageStats | None = None) -> None:
        """End a reply: its text so far is its text, or set error and figures of one that has ended."""
        self._records[message_id] = replace(self[message_id], state=state, error=error, stats=stats)
        self._growing.pop(message_id, None)

    def siblings(self, message_id: str) -> tuple[str, ...]:
        return tuple(self._children[self._records[message_id].parent_id])

    def children(self, message_id: str | None) -> tuple[str, ...]:
        return tuple(self._children[message_id])

    def branch(self) -> Iterator[str]:
        """Ids of the branch that is shown, from the top."""
        at = self._active.get(None)
        while at is not None:
            yield at
            at = self._active.get(at)

    def leaf(self) -> str | None:
        """The last message of the branch that is shown; None in an empty conversation."""
        last = None
        for last in self.branch():  # noqa: B007
            pass
        return last

    def lineage(self, message_id: str) -> list[str]:
        """Ids from the top down to ``message_id``."""
        path = [message_id]
        while (parent := self._records[path[-1]].parent_id) is not None:
            path.append(parent)
        return path[::-1]

    def choose(self, message_id: str) -> list[tuple[str | None, str]]:
        """Make ``message_id`` part of the branch that is shown. Returns the (parent, child) choices that changed."""
        changed: list[tuple[str | None, str]] = []
        for step in self.lineage(message_id):
            parent = self._records[step].parent_id
            if self._active[parent] != step:
                self._active[parent] = step
                changed.append((parent, step))
        return changed

    def view(self, message_id: str) -> MessageView:
        record = self[message_id]
        siblings = self._children[record.parent_id]
        return MessageView(
            message_id=message_id,
            role=record.role,
            text=record.text,
            state=record.state,
            error=record.error,
            stats=record.stats,
            branch_index=siblings.index(message_id),
            branch_count=len(siblings),
            created_at=record.created_at,
        )

    def views(self) -> list[MessageView]:
        return [self.view(message_id) for message_id in self.branch()]

    def prompt(self, last: str | None, system_prompt: str = "", draft: str = "") -> tuple[Message, ...]:
        """What the model is sent: system prompt, the messages down to ``last``, then ``draft`` as the user's next one.

        Replies without text (stopped, failed or interrupted at once) are left out; the questions before and after such
        a gap become one, because chat templates want the roles to take turns.
        """
        turns: list[Message] = []
        if system_prompt.strip():
            turns.append(Message("system", system_prompt))
        for message_id in self.lineage(last) if last is not None else ():
            record = self[message_id]
            if record.text.strip():
                _add_turn(turns, record.role, record.text)
        if draft.strip():
            _add_turn(turns, "user", draft)
        return tuple(turns)


def _add_turn(turns: list[Message], role: Role, text: str) -> None:
    if turns and turns[-1].role == role:
        text = f"{turns.pop().content}\n\n{text}"
    turns.append(Message(role, text))


def title_from(text: str) -> str:
    """A chat's title: the first line of its first message, shortened at a word."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    words = " ".join(line.split()).lstrip("#>*- ").strip()
    if len(words) <= _LONGEST_TITLE:
        return words or "New chat"
    cut = words[:_LONGEST_TITLE]
    at = cut.rfind(" ")
    return (cut[:at] if at > _LONGEST_TITLE // 2 else cut).rstrip(" ,.;:") + "…"


def figure_text(value: float) -> str:
    """Three significant figures without an exponent: "0.21", "8.42", "39.1", "118", "12,300"."""
    size = abs(value)
    if size >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{value:.{decimals}f}"


def stats_words(stats: MessageStats) -> tuple[str, ...]:
    """The figures under a reply: ("118 tokens/s", "first token 0.21 s", "142 tokens"); what is unknown is left out."""
    words = []
    if stats.tokens_per_second is not None:
        words.append(f"{figure_text(stats.tokens_per_second)} tokens/s")
    if stats.first_token_seconds is not None:
        words.append(f"first token {figure_text(stats.first_token_seconds)} s")
    words.append("1 token" if stats.new_tokens == 1 else f"{stats.new_tokens:,} tokens")
    if stats.num_drafted:
        words.append(f"drafts accepted {stats.num_accepted / stats.num_drafted:.0%}".replace("%", " %"))
    if stats.dropped_messages:
        words.append(left_out_words(stats.dropped_messages))
    if stats.cached_tokens:  # last: the line is cut at its end where there is no room
        words.append(f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens reused")
    return tuple(words)


def left_out_words(num_messages: int) -> str:
    """ "4 oldest messages left out"."""
    return "oldest message left out" if num_messages == 1 else f"{num_messages:,} oldest messages left out"
