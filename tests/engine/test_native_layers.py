"""All layers in one C call: exactly what the single operations give, for every family, in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_kernels import needs_kernels, running_on
from paged_batches import Text, advance, make_batch, make_cache, run_in_chunks, scattered_pages
from tiny_models import FAMILIES, VOCAB, StateDictSource, make_model
from torch import Tensor

from engine.kv.cache import KvCache
from engine.kv.layout import KvLayout
from engine.model.decoder import Decoder, DecoderWeights
from engine.model.load import build_decoder
from engine.model.spec import ModelSpec
from engine.ops.cpu import CpuOps, packing
from engine.ops.interface import Packed

pytestmark = needs_kernels


class SingleOps(CpuOps):
    """The same kernels, one call each."""

    def compile_layers(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        return None


class TorchPacked(CpuOps):
    """Products on torch, the rest on the kernels."""

    def pack(self, weight: Tensor, bias: Tensor | None, scheme: str, sensitive: bool = False) -> Packed:
        return packing.pack(weight, bias, scheme, use_native=False)


def decoder_of(family: str, scheme: str, ops: CpuOps) -> Decoder:
    source = StateDictSource(FAMILIES[family].spec, make_model(family).state_dict())
    return build_decoder(source, {True: ops, False: CpuOps(fused=False)}, scheme)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (num_tokens,), generator=generator).tolist()


@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_is_the_single_operations(family: str, scheme: str) -> None:
    at_once, singly = decoder_of(family, scheme, CpuOps()), decoder_of(family, scheme, SingleOps())
    with running_on("avx2", 2):
        wanted = run_in_chunks(singly, prompt(50), 13)
        got = run_in_chunks(at_once, prompt(50), 13)
    assert "layers" in at_once.active_paths() and "layers" not in singly.active_paths()
    assert at_once.active_paths()["attention"].startswith("C kernel")
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
def test_logits_are_the_same_alone_in_a_batch_and_in_chunks(family: str, scheme: str) -> None:
    """Bit for bit, whatever slots that were never written hold."""
    decoder = decoder_of(family, scheme, CpuOps())
    lengths, page_size = [40, 23, 61], 8
    page_lists = scattered_pages(len(lengths), max(lengths), page_size)
    cache = make_cache(decoder, 1 + sum(map(len, page_lists)), page_size, fill=float("nan"))
    texts = [Text(prompt(n, seed), pages) for seed, (n, pages) in enumerate(zip(lengths, page_lists, strict=True))]
    for counts in [(7, 1, 30), (1, 20, 1), (16, 2, 1), (5, 0, 29), (11, 0, 0)]:
        advance(decoder, cache, [(text, count) for text, count in zip(texts, counts, strict=True) if count])
    for text in texts:
        for chunk in (1, len(text.token_ids)):
            assert torch.equal(torch.stack(text.logits), run_in_chunks(decoder, text.token_ids, chunk)), chunk


def kept_otherwise(
    decoder: Decoder, token_ids: list[int], chunk: int, options: dict[str, str], window: int | None
) -> Tensor:
    """Logits [len, vocab] of one text against a cache laid out by ``options`` under the user's ``window``."""
    (pages,) = scattered_pages(1, len(token_ids), 16)
    layout = KvLayout.of(decoder.spec, options, decoder.kv_dtype.itemsize)
    cache = KvCache(decoder.spec, len(pages) + 1, 16, decoder.kv_dtype, layout=layout, scales=decoder.kv_scales())
    cache.window = window
    text = Text(token_ids, pages)
    while text.num_computed < len(token_ids):
        advance(decoder, cache, [(text, min(chunk, len(token_ids) - text.num_computed))])
    return torch.stack(text.logits)


@pytest.mark.parametrize(
    "options", [{}, {"gqa": "off"}, {"kv_dtype": "int8"}, {"kv_dtype": "int4"}, {"kv_dtype": "int4", "gqa": "off"}]
)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "phi3"])
def test_every_cache_runs_at_once(family: str, window: int | None, options: dict[str, str]) -> None:
    """Shared or copied heads, windows with sinks: exactly the single operations. Codes are read in fp32 there, in bf16 here."""
    at_once, singly = decoder_of(family, "int8", CpuOps()), decoder_of(family, "int8", SingleOps())
    with running_on("avx2", 2):
        wanted = kept_otherwise(singly, prompt(60), 13, options, window)
        got = kept_otherwise(at_once, prompt(60), 13, options, window)
        alone = kept_otherwise(at_once, prompt(60), 1, options, window)
    assert "layers" in at_once.active_paths() and "layers" not in singly.active_paths()
    assert torch.equal(alone, got)
    if "kv_dtype" in options:
        assert (got - wanted).abs().mean() < 0.1 * wanted.std()  # tiny models make much of little
        assert f"{options['kv_dtype']} codes" in at_once.active_paths()["attention"]
    else:
        assert torch.equal(got, wanted)


def replies(
    decoder: Decoder, options: dict[str, str], count: int | None, later: bool = False
) -> tuple[Tensor, KvCache]:
    """Logits of three texts written together token by token after prompts of 75, 20 and 90, reading ``count`` pages of 8
    tokens; later: from the fifth token on."""
    lengths = (75, 20, 90)
    page_lists = scattered_pages(3, 110, 8)
    layout = KvLayout.of(decoder.spec, options, decoder.kv_dtype.itemsize)
    cache = KvCache(decoder.spec, 60, 8, decoder.kv_dtype, layout=layout, scales=decoder.kv_scales())
    if not later:
        cache.set_sparse(count)
    texts = [Text(prompt(n + 12, seed), pages) for seed, (n, pages) in enumerate(zip(lengths, page_lists, strict=True))]
    advance(decoder, cache, list(zip(texts, lengths, strict=True)))
    for step in range(12):
        if later and step == 5:
            cache.set_sparse(count, [page for pages in page_lists for page in pages])
        batch = make_batch([(text, 1) for text in texts], 8)
        batch = replace(batch, spans=tuple(replace(span, is_decode=True) for span in batch.spans))
        for text, row in zip(texts, decoder.forward(batch, cache), strict=True):
            text.logits.append(row)
            text.num_computed += 1
    return torch.stack([row for text in texts for row in text.logits[-12:]]), cache


@pytest.mark.parametrize("options", [{}, {"gqa": "off"}, {"kv_dtype": "int8"}, {"kv_dtype": "int4", "gqa": "off"}])
@pytest.mark.parametrize("later", [False, True])
def test_pages_are_chosen_within_the_one_call(options: dict[str, str], later: bool) -> None:
    at_once, singly = decoder_of("llama", "int8", CpuOps()), decoder_of("llama", "int8", SingleOps())
    with running_on("avx2", 2):
        wanted, cache = replies(singly, options, 4, later)
        assert "4 pages per KV head chosen by key bounds in 2 chats" in cache.active_paths()["kv"]
        got, cache = replies(at_once, options, 4, later)
        dense, _ = replies(at_once, options, None)
    assert "layers" in at_once.active_paths()
    assert cache.active_paths()["kv"] == "4 pages per KV head chosen by key bounds in 2 chats"
    assert torch.equal(got[12:24], dense[12:24])  # the short text sees all of its pages
    error, left_out = (got - wanted).abs().mean(), (dense - wanted).abs().mean()
    assert error < (0.5 if "kv_dtype" in options else 0.01) * left_out


def test_layers_with_windows_choose_pages_one_operation_at_a_time() -> None:
    decoder = decoder_of("gemma3", "int8", CpuOps())
    _, cache = replies(decoder, {}, 4)
    assert "layers" not in decoder.active_paths() and "chosen by key bounds" in cache.active_paths()["kv"]


def test_only_wanted_rows_are_answered() -> None:
    decoder = decoder_of("gemma3", "int4", CpuOps())
    (pages,) = scattered_pages(1, 30, 16)
    rows: list[Tensor] = []
    for wanted in (None, [29], [3, 29, 4], []):
        cache = make_cache(decoder, 3, 16)
        batch = make_batch([(Text(prompt(30), pages), 30)], 16, wanted)
        rows.append(decoder.forward(batch, cache))
    assert torch.equal(rows[1], rows[0][29:30])
    assert torch.equal(rows[2], rows[0][[3, 29, 4]])
    assert rows[3].shape == (0, VOCAB)


def test_the_cache_may_be_another_one_at_each_step() -> None:
    decoder = decoder_of("llama", "int8", CpuOps())
    text = prompt(20)
    wanted = run_in_chunks(decoder, text, 20)
    for page_size in (4, 16):
        assert torch.equal(run_in_chunks(decoder, text, 7, page_size), wanted)


def test_weights_that_are_not_packed_run_one_operation_at_a_time() -> None:
    decoder = decoder_of("llama", "none", TorchPacked())
    run_in_chunks(decoder, prompt(9), 3)
    assert "layers" not in decoder.active_paths()
    assert "C kernel" in decoder.active_paths()["attention"]


def test_plain_operations_can_take_over_between_steps() -> None:
    decoder = decoder_of("llama", "int8", CpuOps())
    (pages,) = scattered_pages(1, 40, 16)
    cache = make_cache(decoder, 4, 16)
    text = Text(prompt(40), pages)
    for step in range(4):
        decoder.set_fused(step % 2 == 0)
        advance(decoder, cache, [(text, 10)])
        assert ("layers" in decoder.active_paths()) == (step % 2 == 0)
    wanted = run_in_chunks(decoder_of("llama", "int8", CpuOps()), prompt(40), 40)
    assert (torch.stack(text.logits) - wanted).abs().max() < 0.05 * wanted.std()


def test_part_of_the_layers_is_a_decoder_of_its_own() -> None:
    kept = (0, 2)
    part, singly = (decoder_of("gemma3", "int4", ops).with_layers(kept) for ops in (CpuOps(), SingleOps()))
    got = run_in_chunks(part, prompt(20), 6)
    assert "layers" in part.active_paths()
    assert torch.equal(got, run_in_chunks(singly, prompt(20), 6))
    assert not torch.equal(got, run_in_chunks(decoder_of("gemma3", "int4", CpuOps()), prompt(20), 6))
