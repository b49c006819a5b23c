"""Full-text search over titles and messages."""

from __future__ import annotations

import re
import sqlite3
from typing import Any

from app.store.records import SearchHit

_MOST_HITS = 100
_SNIPPET_WORDS = 6  # the list is narrow: the word found must be among the first
_AROUND = 40  # characters shown on each side of a plain hit

# CROSS JOIN keeps the index outermost: it yields newest first and stops at the limit, instead of sorting all hits.
_BY_INDEX = f"""
SELECT c.conversation_id, c.title, m.message_id,
       snippet(message_index, 0, '', '', '…', {_SNIPPET_WORDS}) AS snippet
FROM message_index CROSS JOIN message m ON m.seq = message_index.rowid
JOIN conversation c ON c.conversation_id = m.conversation_id
WHERE message_index MATCH ? AND c.deleted_at IS NULL
ORDER BY message_index.rowid DESC LIMIT {_MOST_HITS}
"""
_BY_SCAN = f"""
SELECT c.conversation_id, c.title, m.message_id, m.text AS snippet
FROM message m JOIN conversation c ON c.conversation_id = m.conversation_id
WHERE m.text LIKE ? ESCAPE '\\' AND c.deleted_at IS NULL
ORDER BY m.seq DESC LIMIT {_MOST_HITS}
"""
_BY_TITLE = f"""
SELECT conversation_id, title FROM conversation
WHERE title LIKE ? ESCAPE '\\' AND deleted_at IS NULL
ORDER BY updated_at DESC LIMIT {_MOST_HITS}
"""


def search(connection: sqlite3.Connection, text: str) -> list[SearchHit]:
    """Chats whose title holds ``text``, then messages with all its words (the beginning of a word will do), newest first.

    One ASCII character alone is looked for in titles only. Scripts written without spaces have no words to index, so a text the index does not find is looked for as it is.
    """
    wanted = text.strip()
    if not wanted:
        return []
    pattern = "%" + re.sub(r"([\\%_])", r"\\\1", wanted) + "%"
    titles = [
        SearchHit(row["conversation_id"], row["title"] or "", None, row["title"] or "")
        for row in connection.execute(_BY_TITLE, (pattern,))
    ]
    if len(wanted) == 1 and wanted.isascii() and wanted.isalnum():  # one letter is in every message
        return titles
    words = re.findall(r"\w+", wanted)
    found: list[Any] = []
    if words:
        query = " AND ".join(f'"{word}"*' for word in words)
        found = connection.execute(_BY_INDEX, (query,)).fetchall()
    if not found:
        found = connection.execute(_BY_SCAN, (pattern,)).fetchall()
    return titles + [
        SearchHit(row["conversation_id"], row["title"] or "", row["message_id"], _snippet(row["snippet"], wanted))
        for row in found
    ]


def _snippet(text: str, wanted: str) -> str:
    line = " ".join((text or "").split())
    if len(line) <= 4 * _AROUND:
        return line
    at = max(0, line.lower().find(wanted.lower()))
    start, end = max(0, at - _AROUND), at + len(wanted) + _AROUND
    return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")
