"""Incremental detokenizer: tokens in, text out, each byte looked at once.

Every token of a byte-level or SentencePiece vocabulary is a fixed string of bytes. So a reply's text is the UTF-8 decoding
of the concatenated bytes, and Python's incremental UTF-8 decoder is exactly the machine that turns a growing byte string
into a growing text: it keeps an unfinished character back, and shows U+FFFD only for bytes that no continuation can
mend. That makes the concatenation of all deltas equal to the decoding of all tokens by construction.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """Turns one reply's tokens into text, token by token.

    piece_bytes: id -> the bytes that a token stands for; b"" for control tokens and unknown ids.
    strip_space: drop one leading space of the text (SentencePiece vocabularies put one before the first word).
    prefix: bytes of an unfinished character at the end of the prompt; the reply's first delta completes it.
    """

    def __init__(self, piece_bytes: Callable[[int], bytes], strip_space: bool = False, prefix: bytes = b"") -> None:
        self._piece_bytes = piece_bytes
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown = self._decoder.decode(prefix)
        assert not shown, f"prefix {prefix!r} is not an unfinished character"

    def push(self, token_id: int) -> str:
        """The text this token completes; "" while a character is unfinished. Never U+FFFD for an unfinished one."""
        return self._clean(self._decoder.decode(self._piece_bytes(token_id)))

    def flush(self) -> str:
        """The rest at the end of the reply: U+FFFD if a character stays unfinished, otherwise ""."""
        return self._clean(self._decoder.decode(b"", final=True))

    def _clean(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


def unfinished_tail(token_ids: Sequence[int], piece_bytes: Callable[[int], bytes]) -> bytes:
    """The bytes at the end of ``token_ids`` that begin a character and do not finish it; b"" when there are none.

    Only as many tokens are looked at as can hold the three bytes that may be missing a fourth.
    """
    tail = b""
    for token_id in reversed(token_ids):
        tail = piece_bytes(token_id) + tail
        if len(tail) >= 4:
            break
    for length in range(min(3, len(tail)), 0, -1):
        candidate = tail[-length:]
        if _is_unfinished(candidate):
            return candidate
    return b""


def _is_unfinished(candidate: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        return decoder.decode(candidate) == "" and decoder.getstate()[0] == candidate
    except UnicodeDecodeError:
        return False
