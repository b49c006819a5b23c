"""gqa off: keys and values stored for every query head. The same text, fewer tokens, more bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_engine import HEAD_DIM, HEADS, KV_HEADS, LAYERS, drain, greedy, load, reply, save_model, text

from engine.engine import PAGE_SIZE, Engine
from engine.events import Finished, FinishReason, StepRecord, TokenDelta

GROUP = HEADS // KV_HEADS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    engine = load(folder, kv_bytes=PAGE_SIZE * 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * 30)
    yield engine
    engine.close()


def test_sharing_fits_exactly_heads_over_kv_heads_times_the_tokens(engine: Engine) -> None:
    shared = engine._scheduler.pool.capacity_tokens
    bytes_shared = engine._cache.num_bytes * 30 // 31  # without the padding page
    engine.apply({"gqa": "off"})
    assert shared == GROUP * engine._scheduler.pool.capacity_tokens == 30 * PAGE_SIZE
    assert engine.info.kv_bytes_per_token == 2 * LAYERS * HEADS * HEAD_DIM * 4
    assert engine._cache.num_bytes * 10 // 11 == bytes_shared
    engine.apply({"gqa": "on"})
    assert engine._scheduler.pool.capacity_tokens == shared


@pytest.mark.parametrize("fused", ["on", "off"])
def test_flipped_in_the_middle_of_a_reply_the_text_is_the_same(engine: Engine, fused: str) -> None:
    engine.apply({"fused_ops": fused})
    wanted = [reply(engine, text(50, seed), 20) for seed in (1, 2)]
    numbers = [engine.submit(text(50, seed), greedy(20)) for seed in (1, 2)]
    events = [event for _ in range(7) for event in engine.step()]
    applied = engine.apply({"gqa": "off"})
    assert applied.preempted == 2
    assert applied.info is not None
    events += drain(engine)
    for number, tokens in zip(numbers, wanted, strict=True):
        got = [event for event in events if isinstance(event, TokenDelta) and event.request_id == number]
        assert tuple(token for delta in got for token in delta.token_ids) == tokens
    assert reply(engine, text(50, 1), 20) == wanted[0]


def test_the_ledger_counts_the_copies(engine: Engine) -> None:
    def decode_step() -> StepRecord:
        engine.submit(text(40), greedy(4))
        return [event for event in drain(engine) if isinstance(event, StepRecord)][-1]

    shared = decode_step()
    engine.apply({"gqa": "off"})
    copied = decode_step()
    assert copied.cost.kv_read_bytes == GROUP * shared.cost.kv_read_bytes
    assert copied.cost.kv_write_bytes == GROUP * shared.cost.kv_write_bytes
    assert copied.cost.attention_flops == shared.cost.attention_flops
    assert copied.pool.page_bytes == GROUP * shared.pool.page_bytes


def test_a_chat_that_no_longer_fits_ends_with_a_reason_and_the_others_go_on(folder: Path) -> None:
    engine = load(folder, kv_bytes=PAGE_SIZE * 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * 6)
    long, short = engine.submit(text(100), greedy(8)), engine.submit(text(20), greedy(8))
    events = engine.step()
    engine.apply({"gqa": "off"})
    assert engine.context_length == 2 * PAGE_SIZE
    endings = {event.request_id: event for event in [*events, *drain(engine)] if isinstance(event, Finished)}
    assert endings[long].reason is FinishReason.ERROR
    assert "64 fit" in endings[long].message
    assert endings[short].reason is FinishReason.LENGTH
    engine.close()


def test_a_layout_without_room_for_a_page_is_refused_and_changes_nothing(folder: Path) -> None:
    engine = load(folder, kv_bytes=PAGE_SIZE * 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * 2)
    before = reply(engine, text(20), 4)
    with pytest.raises(ValueError, match="One page of KV cache needs"):
        engine.apply({"gqa": "off"})
    assert engine.options["gqa"] == "on"
    assert reply(engine, text(20), 4) == before
    engine.close()
