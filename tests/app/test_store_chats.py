"""ChatStore: what is committed when, tolerance field by field, search, old schemas."""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.store import ChatStore, ConversationRecord, MessageRecord, MessageStats, StoreError
from app.store.records import INTERRUPTED
from app.store.schema import MIGRATIONS, VERSION

FIXTURES = Path(__file__).parent.parent / "fixtures"
CHAT = ConversationRecord("c", "A title", 1.0, 2.0, colour_index=3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChatStore]:
    store = ChatStore(tmp_path / "chats.db")
    yield store
    store.close()


def message(message_id: str, parent_id: str | None, role: Any, text: str, state: Any = "done") -> MessageRecord:
    return MessageRecord(message_id, parent_id, role, text, state, 1.0)


def ask(store: ChatStore, number: int = 0, text: str = "Question", parent: str | None = None) -> tuple[str, str]:
    question = message(f"q{number}", parent, "user", text)
    reply = message(f"a{number}", question.message_id, "assistant", "", "streaming")
    store.begin_reply(CHAT, question, reply)
    return question.message_id, reply.message_id


def reopened(store: ChatStore) -> ChatStore:
    store.close()
    return ChatStore(store.path)


def other_view(path: Path) -> list[tuple[str, str, str]]:
    """What another program sees in the file now: only what is committed."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    rows = connection.execute("SELECT message_id, text, state FROM message ORDER BY seq").fetchall()
    connection.close()
    return rows


def test_question_and_empty_reply_are_committed_together(store: ChatStore) -> None:
    ask(store)
    assert other_view(store.path) == [("q0", "Question", "done"), ("a0", "", "streaming")]


def test_commits_that_matter_wait_for_the_disk(store: ChatStore) -> None:
    statements: list[str] = []
    store._connection.set_trace_callback(statements.append)

    def synchronous_at_commit() -> str:
        at = max(i for i, text in enumerate(statements) if text == "COMMIT")
        return next(text for text in reversed(statements[:at]) if text.startswith("PRAGMA synchronous"))

    _, reply = ask(store)
    assert synchronous_at_commit().endswith("FULL")
    store.append_text(reply, 0, "piece")
    assert synchronous_at_commit().endswith("NORMAL")
    store.finish_reply(reply, "piece", "done")
    assert synchronous_at_commit().endswith("FULL")
    assert store._connection.execute("PRAGMA journal_mode").fetchone() == {"journal_mode": "wal"}


def test_a_finished_reply_is_committed_whole_and_its_pieces_are_gone(store: ChatStore) -> None:
    _, reply = ask(store)
    store.append_text(reply, 0, "one ")
    store.append_text(reply, 1, "two")
    stats = MessageStats(2, 5, 1, 39.25, 0.21)
    store.finish_reply(reply, "one two three", "done", stats=stats)
    assert other_view(store.path)[1] == ("a0", "one two three", "done")
    assert store._connection.execute("SELECT count(*) AS n FROM chunk").fetchone() == {"n": 0}
    again = reopened(store)
    assert again.messages("c")[1].stats == stats
    again.close()


def test_a_reply_cut_off_by_a_crash_is_interrupted_with_its_text_so_far(store: ChatStore) -> None:
    _, first = ask(store)
    _, second = ask(store, 1, parent="a0")
    for number in range(12):  # more than ten: pieces are in the order of their numbers, not of their names
        store.append_text(first, number, f"{number} ")
    again = reopened(store)
    replies = [record for record in again.messages("c") if record.role == "assistant"]
    assert [(reply.state, reply.text, reply.error) for reply in replies] == [
        ("interrupted", "0 1 2 3 4 5 6 7 8 9 10 11 ", INTERRUPTED),
        ("interrupted", "", INTERRUPTED),
    ]
    assert [hit.message_id for hit in again.search("11")] == [first]
    assert second == "a1"
    again.close()


def test_a_settled_reply_never_changes_its_text(store: ChatStore) -> None:
    _, reply = ask(store)
    store.finish_reply(reply, "stopped here", "stopped")
    store.finish_reply(reply, "something else", "done")
    assert other_view(store.path)[1] == ("a0", "stopped here", "stopped")
    store.set_stats(reply, MessageStats(3))
    assert store.messages("c")[1].stats == MessageStats(3)


def test_a_second_window_on_the_same_file_loses_nothing(store: ChatStore) -> None:
    _, reply = ask(store)
    store.append_text(reply, 0, "the beginning")
    second = ChatStore(store.path)  # takes the streaming reply for one that a crash cut off
    assert second.messages("c")[1].state == "interrupted"
    store.append_text(reply, 1, " and more")
    store.finish_reply(reply, "the whole reply", "done")
    assert [(record.state, record.text) for record in second.messages("c")][1] == ("done", "the whole reply")
    assert second.search("beginning") == []
    assert [hit.message_id for hit in second.search("whole")] == [reply]
    ask(second, 1, parent="a0")
    assert len(store.messages("c")) == 4
    second.close()


def test_a_failed_transaction_leaves_nothing_behind(store: ChatStore) -> None:
    ask(store)
    with pytest.raises(StoreError, match="Your message was not sent"):
        store.begin_reply(CHAT, message("q1", "a0", "user", "New"), message("a0", "q1", "assistant", ""))
    assert [row[0] for row in other_view(store.path)] == ["q0", "a0"]
    ask(store, 2)  # and the next one works


@pytest.mark.parametrize("text", ["nul \0 inside", "torn \ud83d emoji", "🙂 עברית", "", "x" * 300_000, "a\r\nb\u2028c"])
def test_any_text_comes_back(store: ChatStore, text: str) -> None:
    _, reply = ask(store, text=text)
    store.append_text(reply, 0, text)
    expected = text.replace("\ud83d", "\ufffd")
    again = reopened(store)
    assert [record.text for record in again.messages("c")] == [expected, expected]
    again.close()


def test_delete_hides_and_undelete_brings_back_everything(store: ChatStore) -> None:
    ask(store, text="Needle")
    store.delete("c")
    assert store.conversations() == []
    assert store.search("Needle") == []
    assert [record.conversation_id for record in store.conversations(deleted=True)] == ["c"]
    again = reopened(store)
    again.undelete("c")
    assert [record.title for record in again.conversations()] == ["A title"]
    assert len(again.messages("c")) == 2
    again.close()


def test_search_finds_beginnings_accents_titles_and_other_scripts(store: ChatStore) -> None:
    ask(store, 0, "Über Kühlschränke und Eis")
    ask(store, 1, "明日の天気はどうですか")
    ask(store, 2, '50% of "quoted" text AND NOT -operators*')

    def found(text: str) -> set[str | None]:
        return {hit.message_id for hit in store.search(text)}

    assert found("kuhl") == {"q0"}
    assert found("eis über") == {"q0"}
    assert found("天気") == {"q1"}
    assert found("quoted AND") == {"q2"}
    assert found("50%") == {"q2"}
    assert found('"') == {"q2"}
    assert found("NOT -operators*") == {"q2"}
    assert found("absent") == set()
    assert found("  ") == set()
    assert found("title") == {None}


def test_a_found_word_is_in_its_snippet(store: ChatStore) -> None:
    ask(store, 0, "word " * 300 + "needle " + "word " * 300)
    ask(store, 1, "語" * 300 + "針" + "語" * 300)
    assert "needle" in store.search("needle")[0].snippet
    assert "針" in store.search("針")[0].snippet
    assert len(store.search("針")[0].snippet) < 200


def test_a_reply_is_found_once_it_is_finished(store: ChatStore) -> None:
    _, reply = ask(store)
    store.finish_reply(reply, "an unusual word", "done")
    assert [hit.message_id for hit in store.search("unusual")] == [reply]


LOOSE = """
CREATE TABLE conversation (conversation_id, title, created_at, updated_at, colour_index, active_root, deleted_at, extra);
CREATE TABLE message (seq INTEGER PRIMARY KEY, message_id, conversation_id, parent_id, active_child, role, text,
    state, error, stats, created_at, extra);
CREATE TABLE chunk (position INTEGER PRIMARY KEY, text);
CREATE VIRTUAL TABLE message_index USING fts5(text, content='message', content_rowid='seq');
"""


def loose_store(path: Path, conversations: list[dict[str, Any]], messages: list[dict[str, Any]]) -> ChatStore:
    """A file whose columns take anything, with rows that no version ever wrote."""
    connection = sqlite3.connect(path)
    connection.executescript(f"PRAGMA synchronous = OFF; {LOOSE} PRAGMA user_version = {VERSION};")
    for table, rows in (("conversation", conversations), ("message", messages)):
        for row in rows:
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))
    connection.commit()
    connection.close()
    return ChatStore(path)


GOOD_CHAT = {"conversation_id": "c", "title": "T", "created_at": 1.0, "updated_at": 2.0, "colour_index": 1, "extra": 5}
GOOD_MESSAGE = {
    "message_id": "m", "conversation_id": "c", "parent_id": None, "active_child": None, "role": "user",
    "text": "Hello", "state": "done", "error": "", "stats": "", "created_at": 1.0, "extra": "?",
}  # fmt: skip
BAD = [None, "nonsense", b"\xff\xfe", -1, 1e300, float("inf")]


@pytest.mark.parametrize("field", [name for name in GOOD_MESSAGE if name != "conversation_id"])
def test_one_bad_field_of_a_message_costs_only_that_field(tmp_path: Path, field: str) -> None:
    rows = [{**GOOD_MESSAGE, "conversation_id": f"c{i}", field: bad} for i, bad in enumerate(BAD)]
    store = loose_store(tmp_path / "chats.db", [GOOD_CHAT], rows)
    for i in range(len(BAD)):
        [record] = store.messages(f"c{i}")
        for name in ("message_id", "role", "text", "state"):
            if name != field:
                assert getattr(record, name) == GOOD_MESSAGE[name]
    store.close()


@pytest.mark.parametrize("field", [name for name in GOOD_CHAT if name != "conversation_id"])
def test_one_bad_field_of_a_chat_costs_only_that_field(tmp_path: Path, field: str) -> None:
    rows = [{**GOOD_CHAT, "conversation_id": f"c{i}", field: bad} for i, bad in enumerate(BAD)]
    store = loose_store(tmp_path / "chats.db", rows, [{**GOOD_MESSAGE, "conversation_id": "c0"}])
    records = [*store.conversations(), *store.conversations(deleted=True)]
    assert {record.conversation_id for record in records} == {f"c{i}" for i in range(len(BAD))}
    assert field == "title" or {record.title for record in records} == {"T"}
    assert [entry.text for entry in store.messages("c0")] == ["Hello"]
    store.close()


@pytest.mark.parametrize(
    "stats", ["{", "[]", '{"new_tokens": null}', '{"new_tokens": "x", "tokens_per_second": NaN}', "[" * 9999]
)
def test_bad_figures_cost_only_the_figures(tmp_path: Path, stats: str) -> None:
    store = loose_store(tmp_path / "chats.db", [GOOD_CHAT], [{**GOOD_MESSAGE, "stats": stats}])
    [record] = store.messages("c")
    assert record.text == "Hello"
    assert record.stats in (None, MessageStats(0))
    store.close()


def test_a_missing_column_costs_only_that_field(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    loose_store(path, [GOOD_CHAT], [GOOD_MESSAGE]).close()
    connection = sqlite3.connect(path)
    for table, column in (("message", "stats"), ("message", "error"), ("conversation", "colour_index")):
        connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    connection.commit()
    connection.close()
    store = ChatStore(path)
    assert store.conversations()[0].title == "T"
    assert store.messages("c")[0].text == "Hello"
    store.close()


def schema_of(connection: sqlite3.Connection) -> dict[str, str]:
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return {name: " ".join(sql.split()) for name, sql in rows}


def old_file(path: Path, version: int) -> None:
    connection = sqlite3.connect(path)
    connection.executescript((FIXTURES / f"chats_schema_{version}.sql").read_text(encoding="utf-8"))
    connection.close()


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_every_old_schema_has_a_fixture_that_its_migrations_still_make(tmp_path: Path, version: int) -> None:
    old_file(tmp_path / "old.db", version)
    old, made = sqlite3.connect(tmp_path / "old.db"), sqlite3.connect(":memory:")
    for step in MIGRATIONS[:version]:
        made.executescript(step)
    assert schema_of(old) == schema_of(made)
    old.close()
    made.close()


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_a_file_of_every_old_schema_opens_with_all_it_holds(tmp_path: Path, version: int) -> None:
    path = tmp_path / "chats.db"
    old_file(path, version)
    store = ChatStore(path)
    assert (store.is_read_only, store.trouble) == (False, "")
    [chat] = store.conversations()
    assert (chat.conversation_id, chat.title, chat.active_root) == ("c1", "Why ice floats", "m1")
    assert [record.title for record in store.conversations(deleted=True)] == ["A deleted chat"]
    messages = {record.message_id: record for record in store.messages("c1")}
    assert messages["m1"].active_child == "m2"
    assert messages["m2"].stats == MessageStats(4, 9, 0, 39.5, 0.21)
    assert messages["m3"].state == "stopped"
    assert (messages["m4"].state, messages["m4"].text) == ("interrupted", "Molecules lock into place")
    assert [hit.message_id for hit in store.search("expands")] == ["m2"]
    store.begin_reply(chat, message("new", "m2", "user", "And?"), message("r", "new", "assistant", "", "streaming"))
    assert store._connection.execute("PRAGMA user_version").fetchone() == {"user_version": VERSION}
    store.close()


def test_a_newer_file_is_shown_but_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    old_file(path, VERSION)
    connection = sqlite3.connect(path)
    connection.executescript("ALTER TABLE message ADD COLUMN mood TEXT; PRAGMA user_version = 99;")
    connection.close()
    before = path.read_bytes()
    store = ChatStore(path)
    assert store.is_read_only
    assert "newer Ridgeline" in store.trouble
    assert {record.message_id for record in store.messages("c1")} == {"m1", "m2", "m3", "m4"}
    with pytest.raises(StoreError, match="newer version"):
        store.rename("c1", "x")
    store.close()
    assert path.read_bytes() == before


def test_a_commit_takes_a_few_milliseconds(store: ChatStore) -> None:
    seconds = []
    for number in range(40):
        started = time.perf_counter()
        ask(store, number)
        seconds.append(time.perf_counter() - started)
    assert statistics.median(seconds) < 0.060  # with the rest of the suite running beside it; 8 ms alone


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.store import schema

    path = tmp_path / "chats.db"
    old_file(path, 1)
    monkeypatch.setattr(
        schema, "MIGRATIONS", (*MIGRATIONS, "CREATE TABLE extra (x); CREATE UNIQUE INDEX one ON message(role);")
    )
    monkeypatch.setattr(schema, "VERSION", VERSION + 1)
    store = ChatStore(path)
    assert "cannot be opened" in store.trouble
    assert store.is_read_only
    store.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert "extra" not in schema_of(connection)
    connection.close()
