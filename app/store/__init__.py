"""Chats on disk."""

from app.store.chat_store import ChatStore
from app.store.records import (
    ConversationRecord,
    MessageRecord,
    MessageState,
    MessageStats,
    Role,
    SearchHit,
    StoreError,
)

__all__ = [
    "ChatStore",
    "ConversationRecord",
    "MessageRecord",
    "MessageState",
    "MessageStats",
    "Role",
    "SearchHit",
    "StoreError",
]
