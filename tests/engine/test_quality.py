"""Quality against full precision, and the teacher-forced reading that it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saved_models import save_tiny
from tiny_models import make_model

from engine.engine import Engine
from engine.options import OPTIONS, Options
from engine.params import SamplingParams
from engine.quality import fixed_text, fixed_tokens, full_precision, quality, read, reference_rows

FAMILY = "llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(FAMILY, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine.load(str(folder), full_precision(), kv_bytes=1 << 20)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokens(engine: Engine) -> list[int]:
    return fixed_tokens(engine, 100)


def test_the_reference_is_full_precision_of_everything_that_rounds() -> None:
    settings = full_precision()
    assert settings["weights"] == "none"
    assert set(settings) == {option.key for option in OPTIONS if not option.lossless}
    Options(settings)


@pytest.mark.parametrize(
    "changes", [{}, {"chunked_prefill": "off"}, {"kv_cache": "off"}, {"paging": "off"}, {"fused_ops": "off"}]
)
@pytest.mark.parametrize("num_prefill", [1, 33, 75, 100])
def test_reading_gives_each_position_the_logits_transformers_gives(
    engine: Engine, tokens: list[int], changes: dict[str, str], num_prefill: int
) -> None:
    before = dict(engine.options)
    engine.apply(changes)
    got = torch.cat([rows.clone() for rows in engine.read_text(tokens, num_prefill)])
    engine.apply(before)
    with torch.inference_mode():
        wanted = make_model(FAMILY)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    engine.check_integrity()


def test_reading_computes_everything_and_leaves_nothing_behind(engine: Engine, tokens: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.generate([tuple(tokens)], params)  # its pages are findable now
    assert len([*read(engine, tokens)]) == len(tokens)
    (completion,) = engine.generate([tuple(tokens)], params)
    assert completion.usage.cached_tokens == 0
    assert engine.options["prefix"] == "on"


def test_a_reading_left_early_gives_its_pages_back(engine: Engine, tokens: list[int]) -> None:
    reading = engine.read_text(tokens, 10)
    next(reading)
    reading.close()
    assert not engine.has_work
    engine.check_integrity()


def test_a_text_that_does_not_fit_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="window"):
        next(engine.read_text([1] * engine.context_length, 5))


def test_the_fixed_text_ends_where_the_window_does(engine: Engine) -> None:
    assert fixed_tokens(engine, 50) == engine.encode_text(fixed_text()[:50])  # a token is a byte here
    assert len(fixed_tokens(engine, 10**9)) == engine.context_length - 1
    with pytest.raises(ValueError, match="at least 2"):
        fixed_tokens(engine, 1)


def test_full_precision_is_equal_to_itself(engine: Engine, tokens: list[int]) -> None:
    rows = reference_rows(engine, tokens)
    same = quality(rows, read(engine, tokens), tokens)
    assert same.token_agreement == 1.0
    assert same.mean_kl < 1e-9
    assert same.perplexity == pytest.approx(same.reference_perplexity)


def test_rounded_weights_show_in_every_figure(engine: Engine, folder: Path, tokens: list[int]) -> None:
    rows = reference_rows(engine, tokens)
    rounded = {}
    for weights in ("int8", "int4"):
        other = Engine.load(str(folder), {"weights": weights}, kv_bytes=1 << 20)
        rounded[weights] = quality(rows, read(other, tokens), tokens)
        other.close()
    assert 1e-7 < rounded["int8"].mean_kl < rounded["int4"].mean_kl
    assert rounded["int4"].token_agreement <= rounded["int8"].token_agreement <= 1.0
    assert rounded["int4"].perplexity != rounded["int4"].reference_perplexity


def test_the_figures_are_what_their_names_say() -> None:
    certain = torch.tensor([0.0, math.log(3.0)])  # probabilities 1/4, 3/4
    other = torch.tensor([math.log(3.0), 0.0])  # 3/4, 1/4
    got = quality([certain, certain], [certain, other], [0, 1])
    assert got.token_agreement == 0.5
    assert got.mean_kl == pytest.approx((0.5 * math.log(3.0)) / 2)
    assert got.reference_perplexity == pytest.approx(4 / 3)
    assert got.perplexity == pytest.approx(4 / 3)  # the second row predicts nothing that is known
    assert replace(got, mean_kl=0.0) != got


def test_a_masked_token_does_not_make_the_divergence_nan() -> None:
    row = torch.tensor([0.0, 1.0, float("-inf")])
    assert quality([row, row], [row, row], [0, 1]).mean_kl == 0.0


def test_readings_of_different_length_are_refused() -> None:
    row = torch.zeros(2)
    with pytest.raises(ValueError, match="argument 2"):
        quality([row, row], [row], [0, 1])


def test_a_rounded_cache_shows_and_costs_less_than_rounded_weights(engine: Engine, tokens: list[int]) -> None:
    rows = reference_rows(engine, tokens)
    engine.apply({"kv_dtype": "int8"})
    rounded = quality(rows, read(engine, tokens), tokens)
    engine.apply({**full_precision(), "weights": "int4"})
    weights = quality(rows, read(engine, tokens), tokens)
    engine.apply(full_precision())
    assert 1e-8 < rounded.mean_kl < weights.mean_kl
    engine.check_integrity()
