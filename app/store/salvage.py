"""Reading what can be read of a database that is damaged or was written by a newer version."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.store.schema import migrate

logger = logging.getLogger(__name__)

_COPIED = ("conversation", "message", "chunk")
_LARGEST_ROWID = 2**63 - 1
# A damaged page can claim rows without end: a table is given up after this many failed reads.
_MOST_FAILURES = 5000
_HEADER_BYTES = 100


def row_dicts(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def decode(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def salvage(path: Path) -> sqlite3.Connection:
    """A database in memory, in today's schema, with every row of ``path`` that can still be read. The file is not touched."""
    rescued = sqlite3.connect(":memory:", isolation_level=None)
    rescued.row_factory = row_dicts
    migrate(rescued)
    damaged = _open_damaged(path)
    if damaged is None:
        return rescued
    try:
        for table in _COPIED:
            kept = sum(_keep(rescued, table, row) for row in _readable_rows(damaged, table))
            logger.info("Salvaged %d rows of %s", kept, table)
    finally:
        damaged.close()
    _adopt_orphans(rescued)
    rescued.execute("INSERT INTO message_index(message_index) VALUES('rebuild')")
    return rescued


def _open_damaged(path: Path) -> sqlite3.Connection | None:
    """The database, read-only, with its write-ahead log where that still works; None when there is no database at all."""
    for open_it in (_open_file, _open_padded_copy):
        connection = None
        try:
            connection = open_it(path)
            connection.row_factory = row_dicts
            connection.text_factory = decode
            connection.execute("SELECT name FROM sqlite_master").fetchall()
        except (sqlite3.Error, OSError) as error:
            logger.warning("Damaged database %s: %s", path, error)
            if connection is not None:
                connection.close()
            continue
        return connection
    return None


def _open_file(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=0.2)


def _open_padded_copy(path: Path) -> sqlite3.Connection:
    """A copy in memory, as long as its header says: SQLite refuses a file that was cut off."""
    content = bytearray(path.read_bytes())
    connection = sqlite3.connect(":memory:", isolation_level=None)
    if len(content) >= _HEADER_BYTES:
        content[18:20] = b"\1\1"  # without a write-ahead log, which memory does not have
        page_size = int.from_bytes(content[16:18], "big")
        claimed = page_size * int.from_bytes(content[28:32], "big")
        if len(content) < claimed <= 4 * len(content) + page_size:
            content.extend(bytes(claimed - len(content)))
        connection.deserialize(bytes(content))
    return connection


def _readable_rows(damaged: sqlite3.Connection, table: str) -> Iterator[dict[str, Any]]:
    """Rows of ``table`` in order, stepping over stretches that cannot be read.

    After a failure the next read starts 1, 2, 4, 8 ... rows further on; where one works, what the last step jumped
    over is read backwards from there.
    """
    forward = f"SELECT rowid AS salvage_row, * FROM {table} WHERE rowid > ? ORDER BY rowid"
    backward = f"SELECT rowid AS salvage_row, * FROM {table} WHERE rowid > ? AND rowid < ? ORDER BY rowid DESC"
    last, step = 0, 0
    for _ in range(_MOST_FAILURES):
        reading = _Reading(damaged, forward, (last + step,))
        for rowid, row in reading:
            if step:
                for _, jumped_over in _Reading(damaged, backward, (last, rowid)):
                    yield jumped_over
            last, step = rowid, 0
            yield row
        if not reading.failed:
            return
        step = 2 * step or 1
        if last + step > _LARGEST_ROWID:
            return


class _Reading:
    """Rows (with their rowid) of one query, up to the damage; ``failed`` tells whether there was any."""

    def __init__(self, damaged: sqlite3.Connection, query: str, values: tuple[int, ...]) -> None:
        self._damaged, self._query, self._values = damaged, query, values
        self.failed = False

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            for row in self._damaged.execute(self._query, self._values):
                yield int(row.pop("salvage_row")), row
        except (sqlite3.Error, OverflowError) as error:
            self.failed = True
            logger.debug("Damaged database: %s", error)


def _keep(rescued: sqlite3.Connection, table: str, row: dict[str, Any]) -> bool:
    """Copy one row, as far as its columns are ours; a null in a field that must not be one takes the default."""
    ours = {column["name"]: column for column in rescued.execute(f"PRAGMA table_info({table})")}
    values = {name: value for name, value in row.items() if name in ours and value is not None}
    for name, column in ours.items():
        if column["notnull"] and name not in values and column["dflt_value"] is None and not column["pk"]:
            values[name] = "" if column["type"] == "TEXT" else 0
    names = ", ".join(values)
    marks = ", ".join("?" * len(values))
    try:
        cursor = rescued.execute(f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))
    except sqlite3.Error as error:
        logger.warning("A row of %s is left out: %s", table, error)
        return False
    return cursor.rowcount == 1


def _adopt_orphans(rescued: sqlite3.Connection) -> None:
    """Messages whose conversation row was lost get a conversation again, so that they can be found and read."""
    rescued.execute(
        "INSERT OR IGNORE INTO conversation (conversation_id, title, created_at, updated_at) "
        "SELECT conversation_id, 'Recovered chat', min(created_at), max(created_at) FROM message "
        "WHERE conversation_id NOT IN (SELECT conversation_id FROM conversation) GROUP BY conversation_id"
    )
