"""Which models can guess for another: the same token behind every id, padding aside, and no more weights than it has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.text import spellings_in
from engine.weights.source import open_source

_PADDING = re.compile(r"\[PAD\d*\]|<unused\d+>|<\|?(?:dummy|reserved|extra)[^>]*>", re.ASCII)

ITSELF = "This is the model itself: every guess is right and none is cheaper. Only good for trying speculation out."
AS_LARGE = "It has as many weights as the model it guesses for, so a guess takes as long as the answer."


class Target(NamedTuple):
    """The model that is guessed for. spellings: id -> its token, None where unused."""

    path: Path
    spellings: Sequence[str | None]
    num_parameters: int

    @staticmethod
    def at(path: Path) -> Target:
        """A model that is not loaded. ValueError for one whose headers cannot be read."""
        source = open_source(path)
        spec = source.spec
        return Target(path, spellings_in(source.tokenizer_files, spec.vocab_size), spec.num_parameters)


class Verdict(NamedTuple):
    """reason: why a model cannot guess; note: why it can but will not pay. Both empty when it may."""

    reason: str = ""
    note: str = ""


class Candidate(NamedTuple):
    """A possible draft model and what was found of it."""

    path: Path
    reason: str
    note: str = ""


def candidates(target: Target, paths: Iterable[Path]) -> list[Candidate]:
    """Every one of ``paths``, in order, judged by its header and tokenizer; no weights are read."""
    return [Candidate(path, *judged(target, path)) for path in paths]


def judged(target: Target, path: Path) -> Verdict:
    """What the model at ``path`` is worth as a draft model for ``target``."""
    if path.resolve() == target.path.resolve():
        return Verdict(note=ITSELF)
    try:
        draft = Target.at(path)
    except (ValueError, OSError) as error:
        return Verdict(str(error))
    reason = why_not(target.spellings, draft.spellings)
    if reason:
        return Verdict(reason)
    size, most = draft.num_parameters, target.num_parameters
    if size > most:
        return Verdict(f"It is larger than this model: {_short(size)} weights against {_short(most)}.")
    return Verdict(note=AS_LARGE if size == most else "")


def _short(number: int) -> str:
    """1.71 B, 135 M, 34,000."""
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def why_not(target: Sequence[str | None], draft: Sequence[str | None]) -> str:
    """Why a model with the tokens ``draft`` cannot guess for one with ``target``; empty when it can. Trailing padding may differ."""
    ours, theirs = _without_padding(target), _without_padding(draft)
    if len(ours) != len(theirs):
        return f"Its vocabulary has {len(theirs):,} tokens, this model's has {len(ours):,}."
    different = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if different is not None:
        return f"Token {different:,} is {theirs[different]!r} there and {ours[different]!r} in this model."
    return ""


def _without_padding(spellings: Sequence[str | None]) -> Sequence[str | None]:
    end = len(spellings)
    while end and (spellings[end - 1] is None or _PADDING.fullmatch(spellings[end - 1] or "")):
        end -= 1
    return spellings[:end]
