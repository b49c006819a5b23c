"""What every tokenizer comes down to here, whatever file it was read from, and how control tokens are kept apart from text.

A control token such as ``<|im_end|>`` is spelled like text, and a user may type that text. So no tokenizer here knows a
control token under its spelling: each one is registered under a private name that contains a random number. Text that is
meant as control (a template's own, or a plain prompt's) has its spellings exchanged for the private names before encoding;
what a user typed is left as it is and can only ever come out as ordinary tokens. Everything else about the tokenizer
(space handling around control tokens, merges, normalisation) stays exactly as its files say.
"""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer

# Ends of a turn or a text that models use, so that a file which forgets to name one does not make replies endless.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
# Spellings of control tokens that some files mark as ordinary or user-defined tokens.
_CONTROL_SPELLING = re.compile(
    r"<\|[^|\s]+\|>|<｜[^｜\s]+｜>|<(?:start|end)_of_turn>|</?s>|<(?:bos|eos|pad|unk)>|\[/?INST\]", re.ASCII
)

Style = Literal["byte_level", "sentencepiece", "words"]


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer ready for use.

    tokenizer: knows control tokens only by their private names.
    tokens: id -> spelling in the files; None where an id is unused.
    control: spelling of each control token -> id. private: id of each control token -> its private name.
    style: how spellings become bytes. verbatim: ids whose spelling is the text itself (added tokens).
    strip_space: the tokenizer puts a space before the first word; decoding takes it away.
    bos_token_id, adds_bos: begin-of-text, and whether plain text wants it.
    adds_bos_to_template: also put it before a rendered template that lacks it.
    named: "bos_token", "eos_token", ... -> spelling, for templates.
    notes: what a user should know, in plain words.
    """

    tokenizer: Tokenizer
    tokens: list[str | None]
    control: Mapping[str, int]
    private: Mapping[int, str]
    style: Style
    verbatim: frozenset[int]
    strip_space: bool
    bos_token_id: int | None
    adds_bos: bool
    adds_bos_to_template: bool
    eos_token_ids: frozenset[int]
    named: Mapping[str, str]
    chat_template: str | None
    notes: tuple[str, ...] = field(default=())


def looks_like_control(spelling: str) -> bool:
    return spelling in TURN_ENDS or _CONTROL_SPELLING.fullmatch(spelling) is not None


def new_nonce() -> str:
    """The random part of private names, so that nobody can type one."""
    return secrets.token_hex(8)


def private_name(nonce: str, token_id: int) -> str:
    # U+FDD0 and U+FDD1 are noncharacters: never in real text, untouched by any normalisation.
    return f"\ufdd0{nonce}:{token_id}\ufdd1"


class ControlTokens:
    """Finds the spellings of control tokens in text: leftmost, then longest."""

    def __init__(self, control: Mapping[str, int], private: Mapping[int, str]) -> None:
        self._control = control
        self._private = private
        lengths: defaultdict[str, set[int]] = defaultdict(set)
        for spelling in control:
            lengths[spelling[0]].add(len(spelling))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        firsts = "".join(map(re.escape, self._lengths))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def protect(self, text: str, sentinel: str) -> str:
        """Put ``sentinel`` into every spelling in ``text``, overlapping ones too, so that none is found afterwards."""
        pieces, done = [], 0
        for match in self._first.finditer(text):
            if self._spelling_at(text, match.start()):
                pieces += [text[done : match.end()], sentinel]
                done = match.end()
        return "".join([*pieces, text[done:]])

    def exchange(self, text: str, sentinel: str | None = None) -> str:
        """Spellings become private names; then every ``sentinel`` vanishes."""
        pieces, done = [], 0
        for start, spelling in self._find(text, sentinel):
            pieces += [text[done:start], self._private[self._control[spelling]]]
            done = start + len(spelling)
        exchanged = [*pieces, text[done:]]
        if sentinel is not None:
            exchanged = [piece.replace(sentinel, "") for piece in exchanged]
        return "".join(exchanged)

    def _find(self, text: str, sentinel: str | None) -> Iterator[tuple[int, str]]:
        position = 0
        while (match := self._first.search(text, position)) is not None:
            spelling = self._spelling_at(text, match.start())
            end = match.start() + len(spelling)
            # A one-character spelling cannot hold a sentinel; it has one behind it.
            if spelling and not (len(spelling) == 1 and sentinel is not None and text.startswith(sentinel, end)):
                yield match.start(), spelling
                position = end
            else:
                position = match.end()

    def _spelling_at(self, text: str, start: int) -> str:
        for length in self._lengths[text[start]]:
            if (spelling := text[start : start + length]) in self._control:
                return spelling
        return ""


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes are themselves, the others follow from U+0100 on (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_of_character()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of(parts: TokenizerParts, token_id: int) -> bytes:
    """The bytes a token stands for in a text; b"" for control tokens and ids that no token has."""
    if token_id in parts.private or not 0 <= token_id < len(parts.tokens):
        return b""
    spelling = parts.tokens[token_id]
    if spelling is None:
        return b""
    if token_id in parts.verbatim:
        return spelling.encode("utf-8", "replace")
    if parts.style == "byte_level":
        if all(character in _BYTES for character in spelling):
            return bytes(_BYTES[character] for character in spelling)
        return spelling.encode("utf-8", "replace")
    if parts.style == "words":
        return b" " + spelling.encode("utf-8", "replace")
    if (byte := _BYTE_TOKEN.fullmatch(spelling)) is not None:
        return bytes([int(byte[1], 16)])
    return spelling.replace("\u2581", " ").encode("utf-8", "replace")
