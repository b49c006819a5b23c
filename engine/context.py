"""What is sent when a conversation outgrows the window. Imports no torch.

Oldest turns go first, and they go in large bites: the cut is made only at turns where a multiple of a quarter of the
window has gone before. Those places depend on the beginning of the conversation alone, so the kept beginning stays the
same until another quarter has been written, and until then the prefix index finds all of it again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.commands import Message, Prompt

MOST_REPLY_TOKENS = 512  # room kept free for the reply, at most
_BITES_PER_WINDOW = 4

CountTokens = Callable[[Sequence[Message]], int]


class Fitted(NamedTuple):
    """The messages to send: system messages first, then the newest turns; and how many older ones were left out."""

    messages: tuple[Message, ...]
    num_dropped: int


def reply_room(limit: int, max_tokens: int | None = None) -> int:
    """Tokens kept free for the reply in a window of ``limit``: what it may take, at most 512 or a quarter."""
    most = min(MOST_REPLY_TOKENS, limit // 4)
    return most if max_tokens is None else min(most, max_tokens)


def fit(messages: Sequence[Message], count_tokens: CountTokens, limit: int, reply_tokens: int | None = None) -> Fitted:
    """The newest turns, whole, behind the system message, so many that a reply has room. The same input gives the same cut.

    count_tokens: tokens of a rendered conversation, as the model would read it.
    limit: tokens of the window; a prompt must be shorter. reply_tokens: room for the reply, by default `reply_room`.
    When only the last turn is left it may take the reply's room too. Raises ValueError when even that does not fit.
    """
    room = limit - (reply_room(limit) if reply_tokens is None else reply_tokens)
    whole = tuple(messages)
    if count_tokens(whole) <= room:
        return Fitted(whole, 0)
    system, turns = _split(whole)
    cuts = _cuts([count_tokens(turn) for turn in turns], max(1, limit // _BITES_PER_WINDOW))

    def fits(cut: int) -> bool:
        return count_tokens(_joined(system, turns[cut:])) <= room

    at = bisect_left(cuts, True, key=fits)
    kept = _joined(system, turns[cuts[at] :] if at < len(cuts) else turns[-1:])
    if at == len(cuts) and (num_tokens := count_tokens(kept)) >= limit:
        raise ValueError(_refusal(num_tokens, limit, bool(system)))
    return Fitted(kept, len(whole) - len(kept))


def _split(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], list[tuple[Message, ...]]]:
    """System messages at the beginning, and the turns: each a user's message with what follows it."""
    num_system = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    turns: list[tuple[Message, ...]] = []
    for message in messages[num_system:]:
        if turns and (message.role != "user" or all(earlier.role != "user" for earlier in turns[-1])):
            turns[-1] = (*turns[-1], message)
        else:
            turns.append((message,))
    return messages[:num_system], turns


def _cuts(sizes: Sequence[int], bite: int) -> list[int]:
    """Turns at which the conversation may begin: for each multiple of ``bite`` the first turn with so much before it."""
    cuts: list[int] = []
    before, wanted = 0, bite
    for at, size in enumerate(sizes):
        if before >= wanted:
            cuts.append(at)
            wanted = (before // bite + 1) * bite
        before += size
    return cuts


def _joined(system: tuple[Message, ...], turns: Sequence[tuple[Message, ...]]) -> tuple[Message, ...]:
    return (*system, *(message for turn in turns for message in turn))


def _refusal(num_tokens: int, limit: int, has_system: bool) -> str:
    what = "The system message and your last message have" if has_system else "Your last message has"
    return (
        f"{what} {num_tokens:,} tokens, and the window holds {limit:,} with the reply, "
        "so leaving out older messages does not help. Shorten the message, or choose a model with a longer window."
    )


def encode_within(
    prompt: Prompt, encode: Callable[[Prompt], list[int]], context_length: int, room: int, may_drop: bool
) -> tuple[list[int], int]:
    """Tokens of ``prompt``, and how many messages were left out of it.

    may_drop: it is a conversation, whose oldest turns may go when it does not leave ``room`` tokens for the reply.
    Raises ValueError when nothing is left of it, or when it fills the window of ``context_length`` tokens.
    """
    tokens, num_dropped = encode(prompt), 0
    if may_drop and len(tokens) > context_length - room:
        messages = [message for message in prompt if isinstance(message, Message)]
        kept, num_dropped = fit(messages, lambda its: len(encode(tuple(its))), context_length, room)
        tokens = encode(kept)
    if not tokens:
        raise ValueError("The prompt is empty. Write something first.")
    if len(tokens) >= context_length:
        raise ValueError(
            f"The prompt has {len(tokens):,} tokens, and the window holds {context_length:,} with the reply. "
            "Shorten the prompt, or start a new chat."
        )
    return tokens, num_dropped
