"""TextCodec: between what people write and what a model reads, in both directions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.chat_template import ChatTemplate, TemplateRefusedError, fold_system, plain_conversation
from engine.commands import Message, Prompt
from engine.detokenizer import Detokenizer, unfinished_tail
from engine.stop_strings import StopStrings
from engine.tokenizer import TURN_ENDS, ControlTokens, TokenizerParts, bytes_of
from engine.tokenizer_gguf import spellings_from_gguf, tokenizer_from_gguf
from engine.tokenizer_hf import spellings_from_folder, tokenizer_from_folder

if TYPE_CHECKING:
    from engine.weights.source import TokenizerFiles

__all__ = ["Detokenizer", "StopStrings", "TextCodec"]

_log = logging.getLogger(__name__)
# Ends of text that count even when a template does not write them.
_ALWAYS_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")


class TextCodec:
    """One model's tokenizer, chat template and end-of-text tokens.

    vocab_size: ids below it can be sampled; the model's logits may be padded beyond.
    eos_token_ids: every token that ends a reply.
    has_chat_template: False means that conversations are written as plain "User:" and "Assistant:" turns.
    turn_stop: stop strings that end a reply when there is no template (a base model goes on with the user's turn).
    notes: what a user should know about this tokenizer.
    """

    def __init__(self, parts: TokenizerParts, eos_token_ids: Iterable[int], model_vocab_size: int) -> None:
        self._parts = parts
        self._model_vocab_size = model_vocab_size
        self._tokenizer = parts.tokenizer
        self._control = ControlTokens(parts.control, parts.private)
        self._pieces: dict[int, bytes] = {}
        self._template = ChatTemplate(parts.chat_template) if parts.chat_template else None
        self.vocab_size = min(len(parts.tokens), model_vocab_size)
        self.eos_token_ids = frozenset(
            i for i in {*eos_token_ids, *parts.eos_token_ids, *_turn_ends(parts)} if 0 <= i < self.vocab_size
        )
        self.has_chat_template = self._template is not None
        self.turn_stop: tuple[str, ...] = () if self.has_chat_template else ("\nUser:",)
        self.notes = parts.notes

    @staticmethod
    def open(files: TokenizerFiles, eos_token_ids: Iterable[int], vocab_size: int) -> TextCodec:
        """Build the codec of a model. ``vocab_size``: rows of its embedding. Raises ValueError in plain words."""
        if files.kind == "gguf":
            return TextCodec(tokenizer_from_gguf(files.metadata), eos_token_ids, vocab_size)
        assert files.folder is not None, files
        return TextCodec(tokenizer_from_folder(Path(files.folder)), eos_token_ids, vocab_size)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, exactly those that the model will read.

        A conversation goes through the template, which alone decides about begin-of-text (GGUF: it is added once when the
        template leaves it out), and control tokens inside messages stay literal text. A string is plain text with
        begin-of-text if the model wants one; control tokens in it are control tokens. Ids are checked and taken as they
        are. Raises ValueError.
        """
        if isinstance(prompt, str):
            return self._with_bos(self._ids_of(self._control.exchange(prompt)), self._parts.adds_bos)
        if prompt and isinstance(prompt[0], Message):
            return self._encode_messages(tuple(message for message in prompt if isinstance(message, Message)))
        return self._checked([token for token in prompt if isinstance(token, int)])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``; control tokens are skipped. Bytes that are no UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer()
        return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer for one reply.

        prompt_ids: give them when the reply continues a plain text or ids, so that a character which the prompt leaves
        unfinished is completed and the space before the first word is kept. For a conversation leave them out.
        """
        continues = bool(prompt_ids) and prompt_ids[-1] not in self._parts.private
        tail = unfinished_tail(prompt_ids, self._piece) if continues else b""
        return Detokenizer(self._piece, self._parts.strip_space and not continues, tail)

    def spellings(self) -> list[str | None]:
        """id -> the token's spelling in the model's files; None where an id is unused."""
        return self._parts.tokens[: self.vocab_size]

    def close(self) -> None:
        """End the template's helper process; the codec can still be used and starts a new one when needed."""
        if self._template is not None:
            self._template.close()

    def _encode_messages(self, messages: tuple[Message, ...]) -> list[int]:
        sentinel = _unused_character(message.content for message in messages)
        marked = tuple(Message(m.role, self._control.protect(m.content, sentinel)) for m in messages)
        text = self._render(marked)
        ids = self._ids_of(self._control.exchange(text, sentinel))
        parts = self._parts
        return self._with_bos(ids, parts.adds_bos and (self._template is None or parts.adds_bos_to_template))

    def _render(self, messages: tuple[Message, ...]) -> str:
        add_generation_prompt = messages[-1].role != "assistant"
        if self._template is None:
            return plain_conversation(messages, add_generation_prompt)
        try:
            return self._template.render(messages, self._parts.named, add_generation_prompt)
        except TemplateRefusedError as refusal:
            folded = fold_system(messages)
            if folded is None:
                raise
            _log.info("%s The system message goes into the first turn instead.", refusal)
            return self._template.render(folded, self._parts.named, add_generation_prompt)

    def _ids_of(self, text: str) -> list[int]:
        # Half a surrogate pair cannot be encoded; it becomes "?" as everywhere in Python's "replace".
        text = text.encode("utf-8", "replace").decode("utf-8")
        return self._checked(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _with_bos(self, ids: list[int], wanted: bool) -> list[int]:
        bos = self._parts.bos_token_id
        return [bos, *ids] if wanted and bos is not None and ids[:1] != [bos] else ids

    def _checked(self, ids: list[int]) -> list[int]:
        for token_id in ids:
            if not 0 <= token_id < self._model_vocab_size:
                raise ValueError(
                    f"Token {token_id} is outside the model's vocabulary of {self._model_vocab_size} tokens."
                )
        return ids

    def _piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = bytes_of(self._parts, token_id)
        return piece


def spellings_in(files: TokenizerFiles, vocab_size: int) -> list[str | None]:
    """What ``TextCodec.open(...).spellings()`` gives, without the seconds that building a large tokenizer takes. ValueError as there."""
    if files.kind == "gguf":
        return spellings_from_gguf(files.metadata)[:vocab_size]
    assert files.folder is not None, files
    return spellings_from_folder(Path(files.folder))[:vocab_size]


def _turn_ends(parts: TokenizerParts) -> Iterator[int]:
    """Well-known ends of a turn that this model's template writes, and ends of text that it has at all."""
    template = parts.chat_template or ""
    # In the harmony format <|end|> ends a part of a reply; <|return|> and <|call|> end the reply.
    harmony = "<|return|>" in parts.control and "<|call|>" in parts.control
    for spelling in TURN_ENDS:
        used = spelling in template and not (harmony and spelling == "<|end|>")
        if spelling in parts.control and (used or spelling in _ALWAYS_ENDS):
            yield parts.control[spelling]


def _unused_character(texts: Iterable[str]) -> str:
    """A character that occurs in none of ``texts``: a noncharacter, or if a user typed them all, a private one."""
    used = set().union(*texts)
    candidates = (chr(code) for block in (range(0xFDD2, 0xFDF0), range(0xF0000, 0xFFFFE)) for code in block)
    return next(character for character in candidates if character not in used)
