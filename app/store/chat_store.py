"""The chats on disk: SQLite in WAL mode, one writer, every promise kept by a transaction.

What the app may rely on: when ``begin_reply`` or ``finish_reply`` has returned, a power cut loses nothing of it
(synchronous=FULL). Text of a reply that still streams is written in coarse pieces without waiting for the disk.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.store import search as full_text
from app.store.records import (
    INTERRUPTED,
    ConversationRecord,
    MessageRecord,
    MessageState,
    MessageStats,
    SearchHit,
    StoreError,
    conversation_from,
    message_from,
    stats_text,
    storable,
)
from app.store.salvage import decode, row_dicts, salvage
from app.store.schema import PIECES_PER_MESSAGE, VERSION, migrate, version_of

logger = logging.getLogger(__name__)

_NEWER = (
    "The chats file {path} was written by a newer Ridgeline, so it is shown but not changed. "
    "Install the newer version to go on with these chats."
)
_BUSY_SECONDS = 2.0
_CHECKPOINT_PAGES = 256  # 1 MB of WAL: each checkpoint is short, so no commit stalls the window
_CHECK_WHOLE_BELOW_BYTES = 32_000_000  # a full check of a larger file would delay the window


class ChatStore:
    """Conversations as trees of messages. Used from one thread.

    Opening never fails: when the file is damaged, unwritable, or newer than this program, ``is_read_only`` is set and
    ``trouble`` says so in plain words; what could be read is there, and nothing is written. ``can_repair`` tells whether
    ``repair`` would help. Every method that writes raises StoreError with the remedy when it cannot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble = ""
        self.is_read_only = False
        self.can_repair = False
        self._connection = self._open()

    # ---- reading

    def conversations(self, deleted: bool = False) -> list[ConversationRecord]:
        """All conversations (or all deleted ones), the most recently used first."""
        condition = "IS NOT NULL" if deleted else "IS NULL"
        rows = self._read(
            f"SELECT * FROM conversation WHERE deleted_at {condition} ORDER BY updated_at DESC, rowid DESC"
        )
        return [conversation_from(row) for row in rows]

    def messages(self, conversation_id: str) -> list[MessageRecord]:
        """Every message of every branch, in the order they were made."""
        rows = self._read("SELECT * FROM message WHERE conversation_id = ? ORDER BY seq", (conversation_id,))
        return [message_from(row, self._streamed(row)) for row in rows]

    def search(self, text: str) -> list[SearchHit]:
        """Chats and messages that hold ``text``; see app.store.search."""
        with self._explained("The search failed"):
            return full_text.search(self._connection, storable(text))

    # ---- writing

    def create_conversation(self, record: ConversationRecord) -> None:
        with self._durable("The chat could not be created"):
            self._insert_conversation(record)

    def begin_reply(
        self, conversation: ConversationRecord, question: MessageRecord | None, reply: MessageRecord
    ) -> None:
        """Commit the user's message (unless it is there already) and the empty reply to disk, before inference starts.

        The conversation's row is made or brought up to date in the same transaction.
        """
        with self._durable("Your message was not sent, because it could not be saved"):
            self._insert_conversation(conversation)
            if question is not None:
                self._insert_message(conversation.conversation_id, question)
            self._insert_message(conversation.conversation_id, reply)

    def add_message(self, conversation: ConversationRecord, message: MessageRecord) -> None:
        """Commit a finished message that needs no reply."""
        with self._durable("The message could not be saved"):
            self._insert_conversation(conversation)
            self._insert_message(conversation.conversation_id, message)

    def append_text(self, message_id: str, number: int, text: str) -> None:
        """Append piece ``number`` of a streaming reply. Not synced: a power cut may take the last pieces, never the order."""
        with self._relaxed("The reply could not be saved so far"):
            self._connection.execute(
                "INSERT INTO chunk (position, text) SELECT seq * ? + ?, ? FROM message WHERE message_id = ?",
                (PIECES_PER_MESSAGE, number, storable(text), message_id),
            )

    def finish_reply(
        self, message_id: str, text: str, state: MessageState, error: str = "", stats: MessageStats | None = None
    ) -> None:
        """Commit the whole reply to disk and drop its pieces."""
        with self._durable("The reply could not be saved"):
            self._settle(message_id, storable(text), state, storable(error), stats)
            self._connection.execute(
                "UPDATE conversation SET updated_at = ? WHERE conversation_id = "
                "(SELECT conversation_id FROM message WHERE message_id = ?)",
                (time.time(), message_id),
            )

    def set_stats(self, message_id: str, stats: MessageStats | None) -> None:
        """Figures that arrive after a reply was settled (it was stopped first)."""
        with self._relaxed("The figures of the reply could not be saved"):
            self._connection.execute(
                "UPDATE message SET stats = ? WHERE message_id = ?", (stats_text(stats), message_id)
            )

    def choose_branch(self, conversation_id: str, choices: Iterable[tuple[str | None, str]]) -> None:
        """Remember which child is shown below each parent (None: the conversation itself)."""
        with self._relaxed("The chosen branch could not be saved"):
            for parent_id, child_id in choices:
                self._point(conversation_id, parent_id, child_id)

    def rename(self, conversation_id: str, title: str) -> None:
        with self._durable("The new name could not be saved"):
            self._connection.execute(
                "UPDATE conversation SET title = ? WHERE conversation_id = ?", (storable(title), conversation_id)
            )

    def delete(self, conversation_id: str) -> None:
        """Take the conversation out of sight. Its messages stay; ``undelete`` brings it back as it was."""
        with self._durable("The chat could not be deleted"):
            self._connection.execute(
                "UPDATE conversation SET deleted_at = ? WHERE conversation_id = ?", (time.time(), conversation_id)
            )

    def undelete(self, conversation_id: str) -> None:
        with self._durable("The chat could not be brought back"):
            self._connection.execute(
                "UPDATE conversation SET deleted_at = NULL WHERE conversation_id = ?", (conversation_id,)
            )

    def repair(self) -> Path:
        """Start a new file with what was saved of a damaged one, which is kept beside it. Returns where it is kept."""
        kept = self.path.with_name(f"{self.path.stem}-damaged-{time.strftime('%Y%m%d-%H%M%S')}{self.path.suffix}")
        fresh = self.path.with_name(f"{self.path.stem}-repaired{self.path.suffix}")
        with self._explained("The chats file could not be repaired"):
            fresh.unlink(missing_ok=True)
            self._connection.execute("VACUUM INTO ?", (str(fresh),))
            self._connection.close()
            for suffix in ("-wal", "-shm"):
                aside = self.path.with_name(self.path.name + suffix)
                if aside.exists():
                    aside.replace(kept.with_name(kept.name + suffix))
            self.path.replace(kept)
            fresh.replace(self.path)
        self.trouble, self.is_read_only, self.can_repair = "", False, False
        self._connection = self._open()
        return kept

    def close(self) -> None:
        try:
            self._connection.close()
        except sqlite3.Error as error:
            logger.warning("Closing the chats file: %s", error)

    # ---- opening

    def _open(self) -> sqlite3.Connection:
        connection = None
        try:
            connection = self._connection = self._connect()
            if version_of(connection) > VERSION:
                return self._open_copy(connection, _NEWER.format(path=self.path))
            self._check(connection)
            migrate(connection)
            self._settle_interrupted(connection)
        except (sqlite3.Error, OSError) as error:
            logger.error("Chats file %s: %s", self.path, error)
            if _is_damage(error):
                return self._open_copy(connection, _damage_message(self.path), can_repair=True)
            return self._open_copy(connection, _remedy("The chats file cannot be opened for writing", error, self.path))
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=True, cached_statements=64
        )
        connection.row_factory = row_dicts
        connection.text_factory = decode
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        """DatabaseError when the file is damaged, as far as can be told quickly."""
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        if self.path.stat().st_size > _CHECK_WHOLE_BELOW_BYTES:
            return
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()["quick_check"]
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"database disk image is malformed: {verdict}")

    def _open_copy(
        self, connection: sqlite3.Connection | None, trouble: str, can_repair: bool = False
    ) -> sqlite3.Connection:
        """What can be read, in memory; ``connection``, to the file itself, is closed."""
        if connection is not None:
            connection.close()
        self.trouble, self.is_read_only, self.can_repair = trouble, True, can_repair
        return salvage(self.path)

    def _on_damage(self) -> None:
        """The file turned out damaged while in use: go on with a copy of what can be read."""
        if not self.is_read_only:
            self._connection = self._open_copy(self._connection, _damage_message(self.path), can_repair=True)

    def _settle_interrupted(self, connection: sqlite3.Connection) -> None:
        """Replies that streamed when the program ended get the text so far as their text."""
        unfinished = connection.execute("SELECT * FROM message WHERE state = 'streaming'").fetchall()
        if not unfinished:
            return
        try:
            with self._durable("Interrupted replies could not be settled"):
                for row in unfinished:
                    record = message_from(row, self._streamed(row))
                    self._settle(record.message_id, record.text, "interrupted", INTERRUPTED, record.stats)
        except StoreError as error:  # a full disk: they read as interrupted all the same
            logger.warning("%s", error)

    # ---- rows

    def _streamed(self, row: dict[str, Any]) -> str:
        if row.get("text"):
            return ""
        pieces = self._read(
            "SELECT text FROM chunk WHERE position BETWEEN ? AND ? ORDER BY position", _pieces_of(row["seq"])
        )
        return "".join(str(piece["text"] or "") for piece in pieces)

    def _insert_conversation(self, record: ConversationRecord) -> None:
        self._connection.execute(
            "INSERT INTO conversation (conversation_id, title, created_at, updated_at, colour_index) "
            "VALUES (?, ?, ?, ?, ?) ON CONFLICT (conversation_id) DO UPDATE SET "
            "title = excluded.title, updated_at = excluded.updated_at",
            (
                record.conversation_id,
                storable(record.title),
                record.created_at,
                record.updated_at,
                record.colour_index,
            ),
        )

    def _insert_message(self, conversation_id: str, message: MessageRecord) -> None:
        message = replace(message, text=storable(message.text))
        cursor = self._connection.execute(
            "INSERT INTO message (message_id, conversation_id, parent_id, role, text, state, error, stats, created_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                message.message_id,
                conversation_id,
                message.parent_id,
                message.role,
                message.text,
                message.state,
                storable(message.error),
                stats_text(message.stats),
                message.created_at,
            ),
        )
        if message.state != "streaming":
            self._index(int(cursor.lastrowid or 0), message.text)
        self._point(conversation_id, message.parent_id, message.message_id)

    def _settle(self, message_id: str, text: str, state: MessageState, error: str, stats: MessageStats | None) -> None:
        row = self._connection.execute(
            "SELECT seq, state, text FROM message WHERE message_id = ?", (message_id,)
        ).fetchone()
        if row is None or row["state"] not in ("streaming", "interrupted"):  # a finished text never changes
            return
        if row["state"] == "interrupted":  # by a second window that opened this file; the reply went on here
            self._unindex(row["seq"], row["text"])
        self._connection.execute(
            "UPDATE message SET text = ?, state = ?, error = ?, stats = ? WHERE seq = ?",
            (text, state, error, stats_text(stats), row["seq"]),
        )
        self._connection.execute("DELETE FROM chunk WHERE position BETWEEN ? AND ?", _pieces_of(row["seq"]))
        self._index(row["seq"], text)

    def _index(self, seq: int, text: str) -> None:
        self._connection.execute("INSERT INTO message_index (rowid, text) VALUES (?, ?)", (seq, text))

    def _unindex(self, seq: int, text: str) -> None:
        self._connection.execute(
            "INSERT INTO message_index (message_index, rowid, text) VALUES ('delete', ?, ?)", (seq, text)
        )

    def _point(self, conversation_id: str, parent_id: str | None, child_id: str) -> None:
        if parent_id is None:
            self._connection.execute(
                "UPDATE conversation SET active_root = ? WHERE conversation_id = ?", (child_id, conversation_id)
            )
            return
        self._connection.execute("UPDATE message SET active_child = ? WHERE message_id = ?", (child_id, parent_id))

    # ---- transactions

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        """All rows; of a file that turns out damaged, those that can still be read."""
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            logger.error("Chats file %s: %s", self.path, error)
            if not _is_damage(error) or self.is_read_only:
                raise StoreError(_remedy("The chats could not be read", error, self.path)) from error
        self._on_damage()
        return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _durable(self, failure: str) -> Iterator[None]:
        """A transaction that is on the disk when it returns."""
        with self._transaction(failure, "FULL"):
            yield

    @contextmanager
    def _relaxed(self, failure: str) -> Iterator[None]:
        """A transaction that a power cut may undo, in order, as a whole; a killed program does not."""
        with self._transaction(failure, "NORMAL"):
            yield

    @contextmanager
    def _transaction(self, failure: str, synchronous: str) -> Iterator[None]:
        if self.is_read_only:
            raise StoreError(f"{failure}: {self.trouble}")
        with self._explained(failure):
            self._connection.execute(f"PRAGMA synchronous = {synchronous}")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self, failure: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            logger.warning("%s: %s", failure, error)
            if _is_damage(error):
                self._on_damage()
            raise StoreError(_remedy(failure, error, self.path)) from error


def _pieces_of(seq: int) -> tuple[int, int]:
    """The first and last position that pieces of this message can have."""
    first = seq * PIECES_PER_MESSAGE
    return first, first + PIECES_PER_MESSAGE - 1


def _is_damage(error: Exception) -> bool:
    return isinstance(error, sqlite3.DatabaseError) and any(
        sign in str(error) for sign in ("malformed", "not a database", "corrupt")
    )


def _damage_message(path: Path) -> str:
    return (
        f"The chats file {path} is damaged. What could be read is shown, and nothing is written to it. "
        "Choose Repair to keep the damaged file aside and go on with what was saved."
    )


def _remedy(failure: str, error: Exception, path: Path) -> str:
    """What went wrong and what to do, from SQLite's terse words."""
    text = str(error)
    if "full" in text or "No space" in text:
        return f"{failure}: the disk that holds {path} is full. Free some space and try again."
    if "locked" in text:
        return f"{failure}: another program is using {path}. Close other Ridgeline windows and try again."
    if "readonly" in text or "unable to open" in text or "Permission" in text:
        return (
            f"{failure}: {path} cannot be written. Check the folder's permissions, "
            "or choose another folder with --data-dir FOLDER."
        )
    if _is_damage(error):
        return f"{failure}. {_damage_message(path)}"
    return f"{failure}: {text}. Check the disk that holds {path} and try again."
