"""The incremental detokenizer against the decoding of the whole (FIELD 40), for every way to cut bytes into tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer, unfinished_tail

SCRIPTS = [
    "👨‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 hand",
    "日本語のテキスト、中文文本。",
    "e\u0301 a\u0308 n\u0303 combining",
    "العربية مكتوبة من اليمين",
    "हिन्दी ไทย עברית Ελλάδα",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff \x00 \r\n\t",
]


def stream(chunks: list[bytes], **options: bool) -> list[str]:
    detokenizer = Detokenizer(chunks.__getitem__, **options)
    return [*(detokenizer.push(i) for i in range(len(chunks))), detokenizer.flush()]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


@given(st.text(max_size=40) | st.sampled_from(SCRIPTS), st.lists(st.integers(0, 500)))
def test_deltas_of_real_text_add_up_and_never_show_a_replacement(text: str, cuts: list[int]) -> None:
    text = text.encode("utf-8", "ignore").decode()
    deltas = stream(cut(text.encode(), cuts))
    assert "".join(deltas) == text
    assert ("\ufffd" in "".join(deltas)) == ("\ufffd" in text)


@given(st.binary(max_size=40), st.lists(st.integers(0, 500)))
def test_deltas_of_any_bytes_equal_the_decoding_of_all(data: bytes, cuts: list[int]) -> None:
    assert "".join(stream(cut(data, cuts))) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("text", SCRIPTS)
def test_one_byte_per_token(text: str) -> None:
    deltas = stream([bytes([byte]) for byte in text.encode()])
    assert "".join(deltas) == text
    assert all(len(delta) <= 1 for delta in deltas)


def test_an_unfinished_character_is_shown_only_at_the_end() -> None:
    party = "🎉".encode()
    assert stream([b"a", party[:2], b"", party[2:3]]) == ["a", "", "", "", "\ufffd"]
    assert stream([b"a", party[:2], b"b"]) == ["a", "", "\ufffdb", ""]


@given(st.text(min_size=1, max_size=10), st.integers(0, 100), st.lists(st.integers(0, 500)))
def test_a_prompt_may_end_inside_a_character(text: str, place: int, cuts: list[int]) -> None:
    data = text.encode("utf-8", "ignore")
    prompt, reply = data[: place % (len(data) + 1)], data[place % (len(data) + 1) :]
    pieces = cut(prompt, cuts)
    tail = unfinished_tail(range(len(pieces)), pieces.__getitem__)
    chunks = cut(reply, cuts)
    detokenizer = Detokenizer(chunks.__getitem__, prefix=tail)
    shown = "".join(detokenizer.push(i) for i in range(len(chunks))) + detokenizer.flush()
    assert prompt[: len(prompt) - len(tail)].decode() + shown == data.decode()


@pytest.mark.parametrize(
    ("tokens", "tail"),
    [
        ([b"abc"], b""),
        (["é".encode()], b""),
        ([b"abc\xc3"], b"\xc3"),
        ([b"\xf0", b"\x9f", b"", b"\x8e"], b"\xf0\x9f\x8e"),
        ([b"\x80"], b""),
        ([b"\xff"], b""),
        ([b"\xc3", b"a"], b""),
        ([], b""),
    ],
)
def test_unfinished_tail(tokens: list[bytes], tail: bytes) -> None:
    assert unfinished_tail(range(len(tokens)), tokens.__getitem__) == tail


def test_one_leading_space_is_dropped_when_asked() -> None:
    assert stream([b"", b" Hi", b" you"], strip_space=True) == ["", "Hi", " you", ""]
    assert "".join(stream([b"  Hi"], strip_space=True)) == " Hi"
    assert "".join(stream([b"Hi", b" x"], strip_space=True)) == "Hi x"


def test_each_token_is_looked_at_once() -> None:
    asked: list[int] = []

    def piece(token_id: int) -> bytes:
        asked.append(token_id)
        return b"\xe6"  # never finished, never mended: the worst case for holding back

    detokenizer = Detokenizer(piece)
    text = "".join(detokenizer.push(i) for i in range(5000)) + detokenizer.flush()
    assert asked == list(range(5000))
    assert text == "\ufffd" * 5000
