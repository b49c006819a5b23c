"""The decoder against transformers on tiny random models of every family (acceptance point 3)."""

from __future__ import annotations

import functools

import pytest
import torch
from paged_batches import run_in_chunks
from tiny_models import FAMILIES, VOCAB, StateDictSource, make_model
from torch import Tensor

from engine.model.decoder import Decoder
from engine.model.load import build_decoder
from engine.ops.reference import ReferenceOps

TOLERANCE = 1e-4


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (num_tokens,), generator=generator).tolist()


@functools.cache
def decoder_of(family: str, max_context: int | None = None) -> Decoder:
    source = StateDictSource(FAMILIES[family].spec, make_model(family).state_dict())
    ops = ReferenceOps()
    return build_decoder(source, {True: ops, False: ops}, "none", max_context=max_context)


@functools.cache
def expected(family: str, num_tokens: int, seed: int = 0) -> Tensor:
    with torch.inference_mode():
        return make_model(family)(torch.tensor([prompt(num_tokens, seed)])).logits[0]


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    assert actual.dtype == torch.float32
    assert wanted.std() > 0.5, "the reference's logits are too flat to prove anything"
    torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 64, 150])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers_for_every_chunk_size(family: str, chunk: int) -> None:
    num_tokens = 150 if chunk > 1 else 70
    actual = run_in_chunks(decoder_of(family), prompt(num_tokens), chunk)
    assert_close(actual, expected(family, num_tokens))
