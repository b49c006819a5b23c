"""The decoder against transformers on tiny random models of every family (acceptance point 3)."""

from __future__ import annotations

import functools

import pytest
import torch
from paged_batches import Text, advance, make_batch, make_cache, run_in_chunks, scattered_pages
from tiny_models import FAMILIES, VOCAB, StateDictSource, make_model
from torch import Tensor

from engine.model.decoder import Decoder
from engine.model.load import LoadCancelled, build_decoder
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
    num_tokens = 150 if chunk > 1 else 40
    actual = run_in_chunks(decoder_of(family), prompt(num_tokens), chunk)
    assert_close(actual, expected(family, num_tokens))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_texts_in_one_batch_equal_each_alone_whatever_never_written_slots_hold(family: str) -> None:
    """Prefill chunks, single tokens and several tokens at once (a verification) mixed in every step (FIELD 32)."""
    decoder = decoder_of(family)
    lengths, page_size = [40, 23, 61], 8
    page_lists = scattered_pages(len(lengths), max(lengths), page_size)
    cache = make_cache(decoder, 1 + sum(map(len, page_lists)), page_size, fill=float("nan"))
    texts = [Text(prompt(n, seed), pages) for seed, (n, pages) in enumerate(zip(lengths, page_lists, strict=True))]
    steps = [(7, 1, 30), (1, 20, 1), (16, 2, 1), (5, 0, 29), (11, 0, 0)]
    for counts in steps:
        advance(decoder, cache, [(text, count) for text, count in zip(texts, counts, strict=True) if count])
    for seed, text in enumerate(texts):
        assert text.num_computed == lengths[seed]
        assert_close(torch.stack(text.logits), expected(family, lengths[seed], seed))
    for index in range(decoder.spec.num_layers):
        assert all((tensor[0] == 0).all() for tensor in cache.layer(index).keys + cache.layer(index).values), (
            "page 0 must stay zeros"
        )


@pytest.mark.parametrize("family", ["llama_tied_biased", "gemma2"])
def test_only_the_wanted_rows_come_back_in_their_order(family: str) -> None:
    decoder = decoder_of(family)
    text = Text(prompt(30), [3, 1])
    cache = make_cache(decoder, 4, 16)
    logits = decoder.forward(make_batch([(text, 30)], 16, wanted=[29, 4, 4]), cache)
    assert_close(logits, expected(family, 30)[[29, 4, 4]])


def test_a_step_without_wanted_logits_still_writes_its_keys() -> None:
    decoder = decoder_of("llama")
    text = Text(prompt(30), [2, 1])
    cache = make_cache(decoder, 3, 16)
    nothing = decoder.forward(make_batch([(text, 20)], 16, wanted=[]), cache)
    assert nothing.shape == (0, VOCAB)
    text.num_computed = 20
    rest = decoder.forward(make_batch([(text, 10)], 16), cache)
    assert_close(rest, expected("llama", 30)[20:])


def test_rejected_drafts_leave_nothing_behind() -> None:
    """A verification of wrong tokens, rolled back by computing the right ones over them (at a page edge)."""
    decoder = decoder_of("qwen3")
    right = prompt(40)
    text = Text(list(right), [4, 2, 5, 1, 3])
    cache = make_cache(decoder, 6, 8)
    advance(decoder, cache, [(text, 22)])
    text.token_ids = right[:22] + prompt(6, seed=9)
    advance(decoder, cache, [(text, 6)])
    text.token_ids, text.num_computed, text.logits = list(right), 22, text.logits[:22]
    advance(decoder, cache, [(text, 18)])
    assert_close(torch.stack(text.logits), expected("qwen3", 40))


@pytest.mark.parametrize(("max_context", "num_tokens"), [(None, 256), (512, 300)])
def test_longrope_agrees_on_either_side_of_the_trained_window(max_context: int | None, num_tokens: int) -> None:
    decoder = decoder_of("phi3", max_context)
    assert decoder.max_context == (max_context or 256)
    assert_close(run_in_chunks(decoder, prompt(num_tokens), 64), expected("phi3", num_tokens))


@pytest.mark.parametrize("family", ["llama_tied_biased", "llama", "gemma3"])
def test_weight_sizes_count_every_weight_and_a_tied_table_once(family: str) -> None:
    decoder, model = decoder_of(family), make_model(family)
    assert decoder.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    tables = head.nbytes if FAMILIES[family].spec.tied_head else head.nbytes + table.nbytes
    sizes = (decoder.weight_bytes - tables, head.nbytes, table[0].nbytes)
    assert decoder.weight_sizes == (*sizes, 1, 1)  # full weights are multiplied once


def test_loading_stops_between_two_tensors_when_cancelled() -> None:
    source = StateDictSource(FAMILIES["llama"].spec, make_model("llama").state_dict())
    ops = ReferenceOps()
    shares: list[float] = []
    with pytest.raises(LoadCancelled):
        build_decoder(
            source,
            {True: ops, False: ops},
            "none",
            progress=lambda _text, share: shares.append(share),
            cancelled=lambda: len(shares) == 5,
        )
    assert len(shares) == 5
    shares.clear()
    build_decoder(source, {True: ops, False: ops}, "none", progress=lambda _text, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
