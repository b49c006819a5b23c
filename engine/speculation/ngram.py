"""Guesses by suffix matching: if the text's last tokens occurred before, guess that what followed them follows again.

Also known as prompt lookup decoding (Saxena 2023). It costs no weights and no forward pass, and pays where a reply repeats:
quoting, editing, code. Each request is matched against its own prompt and reply only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.events import NO_COST, StepCost
from engine.speculation.proposer import Wanted
from engine.speculation.verify import Proposal

MIN_MATCH = 2  # tokens that must agree
SURE_MATCH = 3  # with fewer, common word pairs match everywhere: then only few tokens are guessed
UNSURE_GUESSES = 2
MAX_MATCH = 32  # agreement beyond this does not make a guess better
MAX_PLACES = 8  # latest occurrences that are compared


class SuffixIndex:
    """Where each run of ``MIN_MATCH`` tokens of one growing text occurred; grows with the text, never starts over."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}  # run -> positions just behind it, ascending
        self._num_indexed = MIN_MATCH

    def guess(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """At most ``count`` tokens that may follow ``tokens``, the text of the last call with more behind it."""
        self._index(tokens)
        end = self._best_place(tokens)
        if end is None:
            return ()
        if _agreement(tokens, end) < SURE_MATCH:
            count = min(count, UNSURE_GUESSES)
        guesses: list[int] = []
        for source in range(end, end + count):  # a run that reaches the end of the text goes on into its own copy
            guesses.append(tokens[source] if source < len(tokens) else guesses[source - len(tokens)])
        return tuple(guesses)

    def _index(self, tokens: Sequence[int]) -> None:
        for end in range(self._num_indexed, len(tokens)):
            self._ends.setdefault(tuple(tokens[end - MIN_MATCH : end]), []).append(end)
        self._num_indexed = max(self._num_indexed, len(tokens))

    def _best_place(self, tokens: Sequence[int]) -> int | None:
        """Where the longest match of the text's end was; of equals the latest."""
        ends = self._ends.get(tuple(tokens[-MIN_MATCH:]), ())
        return max(reversed(ends[-MAX_PLACES:]), key=lambda end: _agreement(tokens, end), default=None)


def _agreement(tokens: Sequence[int], end: int) -> int:
    """How many tokens before ``end`` equal the text's last ones."""
    length = MIN_MATCH
    while length < min(MAX_MATCH, end) and tokens[end - length - 1] == tokens[-length - 1]:
        length += 1
    return length


class NgramProposer:
    """One SuffixIndex per request."""

    name = "n-gram"

    def __init__(self) -> None:
        self._indexes: dict[int, SuffixIndex] = {}

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Proposal]:
        found: dict[int, Proposal] = {}
        for request, _, most in wanted:
            index = self._indexes.setdefault(request.request_id, SuffixIndex())
            guesses = index.guess(request.tokens, most)
            if guesses:
                found[request.request_id] = Proposal(guesses)
        return found

    def take_cost(self) -> StepCost:
        return NO_COST

    def forget(self, request_id: int) -> None:
        self._indexes.pop(request_id, None)
