"""FIELD 2: bytes written while a reply streams stay within a small multiple of the reply."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app.chat.generation import Generation
from app.chat.saving import EndedReply, ReplySaver
from app.store import ChatStore, ConversationRecord, MessageRecord

WORD = "token "
# A piece costs two pages of 4 KB in the write-ahead log and, now and then, in the file; the finished text is written
# once more, with its index.
MOST_PER_BYTE = 12
BASE_BYTES = 40_000


def bytes_written() -> int:
    """By this process, through system calls (the page cache has not merged them yet)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes with /proc")
@pytest.mark.parametrize(("num_tokens", "tokens_per_second"), [(400, 40), (4000, 20), (8000, 200), (2000, 3)])
def test_bytes_written_while_streaming(tmp_path: Path, qapp: object, num_tokens: int, tokens_per_second: float) -> None:
    store = ChatStore(tmp_path / "chats.db")
    chat = ConversationRecord("c", "T", 1.0, 1.0)
    question = MessageRecord("q", None, "user", "Q", "done", 1.0)
    store.begin_reply(chat, question, MessageRecord("a", "q", "assistant", "", "streaming", 1.0))
    now = 0.0
    saver = ReplySaver(store, clock=lambda: now)
    generation = Generation(1, "c", "a", submitted_at=0.0)
    saver.watch(generation)
    before = bytes_written()
    for number in range(num_tokens):
        generation.grow(WORD)
        now = number / tokens_per_second
        saver.write_due_pieces()
    streamed = bytes_written() - before
    text = WORD * num_tokens
    saver.end(generation, EndedReply("c", "a", text, "done", "", None))
    written = bytes_written() - before
    store.close()
    reply_bytes = len(text.encode())
    print(f"{reply_bytes} bytes of reply: {streamed} written while streaming, {written} in all")
    assert streamed <= MOST_PER_BYTE * reply_bytes + BASE_BYTES / 4
    assert written <= MOST_PER_BYTE * reply_bytes + BASE_BYTES


def test_pieces_follow_the_text_closely_enough(tmp_path: Path, qapp: object) -> None:
    """A killed program loses no more than the last seconds of a reply that was still streaming."""
    store = ChatStore(tmp_path / "chats.db")
    chat = ConversationRecord("c", "T", 1.0, 1.0)
    question = MessageRecord("q", None, "user", "Q", "done", 1.0)
    store.begin_reply(chat, question, MessageRecord("a", "q", "assistant", "", "streaming", 1.0))
    now = 0.0
    saver = ReplySaver(store, clock=lambda: now)
    generation = Generation(1, "c", "a", submitted_at=0.0)
    saver.watch(generation)
    for number in range(1000):
        generation.grow(WORD)
        now = number / 40
        saver.write_due_pieces()
        stored = len(store.messages("c")[1].text) if number % 50 == 0 else None
        if stored is not None:
            assert (number + 1) * len(WORD) - stored <= 8.1 * 40 * len(WORD)
    assert store.messages("c")[1].text == WORD * (len(store.messages("c")[1].text) // len(WORD))
    saver.close()
    assert store.messages("c")[1].text == WORD * 1000
    store.close()
