"""The rows of a conversation: messages cut into blocks, and which rows a change touches. Knows no Qt.

`Transcript` turns facts about messages (appended, text grew, changed, reset) into `Splice`s over one flat list of
rows. Rows are frozen; a finished block keeps its row object for ever, so a view may cache by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from app.chat.conversation import MessageView, stats_words
from app.chat.markdown import Block, BlockKind, BlockStream, plain_blocks
from app.store.records import MessageStats


class RowKind(StrEnum):
    BLOCK = "block"  # a part of a reply
    USER = "user"  # a part of what the user wrote
    ERROR = "error"
    WAITING = "waiting"  # a reply without text yet
    FOOTER = "footer"  # figures, branch switcher, actions


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its message, its content, and the gap above it in pixels.

    text: the error, or the figures of a footer. branch: "2 of 3" when the message has alternatives.
    """

    message_id: str
    role: str
    kind: RowKind
    gap: int
    block: Block | None = None
    text: str = ""
    branch: str = ""

    @property
    def is_selectable(self) -> bool:
        return self.kind in (RowKind.BLOCK, RowKind.USER, RowKind.ERROR)


@dataclass(frozen=True, slots=True)
class Splice:
    """Rows [start, start + removed) were replaced by ``inserted`` rows."""

    start: int
    removed: int
    inserted: int


@dataclass(slots=True)
class _Entry:
    message: MessageView
    text: str
    stream: BlockStream | None  # while a reply grows
    live: MessageStats | None = None  # figures so far
    rows: list[Row] = field(default_factory=list)


class Transcript:
    """All rows of one conversation's active branch."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._entries: list[_Entry] = []

    def reset(self, messages: Sequence[MessageView]) -> Splice:
        removed = len(self.rows)
        self._entries = [_entry(message) for message in messages]
        self.rows = [row for entry in self._entries for row in entry.rows]
        return Splice(0, removed, len(self.rows))

    def append(self, message: MessageView) -> Splice:
        entry = _entry(message)
        start = len(self.rows)
        self._entries.append(entry)
        self.rows.extend(entry.rows)
        return Splice(start, 0, len(entry.rows))

    def grow(self, message_id: str, added: str) -> Splice:
        """Text streamed into a reply: only its tail's rows are replaced."""
        entry, first = self._find(message_id)
        if entry.stream is None:  # a reply that was resumed
            entry.stream = BlockStream()
            entry.stream.feed(entry.text)
        entry.text += added
        kept = entry.stream.feed(added)
        return self._replace(entry, first, _rows_of(entry, kept))

    def change(self, message: MessageView) -> Splice:
        """A message finished, failed, or got another sibling."""
        entry, first = self._find(message.message_id)
        entry.message = message
        if message.text != entry.text or message.state == "streaming":
            fresh = _entry(message)
            entry.text, entry.stream = fresh.text, fresh.stream
            return self._replace(entry, first, fresh.rows)
        blocks = _close(entry)
        return self._replace(entry, first, _rows(message, blocks))

    def set_stats(self, message_id: str, stats: MessageStats) -> Splice:
        """Figures of a reply that is still growing: only its footer is replaced."""
        entry, first = self._find(message_id)
        entry.live = stats
        footer = replace(entry.rows[-1], text=footer_text(entry.message, stats))
        return self._replace(entry, first, [*entry.rows[:-1], footer])

    def message_of(self, message_id: str) -> MessageView:
        return self._find(message_id)[0].message

    def text_of(self, message_id: str) -> str:
        """The message's source text, as far as it has come."""
        return self._find(message_id)[0].text

    def has(self, message_id: str) -> bool:
        return any(entry.message.message_id == message_id for entry in self._entries)

    @property
    def message_ids(self) -> list[str]:
        return [entry.message.message_id for entry in self._entries]

    def rows_range(self, message_id: str) -> range:
        """Row numbers of a message."""
        entry, first = self._find(message_id)
        return range(first, first + len(entry.rows))

    def _find(self, message_id: str) -> tuple[_Entry, int]:
        first = len(self.rows)
        for entry in reversed(self._entries):  # what changes is nearly always last
            first -= len(entry.rows)
            if entry.message.message_id == message_id:
                return entry, first
        raise KeyError(message_id)

    def _replace(self, entry: _Entry, first: int, fresh: list[Row]) -> Splice:
        old = entry.rows
        same = 0
        while same < min(len(old), len(fresh)) and (old[same] is fresh[same] or old[same] == fresh[same]):
            fresh[same] = old[same]
            same += 1
        entry.rows = fresh
        self.rows[first + same : first + len(old)] = fresh[same:]
        return Splice(first + same, len(old) - same, len(fresh) - same)


def _entry(message: MessageView) -> _Entry:
    entry = _Entry(message, message.text, None)
    if message.role != "user" and message.state == "streaming":
        entry.stream = BlockStream()
        entry.stream.feed(message.text)
        entry.rows = _rows_of(entry, 0)
    else:
        entry.rows = _rows(message, _close(entry))
    return entry


def _close(entry: _Entry) -> list[Block]:
    if entry.message.role == "user":
        return plain_blocks(entry.text)
    stream = entry.stream
    if stream is None:
        stream = BlockStream()
        stream.feed(entry.text)
    stream.close()
    entry.stream = None
    return stream.blocks


def _rows_of(entry: _Entry, kept: int) -> list[Row]:
    """Rows of a growing reply; the first ``kept`` block rows are taken over as they are."""
    assert entry.stream is not None
    blocks = entry.stream.blocks
    old = [row for row in entry.rows[:kept] if row.kind is RowKind.BLOCK]
    return old + _rows(entry.message, blocks, len(old), entry.live)


def _rows(
    message: MessageView, blocks: Sequence[Block], start: int = 0, stats: MessageStats | None = None
) -> list[Row]:
    kind = RowKind.USER if message.role == "user" else RowKind.BLOCK
    key, role = message.message_id, message.role
    rows = [Row(key, role, kind, _gap(blocks, i, kind), blocks[i]) for i in range(start, len(blocks))]
    if not blocks and message.state == "streaming":
        rows.append(Row(key, role, RowKind.WAITING, 2))
    if message.error:
        rows.append(Row(key, role, RowKind.ERROR, 12, text=message.error))
    branch = f"{message.branch_index + 1} of {message.branch_count}" if message.branch_count > 1 else ""
    rows.append(Row(key, role, RowKind.FOOTER, 2, text=footer_text(message, stats), branch=branch))
    return rows


def _gap(blocks: Sequence[Block], index: int, kind: RowKind) -> int:
    """Pixels above a block: more before headings, less inside a list, none inside a cut block."""
    block = blocks[index]
    if index == 0:
        return 18 if kind is RowKind.USER else 2
    if block.continues:
        return 0
    before = blocks[index - 1]
    if block.kind is BlockKind.HEADING:
        return 20
    if block.indent and before.indent and block.marker and BlockKind.CODE not in (block.kind, before.kind):
        return 5
    return 11


def footer_text(message: MessageView, stats: MessageStats | None = None) -> str:
    """The line under a reply: "118 tokens/s   first token 0.21 s   142 tokens". Only what was measured."""
    if message.role == "user":
        return ""
    parts = ["stopped"] if message.state == "stopped" else []
    shown = stats or message.stats
    return "   ".join([*parts, *(stats_words(shown) if shown is not None else ())])
