"""Damaged files and full disks: what can be saved is shown, nothing is lost silently, the app lives."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.store import ChatStore, ConversationRecord, MessageRecord, StoreError, chat_store

NUM_CHATS, NUM_MESSAGES = 6, 30


def fill(path: Path) -> dict[str, str]:
    """A file with many pages; returns message_id -> text."""
    store = ChatStore(path)
    store._connection.execute("PRAGMA synchronous = OFF")
    texts: dict[str, str] = {}
    for chat_number in range(NUM_CHATS):
        chat = ConversationRecord(f"c{chat_number}", f"Chat {chat_number}", 1.0, float(chat_number))
        parent = None
        for number in range(NUM_MESSAGES):
            message_id = f"m{chat_number}-{number}"
            texts[message_id] = f"text {message_id} " * 40
            with store._relaxed("test"):
                store._insert_conversation(chat)
                store._insert_message(
                    chat.conversation_id, MessageRecord(message_id, parent, "user", texts[message_id], "done", 1.0)
                )
            parent = message_id
    store.close()
    return texts


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, str]]:
    path = tmp_path_factory.mktemp("filled") / "chats.db"
    texts = fill(path)
    return path.read_bytes(), texts


def readable(store: ChatStore) -> dict[str, str]:
    return {
        record.message_id: record.text
        for chat in store.conversations()
        for record in store.messages(chat.conversation_id)
    }


def open_damaged(path: Path, content: bytes) -> ChatStore:
    path.write_bytes(content)
    store = ChatStore(path)
    assert store.is_read_only
    assert "damaged" in store.trouble
    assert "Repair" in store.trouble
    assert path.read_bytes() == content, "the damaged file is not touched"
    return store


def with_page(content: bytes, number: int, fill_with: bytes) -> bytes:
    return content[: (number - 1) * 4096] + (fill_with * 4096)[:4096] + content[number * 4096 :]


def leaf_pages(content: bytes) -> list[int]:
    """Numbers of pages that hold table rows."""
    return [number for number in range(2, len(content) // 4096 + 1) if content[(number - 1) * 4096] == 0x0D]


def test_pages_of_zeros_cost_only_their_rows(tmp_path: Path, filled: tuple[bytes, dict[str, str]]) -> None:
    content, texts = filled
    damaged = content
    for number in random.Random(1).sample(leaf_pages(content), 3):
        damaged = with_page(damaged, number, b"\0")
    store = open_damaged(tmp_path / "chats.db", damaged)
    found = readable(store)
    assert len(texts) - 3 * 9 <= len(found) < len(texts), "three pages of at most nine rows"
    assert all(texts[message_id] == text for message_id, text in found.items())
    store.close()


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_a_file_cut_off_shows_its_first_part(tmp_path: Path, filled: tuple[bytes, dict[str, str]], keep: float) -> None:
    content, texts = filled
    cut = int(len(content) * keep) // 4096 * 4096 + 100
    store = open_damaged(tmp_path / "chats.db", content[:cut])
    found = readable(store)
    assert all(texts[message_id] == text for message_id, text in found.items())
    assert found or keep < 0.5
    store.close()


@pytest.mark.parametrize(
    "content", [b"\0" * 8192, b"<html>not found</html>" * 500, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_file_that_is_no_database_opens_empty_and_is_kept(tmp_path: Path, content: bytes) -> None:
    store = open_damaged(tmp_path / "chats.db", content)
    assert store.conversations() == []
    with pytest.raises(StoreError, match="damaged"):
        store.create_conversation(ConversationRecord("x", "", 1.0, 1.0))
    store.close()


@pytest.mark.parametrize("seed", range(8))
def test_random_damage_never_crashes_and_never_invents_text(
    tmp_path: Path, filled: tuple[bytes, dict[str, str]], seed: int
) -> None:
    content, texts = filled
    chance = random.Random(seed)
    damaged = bytearray(content)
    for _ in range(6):
        at = chance.randrange(len(damaged) - 600)
        damaged[at : at + 600] = chance.randbytes(600)
    path = tmp_path / "chats.db"
    path.write_bytes(damaged)
    store = ChatStore(path)
    for chat in store.conversations():
        store.messages(chat.conversation_id)
    store.search("text")
    assert store.trouble or len(readable(store)) == len(texts)
    store.close()


def test_damage_found_only_while_reading_is_announced(tmp_path: Path, filled: tuple[bytes, dict[str, str]]) -> None:
    content, _ = filled
    path = tmp_path / "chats.db"
    path.write_bytes(content)
    store = ChatStore(path)
    assert not store.trouble
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damaged = content
    for number in leaf_pages(content):
        damaged = with_page(damaged, number, b"\xee")
    path.write_bytes(damaged)
    store._connection.execute("PRAGMA shrink_memory")
    for chat in range(NUM_CHATS):
        store.messages(f"c{chat}")
    assert "damaged" in store.trouble
    assert store.can_repair
    with pytest.raises(StoreError, match="damaged"):
        store.rename("c0", "x")
    store.repair()
    store.create_conversation(ConversationRecord("fresh", "T", 1.0, 1.0))
    store.close()


def test_repair_goes_on_with_what_was_saved(tmp_path: Path, filled: tuple[bytes, dict[str, str]]) -> None:
    content, texts = filled
    path = tmp_path / "chats.db"
    damaged = with_page(content, leaf_pages(content)[3], b"\0")
    store = open_damaged(path, damaged)
    before = readable(store)
    kept = store.repair()
    assert kept.read_bytes() == damaged
    assert (store.is_read_only, store.trouble) == (False, "")
    assert readable(store) == before
    assert store.search("text")
    chat = store.conversations()[0]
    store.add_message(chat, MessageRecord("new", None, "user", "after the repair", "done", 1.0))
    store.close()
    again = ChatStore(path)
    assert readable(again)["new"] == "after the repair"
    assert len(texts) > len(before) > len(texts) // 2
    again.close()


def test_messages_without_their_chat_row_get_one(tmp_path: Path, filled: tuple[bytes, dict[str, str]]) -> None:
    content, texts = filled
    path = tmp_path / "chats.db"
    path.write_bytes(content)
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM conversation WHERE conversation_id = 'c2'")
    connection.commit()
    connection.close()
    damaged = path.read_bytes()
    number = next(n for n in leaf_pages(damaged) if b"m5-2" in damaged[(n - 1) * 4096 : n * 4096])
    store = open_damaged(path, with_page(damaged, number, b"\0"))
    titles = {chat.conversation_id: chat.title for chat in store.conversations()}
    assert titles["c2"] == "Recovered chat"
    assert store.messages("c2")[0].text == texts["m2-0"]
    store.close()


# ---- full disk


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ChatStore]:
    """A store on a disk with room for a few pages more."""
    store = ChatStore(tmp_path / "chats.db")
    store.create_conversation(ConversationRecord("c", "T", 1.0, 1.0))
    yield store
    store.close()


def fill_disk(store: ChatStore, spare_pages: int = 0) -> None:
    pages = store._connection.execute("PRAGMA page_count").fetchone()["page_count"]
    store._connection.execute(f"PRAGMA max_page_count = {pages + spare_pages}")


def free_disk(store: ChatStore) -> None:
    store._connection.execute("PRAGMA max_page_count = 1000000")


def test_a_full_disk_refuses_with_the_remedy_and_loses_nothing(small: ChatStore) -> None:
    chat = small.conversations()[0]
    small.begin_reply(
        chat,
        MessageRecord("q", None, "user", "first", "done", 1.0),
        MessageRecord("a", "q", "assistant", "", "streaming", 1.0),
    )
    fill_disk(small)
    long = "x" * 50_000
    with pytest.raises(StoreError, match=r"not sent.*disk.*full\. Free some space"):
        small.begin_reply(
            chat,
            MessageRecord("q2", "a", "user", long, "done", 1.0),
            MessageRecord("a2", "q2", "assistant", "", "streaming", 1.0),
        )
    with pytest.raises(StoreError, match="full"):
        small.append_text("a", 0, long)
    with pytest.raises(StoreError, match="full"):
        small.finish_reply("a", long, "done")
    assert [record.text for record in small.messages("c")] == ["first", ""]
    free_disk(small)
    small.finish_reply("a", long, "done")
    assert [record.text for record in small.messages("c")] == ["first", long]


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "no such folder" / "chats.db")
    assert (store.is_read_only, store.can_repair, store.conversations()) == (True, False, [])
    assert "cannot be written" in store.trouble
    assert "--data-dir" in store.trouble
    with pytest.raises(StoreError, match=r"cannot be written.*--data-dir"):
        store.create_conversation(ConversationRecord("c", "T", 1.0, 1.0))
    store.close()


def test_a_file_locked_at_the_start_is_told(
    tmp_path: Path, filled: tuple[bytes, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_store, "_BUSY_SECONDS", 0.05)
    content, texts = filled
    path = tmp_path / "chats.db"
    path.write_bytes(content)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    store = ChatStore(path)
    assert "another program" in store.trouble
    other.execute("ROLLBACK")
    other.close()
    store.close()
    again = ChatStore(path)
    assert (again.trouble, len(readable(again))) == ("", len(texts))
    again.close()


def test_a_file_locked_by_another_program_says_so(small: ChatStore) -> None:
    small._connection.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(small.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another program"):
        small.rename("c", "x")
    other.execute("ROLLBACK")
    other.close()
    small.rename("c", "x")
    assert small.conversations()[0].title == "x"
