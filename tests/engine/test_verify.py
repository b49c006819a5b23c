"""Speculation keeps the distribution: chi-squared against the exact joint distribution, edges, and seeds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_sampling import LOGITS, SETTINGS, reference_distribution

from engine.params import SamplingParams
from engine.sampling import SamplerState, distribution, draw_from, sample_row
from engine.speculation.verify import NO_PROPOSAL, Proposal, verify

VOCAB = 4
LENGTH = 3  # tokens per text
TEXTS = 2000  # per setting: 4 settings x 3 tokens = 24,000 draws per kind of guess
_random = np.random.default_rng(3)
TARGET = _random.normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)  # logits, by the token before
DRAFT = (TARGET + _random.normal(0, 0.8, (VOCAB, VOCAB))).astype(np.float32)
ROWS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3, "frequency_penalty": 0.5},
    {"temperature": 1.3, "top_p": 0.85, "presence_penalty": 0.7},
    {"temperature": 0.9, "min_p": 0.15, "repetition_penalty": 1.4, "logit_bias": {1: 0.5}},
)
Guess = Callable[[int, SamplerState, int], Proposal]


def by_copying(last: int, state: SamplerState, most: int) -> Proposal:
    """Guesses made without chance, right now and then."""
    return Proposal(tuple((last + 1 + place) % VOCAB for place in range(most)))


def by_draft(last: int, state: SamplerState, most: int) -> Proposal:
    """Guesses drawn from another model under the request's own settings."""
    fork, token_ids, q = state.fork(), [], []
    for _ in range(most):
        row = distribution(DRAFT[last], fork)
        assert row is not None
        last = draw_from(row, fork.uniform(b"draft"))
        fork.commit(last)
        token_ids.append(last)
        q.append(row)
    return Proposal(tuple(token_ids), tuple(q))


def write(params: SamplingParams, guess: Guess, most: int) -> tuple[int, ...]:
    """A text of LENGTH tokens after token 0, with ``most`` guesses at a time."""
    state, text = SamplerState(params, (0,)), [0]
    while len(text) <= LENGTH:
        proposal = guess(text[-1], state, most)
        seen = [text[-1], *proposal.token_ids]
        got = verify(TARGET[seen], proposal, state)
        assert got.num_accepted <= got.num_tested <= most
        assert (
            tuple(each.token_id for each in got.sampled[: got.num_accepted]) == proposal.token_ids[: got.num_accepted]
        )
        assert len(got.sampled) == got.num_accepted + 1
        text += [each.token_id for each in got.sampled]
    return tuple(text[1 : LENGTH + 1])


def exact(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each text without speculation."""
    found = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        state, last, probability = SamplerState(params, (0,)), 0, 1.0
        for token in text:
            row = distribution(TARGET[last], state)
            assert row is not None
            probability *= row[token]
            state.commit(token)
            last = token
        found[text] = probability
    return found


def deviation(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], texts: int) -> float:
    """Chi-squared in its own standard deviations; infinite when something impossible was written. Rare texts are pooled."""
    if any(expected[text] == 0 for text in counts):
        return float("inf")
    cells = [(counts[text], share * texts) for text, share in expected.items() if share * texts >= 5]
    cells.append((texts - sum(c for c, _ in cells), max(texts - sum(e for _, e in cells), 1e-9)))
    if cells[-1][1] < 5:
        cells.pop()
    statistic = sum((count - share) ** 2 / share for count, share in cells)
    return (statistic - (len(cells) - 1)) / (2 * (len(cells) - 1)) ** 0.5


@pytest.mark.parametrize("guess", [by_copying, by_draft])
def test_texts_have_the_distribution_they_have_without_guesses(guess: Guess) -> None:
    """Four rows with different settings, taking turns as in a batch; seeds are fixed, so four deviations are a bug."""
    rows = [SamplingParams(seed=index, **settings) for index, settings in enumerate(ROWS)]  # type: ignore[arg-type]
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in rows]
    for number in range(TEXTS):
        for index, settings in enumerate(ROWS):
            params = SamplingParams(seed=1000 * number + index, **settings)  # type: ignore[arg-type]
            counts[index][write(params, guess, 1 + number % 3)] += 1
    for params, its in zip(rows, counts, strict=True):
        assert deviation(its, exact(params), TEXTS) < 4, params


def test_the_measure_notices_a_verifier_that_accepts_too_much() -> None:
    params = SamplingParams(temperature=1.0)
    texts = Counter(
        tuple(by_draft(0, SamplerState(SamplingParams(temperature=1.0, seed=number), (0,)), LENGTH).token_ids)
        for number in range(TEXTS)
    )
    assert deviation(texts, exact(params), TEXTS) > 8


@pytest.mark.parametrize("settings", ROWS)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_guesses_made_without_chance_do_not_change_what_a_seed_writes(settings: dict[str, object], most: int) -> None:
    for seed in range(40):
        params = SamplingParams(seed=seed, **settings)  # type: ignore[arg-type]
        assert write(params, by_copying, most) == write(params, lambda last, state, most: NO_PROPOSAL, 0)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_distribution_is_that_of_the_definition(settings: dict[str, float]) -> None:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    got = distribution(LOGITS.numpy(), SamplerState(params))
    torch.testing.assert_close(torch.from_numpy(got), reference_distribution(LOGITS, params), atol=1e-6, rtol=1e-5)


def test_equal_distributions_accept_everything() -> None:
    for seed in range(300):
        state = SamplerState(SamplingParams(temperature=1.0, seed=seed))
        q = distribution(TARGET[0], state)
        draft = draw_from(q, state.uniform(b"draft"))
        got = verify(TARGET[[0, draft]], Proposal((draft,), (q,)), state)
        assert (got.num_tested, got.num_accepted, len(got.sampled)) == (1, 1, 2)


def test_a_residual_that_sums_to_zero_still_draws_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding can reject a guess although p equals q."""
    monkeypatch.setattr(SamplerState, "uniform", lambda self, purpose=b"": 1.0 - 2.0**-53)
    state = SamplerState(SamplingParams(temperature=1.0, seed=1))
    p = distribution(TARGET[0], state)
    q = p * (1 + 1e-12)
    got = verify(TARGET[[0, 2]], Proposal((2,), (q,)), state)
    assert 0 <= got.sampled[0].token_id < VOCAB
    assert not got.sampled[0].error


def test_greedy_rows_accept_what_they_would_choose_penalties_included() -> None:
    """Token 1 is likeliest twice, but its second turn is penalised away; a rejected guess leaves no penalty behind."""
    row = np.array([0.0, 2.0, 1.5, -1.0], dtype=np.float32)
    state = SamplerState(SamplingParams(temperature=0, presence_penalty=1.0))
    got = verify(np.stack([row, row, row]), Proposal((1, 1)), state)
    assert [each.token_id for each in got.sampled] == [1, 2]
    assert (got.num_tested, got.num_accepted) == (2, 1)
    assert sample_row(row, state).token_id == 1  # 1 and 2 counted once each: 1 leads again
    assert state.num_drawn == 2


def test_a_row_of_nan_behind_an_accepted_guess_ends_the_step_not_the_reply() -> None:
    state = SamplerState(SamplingParams(temperature=0))
    broken = np.full(VOCAB, np.nan, dtype=np.float32)
    fine = np.array([0.0, 1.0, 0.0, 0.0], dtype=np.float32)
    got = verify(np.stack([fine, broken]), Proposal((1,)), state)
    assert ([each.token_id for each in got.sampled], got.sampled[0].error) == ([1], "")
    assert "NaN" in verify(broken[None], NO_PROPOSAL, state).sampled[0].error


def test_logprobs_are_the_models_own_for_accepted_and_replaced_guesses() -> None:
    for seed in range(20):
        params = SamplingParams(temperature=1.0, seed=seed, logprobs=2)
        state = SamplerState(params)
        proposal = by_draft(0, state, 2)
        got = verify(TARGET[[0, *proposal.token_ids]], proposal, state)
        last = 0
        for each in got.sampled:
            assert each.logprob is not None
            wanted = torch.from_numpy(TARGET[last]).log_softmax(0)[each.token_id]
            assert each.logprob.logprob == pytest.approx(float(wanted), abs=1e-5)
            last = each.token_id
