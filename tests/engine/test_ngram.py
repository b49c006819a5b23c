"""Guesses by suffix matching: what is found, that the index grows with its text, and that no request sees another's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.params import SamplingParams
from engine.sampling import SamplerState
from engine.scheduler import Request
from engine.speculation.ngram import MIN_MATCH, NgramProposer, SuffixIndex
from engine.speculation.proposer import Wanted


def wanted(number: int, tokens: list[int], most: int = 4) -> Wanted:
    return Wanted(Request(number, tokens, 1, 99), SamplerState(SamplingParams()), most)


def test_what_followed_before_is_guessed() -> None:
    assert SuffixIndex().guess([1, 2, 3, 4, 5, 6, 9, 2, 3, 4], 3) == (5, 6, 9)


def test_fewer_tokens_than_a_match_guess_nothing() -> None:
    assert SuffixIndex().guess([7, 7], 3) == ()
    assert SuffixIndex().guess([8, 3, 4, 5, 9, 6, 4], 3) == ()


def test_a_short_match_guesses_few_tokens() -> None:
    assert SuffixIndex().guess([8, 3, 4, 5, 9, 9, 3, 4], 4) == (5, 9)
    assert SuffixIndex().guess([8, 3, 4, 5, 9, 8, 3, 4], 4) == (5, 9, 8, 3)


def test_the_longest_match_wins_over_a_later_one() -> None:
    text = [5, 1, 2, 3, 70, 6, 1, 2, 3, 80, 5, 1, 2, 3]
    assert SuffixIndex().guess(text, 1) == (70,)
    assert SuffixIndex().guess(text[1:], 1) == (80,)  # without the 5 before it the first place is no longer match
    assert SuffixIndex().guess([1, 2, 3, 70, 1, 2, 3, 80, 9, 1, 2, 3], 1) == (80,)


def test_a_repeating_end_goes_on_repeating() -> None:
    assert SuffixIndex().guess([0, 1, 2, 1, 2, 1, 2], 6) == (1, 2, 1, 2, 1, 2)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.lists(st.integers(1, 9), min_size=1, max_size=12))
@settings(max_examples=150, deadline=None)
def test_an_index_that_grew_guesses_like_a_fresh_one(text, strides) -> None:
    grown, end = SuffixIndex(), 0
    for stride in strides:
        end = min(len(text), end + stride)
        guesses = grown.guess(text[:end], 5)
        assert guesses == SuffixIndex().guess(text[:end], 5)
        suffix = text[max(0, end - MIN_MATCH) : end]
        seen = [text[i : i + MIN_MATCH] for i in range(end - MIN_MATCH)]
        assert bool(guesses) == (len(suffix) == MIN_MATCH and suffix in seen)


def test_no_request_sees_anothers_text_and_an_id_used_again_starts_anew() -> None:
    proposer = NgramProposer()
    assert proposer.propose([wanted(1, [1, 2, 3, 4, 1, 2, 3])])[1].token_ids == (4, 1, 2, 3)
    assert proposer.propose([wanted(2, [9, 1, 2, 3])]) == {}
    proposer.forget(1)
    assert proposer.propose([wanted(1, [9, 9, 8, 1, 2, 3])]) == {}
    proposer.forget(1)
    proposer.forget(1)
