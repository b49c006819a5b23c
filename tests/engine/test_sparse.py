"""Sparse attention: pages chosen per KV head by key bounds, for decoding tokens only (Quest)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_engine import HEAD_DIM, KV_HEADS, LAYERS, drain, greedy, load, reply, save_model, text
from tiny_models import FAMILIES
from torch import Tensor

from engine.engine import PAGE_SIZE, Engine
from engine.events import StepRecord
from engine.kv.cache import KvCache
from engine.kv.layout import DENSE_LAYERS, KvLayout
from engine.kv.sparse import PageBounds
from engine.ops.cpu import CpuOps
from engine.ops.interface import AttentionParams, Span
from engine.ops.reference import ReferenceOps
from engine.options import Options

PAGE = 8
SPEC = FAMILIES["llama"].spec  # six query heads, two KV heads, 16 channels
PARAMS = AttentionParams(0.5)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class OneText:
    """A text of random keys in scattered pages of the first sparse layer of a cache."""

    def __init__(self, length: int, kv_dtype: str = "native", gqa: str = "on") -> None:
        layout = KvLayout.of(SPEC, {"kv_dtype": kv_dtype, "gqa": gqa}, 4)
        self.cache = KvCache(SPEC, 20, PAGE, torch.float32, layout=layout)
        self.pages = [int(p) + 1 for p in torch.randperm(19, generator=torch.Generator().manual_seed(3))]
        self.layer = self.cache.layer(DENSE_LAYERS)
        self.k, self.v = randn(length, 2, 16), randn(length, 2, 16, seed=1)
        self.length = 0

    def write(self, count: int) -> None:
        positions = range(self.length, self.length + count)
        slots = torch.tensor([self.pages[p // PAGE] * PAGE + p % PAGE for p in positions])
        keys, values, targets = self.layer.write_target(slots)
        keys.flatten(0, 1).index_copy_(0, targets, self.k[positions.start : positions.stop])
        values.flatten(0, 1).index_copy_(0, targets, self.v[positions.start : positions.stop])
        self.layer.written(slots)
        self.length += count

    def attend(self, q: Tensor, params: AttentionParams = PARAMS, is_decode: bool = True) -> Tensor:
        span = Span(0, len(q), self.length, self.pages, is_decode)
        return self.layer.attend(CpuOps(), q, (span,), params)


def by_hand(one: OneText, q: Tensor, count: int) -> Tensor:
    """q [6, 16]: for each KV head the pages with the largest bound, loops in Python."""
    num_pages = -(-one.length // PAGE)
    out = torch.zeros(6, 16)
    for head in range(2):
        group = range(3 * head, 3 * head + 3)
        bound = {}
        for page in range(num_pages):
            keys = one.k[page * PAGE : min(one.length, (page + 1) * PAGE), head]
            bound[page] = max(float(torch.maximum(q[h] * keys.amin(0), q[h] * keys.amax(0)).sum()) for h in group)
        bound[0] = bound[num_pages - 1] = float("inf")
        best = sorted(bound, key=lambda page: -bound[page])[:count]
        positions = [p for p in range(one.length) if p // PAGE in best]
        for h in group:
            shares = (one.k[positions, head] @ q[h] * PARAMS.scale).softmax(0)
            out[h] = shares @ one.v[positions, head]
    return out.flatten()


@pytest.mark.parametrize("gqa", ["on", "off"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_each_kv_head_reads_the_pages_it_could_want_most(count: int, gqa: str) -> None:
    one = OneText(77, gqa=gqa)
    one.cache.set_sparse(count)
    one.write(50)
    for _ in range(27):
        one.write(1)
    q = randn(1, 6, 16, seed=7)
    if gqa == "on":
        torch.testing.assert_close(one.attend(q)[0], by_hand(one, q[0], count))
    else:  # every query head has keys of its own and chooses for itself
        for head in range(6):
            alone = torch.zeros(6, 16)
            alone[head // 3 * 3 : head // 3 * 3 + 3] = q[0, head]
            wanted = by_hand(one, alone, count).view(6, 16)[head]
            torch.testing.assert_close(one.attend(q).view(6, 16)[head], wanted)


@pytest.mark.parametrize("kv_dtype", ["native", "int8"])
@pytest.mark.parametrize("window", [None, 20])
def test_with_room_for_all_pages_it_is_dense_attention_exactly(kv_dtype: str, window: int | None) -> None:
    one = OneText(77, kv_dtype)
    one.write(77)
    q, params = randn(1, 6, 16, seed=7), replace(PARAMS, window=window)
    dense = one.attend(q, params)
    seen = 10 if window is None else 3
    one.cache.set_sparse(seen, one.pages)
    assert torch.equal(one.attend(q, params), dense)
    one.cache.set_sparse(seen - 1)
    assert not torch.equal(one.attend(q, params), dense)


def test_prompts_and_verified_guesses_stay_dense_beside_a_chat_that_chooses() -> None:
    one = OneText(77)
    one.cache.set_sparse(3)
    one.write(77)
    q = randn(5, 6, 16, seed=7)
    dense = ReferenceOps().paged_attention(
        q, one.layer.keys[0], one.layer.values[0], (Span(0, 5, 77, one.pages),), PARAMS
    )
    torch.testing.assert_close(one.attend(q, is_decode=False), dense)
    mixed = (Span(0, 1, 77, one.pages, True), Span(1, 4, 77, one.pages))
    got = one.layer.attend(CpuOps(), q, mixed, PARAMS)
    torch.testing.assert_close(got[1:], dense[1:])
    torch.testing.assert_close(got[0], by_hand(one, q[0], 3))


@pytest.mark.parametrize("kv_dtype", ["native", "int8"])
def test_turned_on_in_mid_chat_it_chooses_as_if_it_had_always_been_on(kv_dtype: str) -> None:
    late, early = OneText(80, kv_dtype), OneText(80, kv_dtype)
    early.cache.set_sparse(4)
    for one in (late, early):
        one.write(80)
    late.cache.set_sparse(4, late.pages)
    q = randn(1, 6, 16, seed=7)
    torch.testing.assert_close(late.attend(q), early.attend(q))


def test_a_page_used_again_forgets_its_old_bounds() -> None:
    bounds = PageBounds(3, 1, 2)
    bounds.add(torch.arange(4, 8), torch.full((4, 1, 2), 9.0), 4)
    bounds.add(torch.arange(4, 6), torch.tensor([[[1.0, -1.0]], [[2.0, 0.0]]]), 4)
    assert bounds.least[1].tolist() == [[1.0, -1.0]]
    assert bounds.largest[1].tolist() == [[2.0, 0.0]]


# -- in the engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = load(folder)
    yield engine
    engine.close()


def test_short_chats_are_untouched_and_long_ones_read_less(engine: Engine) -> None:
    short = text(8 * PAGE_SIZE - 20)
    dense = reply(engine, short)
    engine.submit(text(700), greedy(4))
    all_read = [event for event in drain(engine) if isinstance(event, StepRecord)][-1].cost
    assert engine.apply({"sparse": "8"}).preempted == 0
    assert reply(engine, short) == dense
    engine.submit(text(700), greedy(4))
    last = [event for event in drain(engine) if isinstance(event, StepRecord)][-1]
    assert "8 pages per KV head chosen by key bounds" in last.active_paths["kv"]
    context, layer_token = 703, engine.info.kv_bytes_per_token // LAYERS
    bounds = -(-context // PAGE_SIZE) * KV_HEADS * HEAD_DIM * 2 * 4
    wanted = DENSE_LAYERS * context * layer_token + (LAYERS - DENSE_LAYERS) * (8 * PAGE_SIZE * layer_token + bounds)
    assert last.cost.kv_read_bytes == wanted < all_read.kv_read_bytes
    engine.apply({"sparse": "off"})


def test_flipped_while_chats_run_with_windows_codes_and_guesses(engine: Engine) -> None:
    prompts = [text(600, seed) for seed in range(2)]
    for prompt in prompts:
        engine.submit(prompt, greedy(24))
    for changes in (
        {"sparse": "8"},
        {"kv_dtype": "int8"},
        {"window": "512"},
        {"sparse": "16"},
        {"speculation": "ngram"},
    ):
        engine.apply(changes)
        for _ in range(3):
            engine.step()
    drain(engine)
    engine.apply({"sparse": "off", "kv_dtype": "native", "window": "model", "speculation": "off"})
    assert reply(engine, prompts[0]) == reply(engine, prompts[0])


def test_without_a_kv_cache_it_is_refused_and_both_switches_are_named(engine: Engine) -> None:
    for changes in ({"sparse": "8", "kv_cache": "off"}, {"kv_cache": "off", "sparse": "32"}):
        with pytest.raises(ValueError, match=r"sparse=\d+ cannot go with kv_cache=off.*Set kv_cache=on or sparse=off"):
            engine.apply(changes)
        with pytest.raises(ValueError, match="cannot go with"):
            Options(changes)
    engine.apply({"sparse": "8"})
    with pytest.raises(ValueError, match="cannot go with"):
        engine.apply({"kv_cache": "off"})
    assert engine.options["kv_cache"] == "on"
    engine.apply({"sparse": "off"})


@pytest.mark.parametrize("gqa", ["on", "off"])
@pytest.mark.parametrize("kv_dtype", ["native", "int4"])
def test_the_bounds_count_as_memory_of_the_pages(kv_dtype: str, gqa: str) -> None:
    cache = OneText(10, kv_dtype, gqa).cache
    without = cache.num_bytes
    assert without == cache.num_pages * cache.page_bytes
    cache.set_sparse(4)
    bounds = sum(bound.nbytes for index in range(SPEC.num_layers) for bound in cache.layer(index).bounds or ())
    assert bounds > 0
    assert cache.num_bytes == without + bounds == cache.num_pages * cache.page_bytes
    cache.set_sparse(None)
    assert cache.num_bytes == without == cache.num_pages * cache.page_bytes


def test_fewer_pages_fit_where_bounds_are_kept(folder: Path) -> None:
    plain, sparse = (load(folder, {"sparse": value}, kv_bytes=1 << 20) for value in ("off", "8"))
    for engine in (plain, sparse):
        reply(engine, text(40), 2)
        assert engine._cache.num_bytes <= (1 << 20) + engine._cache.page_bytes
    assert sparse._cache.num_pages < plain._cache.num_pages
    for engine in (plain, sparse):
        engine.close()
