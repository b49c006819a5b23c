"""Which models can guess for another: the same token behind every id, padding aside."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from engine.text import TextCodec
from engine.weights.source import open_source

_PADDING = re.compile(r"\[PAD\d*\]|<unused\d+>|<\|?(?:dummy|reserved|extra)[^>]*>", re.ASCII)


class Candidate(NamedTuple):
    """A possible draft model. reason: why it does not fit; empty when it does."""

    path: Path
    reason: str


def candidates(target: TextCodec, target_parameters: int, paths: Iterable[Path]) -> list[Candidate]:
    """Every one of ``paths``, in order, judged by its header and tokenizer; no weights are read."""
    return [Candidate(path, judged(target, path, target_parameters)) for path in paths]


def judged(target: TextCodec, path: Path, target_parameters: int | None = None) -> str:
    """Why the model at ``path`` cannot guess for ``target``; empty when it can. Given its size, larger ones cannot."""
    try:
        source = open_source(path)
        codec = TextCodec.open(source.tokenizer_files, source.eos_token_ids, source.spec.vocab_size)
    except (ValueError, OSError) as error:
        return str(error)
    reason = why_not(target, codec)
    if not reason and target_parameters is not None and source.spec.num_parameters >= target_parameters:
        return "It is not smaller than the model it would guess for."
    return reason


def why_not(target: TextCodec, draft: TextCodec) -> str:
    """Why ``draft`` cannot guess for ``target``; empty when it can. Trailing padding tokens may differ."""
    ours, theirs = _without_padding(target.spellings()), _without_padding(draft.spellings())
    if len(ours) != len(theirs):
        return f"Its vocabulary has {len(theirs):,} tokens, this model's has {len(ours):,}."
    different = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if different is not None:
        return f"Token {different:,} is {theirs[different]!r} there and {ours[different]!r} in this model."
    return ""


def _without_padding(spellings: list[str | None]) -> list[str | None]:
    end = len(spellings)
    while end and (spellings[end - 1] is None or _PADDING.fullmatch(spellings[end - 1] or "")):
        end -= 1
    return spellings[:end]
