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
# A damaged page can claim rows without end; more than this many unreadable stretches in one table means it is lost.
_MOST_GAPS = 200
_LARGEST_ROWID = 2**63 - 1


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
    """A read-only connection, with the write-ahead log where it can still be used; None when there is no database at all."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None)
        connection.row_factory = row_dicts
        connection.text_factory = decode
        try:
            connection.execute("SELECT name FROM sqlite_master").fetchall()
        except sqlite3.Error as error:
            logger.warning("Damaged database %s (%s): %s", path, mode, error)
            connection.close()
            continue
        return connection
    return None


def _readable_rows(damaged: sqlite3.Connection, table: str) -> Iterator[dict[str, Any]]:
    """Rows of ``table`` from both ends, stepping over stretches that cannot be read."""
    last = 0
    for row in _until_damage(damaged.cursor(), f"SELECT rowid AS salvage_row, * FROM {table} WHERE rowid > ?", (0,)):
        last = int(row.pop("salvage_row"))
        yield row
    end = _LARGEST_ROWID
    backward = f"SELECT rowid AS salvage_row, * FROM {table} WHERE rowid > ? AND rowid < ? ORDER BY rowid DESC"
    for row in _until_damage(damaged.cursor(), backward, (last, end)):
        end = int(row.pop("salvage_row"))
        yield row
    if end == _LARGEST_ROWID:
        return
    one = f"SELECT * FROM {table} WHERE rowid = ?"
    for gap, rowid in enumerate(range(last + 1, end)):
        if gap >= _MOST_GAPS:
            return
        yield from _until_damage(damaged.cursor(), one, (rowid,))


def _until_damage(cursor: sqlite3.Cursor, query: str, values: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    try:
        yield from cursor.execute(query, values)
    except (sqlite3.Error, OverflowError) as error:
        logger.warning("Damaged database: %s", error)


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
