"""The sampler: distributions, edges (FIELD 43), and independence of a draw from everything around it (FIELD 34)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.params import SamplingParams
from engine.sampling import SamplerState, sample

VOCAB = 12
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, 0.2, 0.1, -3.0])


def state(vocab_size: int | None = None, prompt: Sequence[int] = (), **params: object) -> SamplerState:
    return SamplerState(SamplingParams(**params), prompt, vocab_size)  # type: ignore[arg-type]


def one(logits: Tensor, sampler: SamplerState) -> int:
    result = sample(logits[None], [sampler])[0]
    assert not result.error
    return result.token_id


def reference_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The definition, one step after another in float64, with a full sort."""
    scaled = logits.double() / params.temperature
    order = scaled.argsort(descending=True, stable=True)
    keep = torch.ones(len(logits), dtype=torch.bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    probs = torch.where(keep, scaled, -torch.inf).softmax(0)
    reached = 0.0
    for place, token in enumerate(order.tolist()):
        if place and reached >= params.top_p:
            keep[token] = False
        reached += float(probs[token])
    probs = torch.where(keep, scaled, -torch.inf).softmax(0)
    keep &= probs >= params.min_p * probs.max()
    return torch.where(keep, scaled, -torch.inf).softmax(0)


def chi_squared(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    used = expected > 0
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    return float(statistic), int(used.sum()) - 1


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
]


def test_mixed_rows_follow_their_own_distributions() -> None:
    """3000 draws per setting, all settings and a greedy row in each batch: chi-squared with fixed seeds."""
    samplers = [state(seed=100 + i, **chosen) for i, chosen in enumerate(SETTINGS)] + [state(temperature=0)]
    logits = LOGITS.expand(len(samplers), VOCAB)
    counts = torch.zeros(len(samplers), VOCAB)
    draws = 3000
    for _ in range(draws):
        for row, result in enumerate(sample(logits, samplers)):
            counts[row, result.token_id] += 1
            samplers[row].commit(result.token_id)
    assert counts[-1, 0] == draws
    for row, sampler in enumerate(samplers[:-1]):
        expected = reference_distribution(LOGITS, sampler.params) * draws
        assert counts[row][expected == 0].sum() == 0, SETTINGS[row]
        statistic, freedom = chi_squared(counts[row], expected)
        # Mean `freedom`, standard deviation sqrt(2 * freedom): four deviations, with seeds that never change.
        assert statistic < freedom + 4 * math.sqrt(2 * freedom), (SETTINGS[row], statistic, freedom)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40),
    st.floats(0.05, 3),
    st.integers(0, 50),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**40),
)
def test_a_draw_is_always_inside_the_support(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    row = torch.tensor(values)
    token = one(row, SamplerState(params))
    # Ties and the last bit of a cumulative sum may fall either way; a clear exclusion may not be crossed.
    loose = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-5), min_p=max(0.0, min_p * (1 - 1e-4))
    )
    allowed = reference_distribution(row, loose) > 0
    assert (row[token] >= row[allowed].min() - 1e-5 * max(1.0, temperature)).item()


def test_same_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    steps = [torch.randn(50, generator=generator) for _ in range(20)]

    def run(companions: int, position: int) -> list[int]:
        mine = state(seed=42, temperature=1.0, top_p=0.95)
        others = [state(temperature=1.0, seed=7 + i) for i in range(companions)]
        tokens = []
        for step in steps:
            rows, batch = [torch.randn(50) for _ in others], list(others)
            rows.insert(position, step)
            batch.insert(position, mine)
            tokens.append(sample(torch.stack(rows), batch)[position].token_id)
            mine.commit(tokens[-1])
        return tokens

    assert run(0, 0) == run(3, 1) == run(7, 7)


def test_a_draw_without_commit_does_not_advance_the_generator() -> None:
    """Prefill chunks or a preempted step may ask again: the same index draws the same number."""
    sampler = state(seed=3, temperature=1.0)
    flat = torch.zeros(1000)
    first = one(flat, sampler)
    assert one(flat, sampler) == first
    sampler.commit(first)
    assert one(flat, sampler) != first


def test_different_seeds_and_no_seed_differ() -> None:
    flat = torch.zeros(100_000)
    assert one(flat, state(seed=1, temperature=1.0)) != one(flat, state(seed=2, temperature=1.0))
    assert one(flat, state(temperature=1.0)) != one(flat, state(temperature=1.0))
    for seed in (-1, 0, 2**64, 2**200):
        assert one(flat, state(seed=seed, temperature=1.0)) == one(flat, state(seed=seed, temperature=1.0))


@pytest.mark.parametrize("edge", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-9}])
def test_the_tightest_filters_keep_the_most_likely_token(edge: dict[str, float]) -> None:
    for seed in range(20):
        assert one(LOGITS, state(seed=seed, **({"temperature": 1.0} | edge))) == 0


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    wide = [one(LOGITS, state(seed=seed, temperature=1.0, top_k=10**6)) for seed in range(50)]
    plain = [one(LOGITS, state(seed=seed, temperature=1.0)) for seed in range(50)]
    assert wide == plain


def test_top_p_needs_more_than_the_first_candidates() -> None:
    """A flat row of 5000: 90 % are 4500 tokens, far beyond the first few hundred that are sorted."""
    flat = torch.zeros(5000)
    seen = {one(flat, state(seed=seed, temperature=1.0, top_p=0.9)) for seed in range(200)}
    assert len(seen) > 150


def test_padding_rows_are_never_chosen() -> None:
    logits = torch.zeros(20)
    logits[15:] = 1000.0
    assert one(logits, state(vocab_size=15, temperature=0)) < 15
    assert all(one(logits, state(vocab_size=15, seed=s, temperature=1.0)) < 15 for s in range(50))
    assert all(one(logits, state(vocab_size=15, seed=s, temperature=1.0, top_p=0.5)) < 15 for s in range(50))
    reported = sample(logits[None], [state(vocab_size=15, temperature=0, logprobs=20)])[0].logprob
    assert reported is not None
    assert len(reported.top) == 15
    assert reported.logprob == pytest.approx(-math.log(15))


def test_masked_and_broken_rows_fail_alone() -> None:
    logits = LOGITS.repeat(5, 1)
    logits[1] = torch.nan
    logits[2, 3] = torch.nan
    logits[3] = -torch.inf
    results = sample(logits, [state(temperature=0), *(state(temperature=t, seed=1) for t in (0, 1.0, 1.0, 0))])
    assert [bool(r.error) for r in results] == [False, True, True, True, False]
    assert results[0].token_id == results[4].token_id == 0
    assert "NaN" in results[1].error
    assert "masked" in results[3].error


def test_a_bias_of_minus_infinity_on_everything_is_reported() -> None:
    forbidden = dict.fromkeys(range(VOCAB), -math.inf)
    assert "masked" in sample(LOGITS[None], [state(temperature=1.0, logit_bias=forbidden)])[0].error


def test_a_bias_of_infinity_forces_a_token() -> None:
    for temperature in (0, 1.0):
        forced = sample(LOGITS[None], [state(temperature=temperature, logit_bias={7: math.inf})])[0]
        assert forced.token_id == 7


def test_bias_outside_the_vocabulary_changes_nothing() -> None:
    assert one(LOGITS, state(temperature=0, logit_bias={10**6: 100.0, -1: 100.0})) == 0


def test_zero_probability_tokens_are_never_drawn() -> None:
    logits = torch.full((9,), -torch.inf)
    logits[4] = -5.0
    for seed in range(50):
        assert one(logits, state(seed=seed, temperature=1.0)) == 4

    class AtTheEnd(SamplerState):
        def uniform(self) -> float:
            return 1.0 - 2.0**-53

    logits[2] = -5.0
    assert one(logits, AtTheEnd(SamplingParams(temperature=1.0))) == 4


def test_repetition_penalty_reads_prompt_and_reply() -> None:
    logits = torch.tensor([4.0, 3.0, 2.5, -1.0])
    sampler = state(prompt=[0], temperature=0, repetition_penalty=2.0)
    assert one(logits, sampler) == 1  # 4 / 2 < 3
    sampler.commit(1)
    assert one(logits, sampler) == 2  # 3 / 2 < 2.5
    negative = state(prompt=[1], temperature=0, repetition_penalty=3.0)
    assert one(torch.tensor([-2.0, -1.0]), negative) == 0  # a negative logit is multiplied: -3 < -2


def test_presence_and_frequency_penalties_read_the_reply_alone() -> None:
    logits = torch.tensor([2.0, 1.5, 0.0])
    presence = state(prompt=[0, 0], temperature=0, presence_penalty=1.0)
    assert one(logits, presence) == 0
    presence.commit(0)
    presence.commit(0)
    assert one(logits, presence) == 1  # 2 - 1 < 1.5, once however often
    frequency = state(temperature=0, frequency_penalty=0.3)
    expected = []
    for _ in range(6):
        expected.append(one(logits, frequency))
        frequency.commit(expected[-1])
    assert expected == [0, 0, 1, 0, 1, 0]


def test_penalties_leave_the_logits_unchanged() -> None:
    before = LOGITS.clone()
    sampler = state(temperature=1.0, seed=1, logit_bias={1: 5.0}, frequency_penalty=1.0, repetition_penalty=1.5)
    sampler.commit(one(LOGITS, sampler))
    one(LOGITS, sampler)
    assert torch.equal(before, LOGITS)


def test_logprobs_are_those_of_the_model() -> None:
    sampler = state(temperature=0.5, seed=1, logprobs=3, logit_bias={9: 100.0})
    result = sample(LOGITS[None], [sampler])[0]
    truth = LOGITS.double().log_softmax(0)
    assert result.token_id == 9
    assert result.logprob is not None
    assert result.logprob.token_id == 9
    assert result.logprob.logprob == pytest.approx(float(truth[9]), abs=1e-5)
    assert [token for token, _ in result.logprob.top] == [0, 1, 2]
    assert [value for _, value in result.logprob.top] == pytest.approx(truth[:3].tolist(), abs=1e-5)


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 5), []) == []
