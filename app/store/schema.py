"""The database's shape, as numbered migrations. A released one is never edited: a change is a new number.

Schema 1. A conversation is a tree of messages: ``parent_id`` points up, siblings are the branches that edits and
regenerations made, ``active_child`` (``active_root`` for the first message) remembers which one is shown. A message's
text never changes once it is finished. While a reply streams its text grows in ``chunk``, so that each write is as
small as what is new; finishing moves it into ``message`` in one transaction.
"""

from __future__ import annotations

import sqlite3

_SCHEMA_1 = """
CREATE TABLE conversation (
    conversation_id TEXT PRIMARY KEY,
    title TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    colour_index INTEGER NOT NULL DEFAULT 0,
    active_root TEXT,
    deleted_at REAL
);
CREATE TABLE message (
    seq INTEGER PRIMARY KEY,
    message_id TEXT NOT NULL UNIQUE,
    conversation_id TEXT NOT NULL REFERENCES conversation(conversation_id),
    parent_id TEXT,
    active_child TEXT,
    role TEXT NOT NULL,
    text TEXT NOT NULL DEFAULT '',
    state TEXT NOT NULL DEFAULT 'done',
    error TEXT NOT NULL DEFAULT '',
    stats TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL
);
CREATE INDEX message_of_conversation ON message(conversation_id, seq);
CREATE INDEX message_unfinished ON message(state) WHERE state = 'streaming';
CREATE TABLE chunk (
    position INTEGER PRIMARY KEY,  -- message.seq * 2^20 + number of the piece: one tree, no index, so one page per write
    text TEXT NOT NULL
);
CREATE VIRTUAL TABLE message_index USING fts5(
    text, content='message', content_rowid='seq', prefix='2 3', tokenize='unicode61 remove_diacritics 2'
);
"""

MIGRATIONS: tuple[str, ...] = (_SCHEMA_1,)  # entry k leads from schema k to schema k + 1
VERSION = len(MIGRATIONS)
PIECES_PER_MESSAGE = 1 << 20


def version_of(connection: sqlite3.Connection) -> int:
    """The schema's number; 0 for a new file. The connection gives rows as dicts."""
    return int(connection.execute("PRAGMA user_version").fetchone()["user_version"])


def migrate(connection: sqlite3.Connection) -> None:
    """Bring an older database to VERSION. Each step is one transaction: a crash leaves the schema before or after it."""
    for number in range(version_of(connection), VERSION):
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{MIGRATIONS[number]}\nPRAGMA user_version = {number + 1};\nCOMMIT;"
        )
