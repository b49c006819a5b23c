"""Speculation keeps the distribution, through the whole engine: real n-gram and draft model, mixed rows in one batch.

A model of five tokens writes texts of four: one of the prompt's step, then guesses. Their exact distribution is computed from its logits and the sampler's
definition; chi-squared over more than 20,000 draws compares. ``test_verify`` does the same for the rule alone.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from test_verify import ROWS, deviation
from tokenizers import Tokenizer
from tokenizers.models import BPE

from engine.engine import Engine
from engine.params import SamplingParams
from engine.sampling import SamplerState, distribution

VOCAB, LENGTH = 5, 4
TEXTS = 1300  # per setting: 4 settings x 4 tokens = 20,800 draws per kind of guess
FEW_TEXTS = 200  # of each test run
PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)  # its end was seen before: the n-gram always guesses
TOGETHER = 400


def _save(folder: Path, model: transformers.LlamaForCausalLM) -> str:
    model.save_pretrained(folder)
    Tokenizer(BPE({letter: index for index, letter in enumerate("abcde")}, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = transformers.LlamaForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.data.normal_(0.0, 0.9 if "embed" in name else 1.2 * parameter.shape[-1] ** -0.5)
        target = _save(tmp_path_factory.mktemp("target"), model)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape) * parameter.std() * 0.25)
        draft = _save(tmp_path_factory.mktemp("draft"), model)
    engine = Engine.load(target, {"weights": "none", "max_batch": "32"}, kv_bytes=1 << 20, find=Path, draft=draft)
    yield engine
    engine.close()


def params_of(settings: dict[str, object], seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=LENGTH, ignore_eos=True, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def logits(engine: Engine) -> dict[tuple[int, ...], np.ndarray]:
    """Text so far -> the target's logits for what follows."""
    prefixes = itertools.chain.from_iterable(itertools.product(range(VOCAB), repeat=n) for n in range(LENGTH))
    return {
        prefix: torch.cat(list(engine.read_text((*PROMPT, *prefix), len(PROMPT))))[-1].numpy() for prefix in prefixes
    }


def exact(logits: dict[tuple[int, ...], np.ndarray], settings: dict[str, object]) -> dict[tuple[int, ...], float]:
    """The probability of each text."""
    found = {}
    for written in itertools.product(range(VOCAB), repeat=LENGTH):
        state, probability = SamplerState(params_of(settings, 0), PROMPT), 1.0
        for place, token in enumerate(written):
            row = distribution(logits[written[:place]], state)
            assert row is not None
            probability *= row[token]
            state.commit(token)
        found[written] = probability
    return found


@pytest.mark.parametrize("num_texts", [FEW_TEXTS, pytest.param(TEXTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["off", "ngram", "draft", "layer_skip"])
def test_mixed_rows_write_what_they_write_without_guesses(
    engine: Engine, logits: dict[tuple[int, ...], np.ndarray], kind: str, num_texts: int
) -> None:
    """Seeds are fixed, so four deviations are a bug. "off" shows that the yardstick itself is right."""
    engine.apply({"speculation": kind, "draft_length": "2"})
    if engine._speculator:
        engine._speculator.controller.automatic_off = False
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in ROWS]
    drafted = right = 0
    requests = [
        (row, params_of(ROWS[row], 10_000 * row + text)) for text in range(num_texts) for row in range(len(ROWS))
    ]
    for first in range(0, len(requests), TOGETHER):
        some = requests[first : first + TOGETHER]
        for (row, _), done in zip(
            some, engine.generate([PROMPT] * len(some), [params for _, params in some]), strict=True
        ):
            counts[row][done.token_ids] += 1
            drafted, right = drafted + done.usage.num_drafted, right + done.usage.num_accepted
    engine.check_integrity()
    if kind != "off":
        assert 0.1 * drafted < right < 0.95 * drafted
        assert drafted > 2 * num_texts
    for settings, its in zip(ROWS, counts, strict=True):
        assert deviation(its, exact(logits, settings), num_texts) < 4, settings
