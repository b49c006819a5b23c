"""ChatCatalogue: which chats there are, beside the store. Knows no Qt."""

from __future__ import annotations

import time
import uuid
from collections.abc import Container
from dataclasses import replace

from app.chat.conversation import ChatSummary
from app.store import ChatStore, ConversationRecord

NUM_COLOURS = 6
UNTITLED = "New chat"


class ChatCatalogue:
    """Records of all chats in memory. A chat is on disk, and listed, from its first message on.

    ``rename``, ``delete`` and ``undelete`` write first and raise StoreError without changing anything.
    """

    def __init__(self, store: ChatStore) -> None:
        self._store = store
        self._listed = {record.conversation_id: record for record in store.conversations()}
        self._new: dict[str, ConversationRecord] = {}

    def __contains__(self, chat_id: str) -> bool:
        return chat_id in self._listed or chat_id in self._new

    def __getitem__(self, chat_id: str) -> ConversationRecord:
        return self._listed.get(chat_id) or self._new[chat_id]

    def is_listed(self, chat_id: str) -> bool:
        return chat_id in self._listed

    def summaries(self, busy: Container[str]) -> list[ChatSummary]:
        """Listed chats, the most recently used first; ``busy`` holds those that generate."""
        return [
            ChatSummary(
                chat_id=record.conversation_id,
                title=record.title or UNTITLED,
                updated_at=record.updated_at,
                is_generating=record.conversation_id in busy,
                colour_index=record.colour_index % NUM_COLOURS,
            )
            for record in sorted(self._listed.values(), key=lambda record: record.updated_at, reverse=True)
        ]

    def add_new(self) -> str:
        """A chat in memory, with the next colour in turn."""
        now = time.time()
        known = (*self._listed.values(), *self._new.values())
        newest = max(known, key=lambda record: record.created_at, default=None)
        colour_index = 0 if newest is None else (newest.colour_index + 1) % NUM_COLOURS
        record = ConversationRecord(uuid.uuid4().hex, "", now, now, colour_index)
        self._new[record.conversation_id] = record
        return record.conversation_id

    def new_ones(self) -> tuple[str, ...]:
        """Chats without a message."""
        return tuple(self._new)

    def put(self, record: ConversationRecord) -> None:
        """Take the record of a chat that is on disk now."""
        self._new.pop(record.conversation_id, None)
        self._listed[record.conversation_id] = record

    def touch(self, chat_id: str) -> None:
        """The chat was used just now."""
        if chat_id in self._listed:
            self._listed[chat_id] = replace(self._listed[chat_id], updated_at=time.time())

    def rename(self, chat_id: str, title: str) -> None:
        if chat_id in self._new:
            self._new[chat_id] = replace(self._new[chat_id], title=title)
            return
        self._store.rename(chat_id, title)
        self._listed[chat_id] = replace(self._listed[chat_id], title=title)

    def delete(self, chat_id: str) -> None:
        if self._new.pop(chat_id, None) is not None:
            return
        self._store.delete(chat_id)
        del self._listed[chat_id]

    def undelete(self, chat_id: str | None) -> str | None:
        """Bring back ``chat_id``, or the chat deleted last. Returns its id; None when there is nothing to bring back."""
        deleted = sorted(self._store.conversations(deleted=True), key=lambda record: record.deleted_at or 0.0)
        wanted = [record for record in deleted if chat_id in (None, record.conversation_id)]
        if not wanted:
            return None
        record = wanted[-1]
        self._store.undelete(record.conversation_id)
        self._listed[record.conversation_id] = replace(record, deleted_at=None)
        return record.conversation_id
