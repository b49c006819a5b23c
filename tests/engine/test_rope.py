"""Rotary tables against transformers' own frequencies, for every kind (FIELD 37)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model.rope import RopeTable, inverse_frequencies
from engine.model.spec import RopeSpec

HEAD_DIM = 32
THETA = 10000.0


def theirs(seq_len: int | None = None, **parameters: Any) -> tuple[torch.Tensor, float]:
    """transformers' frequencies and attention factor for a head of 32."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": THETA, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=seq_len)


def test_plain_frequencies_are_powers_of_theta() -> None:
    frequencies = inverse_frequencies(RopeSpec(THETA, HEAD_DIM), 64)
    wanted = [THETA ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]
    torch.testing.assert_close(frequencies, torch.tensor(wanted))


def test_linear() -> None:
    wanted, _ = theirs(rope_type="linear", factor=8.0)
    torch.testing.assert_close(inverse_frequencies(RopeSpec(THETA, HEAD_DIM, "linear", 8.0), 64), wanted)


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"), [(8.0, 1.0, 4.0, 64), (32.0, 1.0, 4.0, 256), (4.0, 2.0, 3.0, 128)]
)
def test_llama3(factor: float, low: float, high: float, original: int) -> None:
    wanted, _ = theirs(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
    rope = RopeSpec(
        THETA,
        HEAD_DIM,
        "llama3",
        factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )
    frequencies = inverse_frequencies(rope, 64)
    torch.testing.assert_close(frequencies, wanted)
    plain = inverse_frequencies(RopeSpec(THETA, HEAD_DIM), 64)
    # All three regions must be there: kept, blended, stretched.
    ratio = plain / frequencies
    assert ratio.min() == pytest.approx(1.0)
    assert ratio.max() == pytest.approx(factor)
    assert ((ratio > 1.01) & (ratio < factor - 0.01)).any()


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("factor", "fast", "slow", "original"), [(4.0, 32.0, 1.0, 128), (16.0, 4.0, 2.0, 64), (2.0, 8.0, 8.0, 300)]
)
def test_yarn(factor: float, fast: float, slow: float, original: int, truncate: bool) -> None:
    wanted, attention_factor = theirs(
        rope_type="yarn",
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        original_max_position_embeddings=original,
        truncate=truncate,
    )
    rope = RopeSpec(
        THETA,
        HEAD_DIM,
        "yarn",
        factor,
        beta_fast=fast,
        beta_slow=slow,
        original_max_position=original,
        attention_factor=attention_factor,
        truncate=truncate,
    )
    torch.testing.assert_close(inverse_frequencies(rope, 64), wanted)
    cos, _ = RopeTable(rope, 512).rows(torch.tensor([0]), 1)
    assert attention_factor > 1.0
    torch.testing.assert_close(cos, torch.full_like(cos, attention_factor))


LONGROPE = RopeSpec(
    THETA,
    HEAD_DIM,
    "longrope",
    original_max_position=128,
    short_factors=tuple(1.0 + 0.05 * i for i in range(16)),
    long_factors=tuple(2.0 + 0.5 * i for i in range(16)),
)


@pytest.mark.parametrize("max_context", [127, 128, 129, 512])
def test_longrope_takes_the_long_factors_only_beyond_the_trained_window(max_context: int) -> None:
    wanted, _ = theirs(
        seq_len=max_context,
        rope_type="longrope",
        factor=4.0,
        short_factor=list(LONGROPE.short_factors),
        long_factor=list(LONGROPE.long_factors),
        original_max_position_embeddings=128,
    )
    torch.testing.assert_close(inverse_frequencies(LONGROPE, max_context), wanted)


def test_factors_divide_the_plain_frequencies() -> None:
    divisors = tuple(1.0 + i for i in range(16))
    rope = RopeSpec(THETA, HEAD_DIM, "factors", short_factors=divisors)
    plain = inverse_frequencies(RopeSpec(THETA, HEAD_DIM), 64)
    torch.testing.assert_close(inverse_frequencies(rope, 64), plain / torch.tensor(divisors))


def test_factors_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(AssertionError):
        inverse_frequencies(RopeSpec(THETA, HEAD_DIM, "factors", short_factors=(1.0,)), 64)


def test_rows_are_the_angles_of_their_positions_and_do_not_change_when_the_table_grows() -> None:
    rope = dataclasses.replace(RopeSpec(THETA, HEAD_DIM), attention_factor=1.25)
    table = RopeTable(rope, 100_000)
    positions = torch.tensor([3, 700, 3, 0])
    before = [rows.clone() for rows in table.rows(positions, 701)]
    first_size = table.num_positions
    far = torch.tensor([first_size, 5000])
    cos, sin = table.rows(far, 5001)
    assert table.num_positions > first_size
    angles = far[:, None] * inverse_frequencies(rope, 64)
    torch.testing.assert_close(cos, 1.25 * angles.cos())
    torch.testing.assert_close(sin, 1.25 * angles.sin())
    for old, new in zip(before, table.rows(positions, 701), strict=True):
        assert torch.equal(old, new)


def test_a_table_reaches_the_last_position_of_every_context() -> None:
    table = RopeTable(RopeSpec(THETA, HEAD_DIM), 4096)
    for context in (1, table.num_positions, table.num_positions + 1, 3 * table.num_positions):
        cos, _ = table.rows(torch.tensor([context - 1]), context)
        assert cos.shape == (1, HEAD_DIM // 2)


def test_tables_stay_in_fp32_and_tell_far_neighbours_apart() -> None:
    cos, sin = RopeTable(RopeSpec(THETA, HEAD_DIM), 8192).rows(torch.tensor([4096, 4097]), 4098)
    assert cos.dtype == sin.dtype == torch.float32
    assert not torch.equal(cos[0], cos[1])
