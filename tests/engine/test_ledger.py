"""The ledger's counting rules, each against brute force or a count made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events import MachineFigures
from engine.model.spec import LayerSpec, ModelSpec, RopeSpec
from engine.roofline.ledger import LedgerItem, LedgerModel, account, compute_seconds, memory_seconds


def make(
    windows: tuple[int | None, ...] = (None, None), tied: bool = True, fused: bool = True, kv_heads: int = 2
) -> LedgerModel:
    spec = ModelSpec(
        family="llama",
        name="tiny",
        vocab_size=100,
        hidden_size=8,
        intermediate_size=16,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=2,
        layers=tuple(LayerSpec(window=window) for window in windows),
        ropes=(RopeSpec(10000.0, 2),),
        max_position=64,
        norm_eps=1e-5,
        tied_head=tied,
    )
    return LedgerModel(
        spec,
        1000,
        400,
        4,
        activation_bytes=2,
        kv_layer_token_bytes=2 * spec.kv_size * 2,
        compute_dtype="bf16",
        fused=fused,
    )


ITEMS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 30), st.booleans()).map(lambda t: LedgerItem(t[0], t[0] + t[1], t[2])),
    min_size=1,
    max_size=4,
)


@given(ITEMS, st.lists(st.sampled_from([None, 1, 3, 8]), min_size=1, max_size=4))
def test_kv_and_attention_equal_a_brute_force_mask(items: list[LedgerItem], windows: list[int | None]) -> None:
    model = make(tuple(windows))
    tokens_read = pairs = 0
    for window in windows:
        for item in items:
            seen: set[int] = set()
            for position in range(item.context - item.count, item.context):
                visible = [k for k in range(position + 1) if window is None or position - k < window]
                pairs += len(visible)
                seen.update(visible)
            tokens_read += len(seen)
    cost = account(model, items)
    assert cost.kv_read_bytes == tokens_read * 2 * (2 * 2) * 2  # K and V, kv_heads * head_dim, bytes
    assert cost.attention_flops == pairs * 4 * 8
    assert cost.kv_write_bytes == sum(item.count for item in items) * len(windows) * 2 * (2 * 2) * 2


def test_weights_are_read_once_whatever_the_batch() -> None:
    one = account(make(), [LedgerItem(1, 5, True)])
    many = account(make(), [LedgerItem(1, 5, True)] * 8)
    assert one.weight_bytes == many.weight_bytes == 1000 + 400
    assert many.linear_flops == 8 * one.linear_flops


def test_the_head_is_read_only_when_logits_are_wanted_and_tied_rows_are_not_counted_twice() -> None:
    chunk = [LedgerItem(6, 6, False)]
    assert account(make(tied=True), chunk).weight_bytes == 1000 + 6 * 4
    assert account(make(tied=True), chunk).logit_bytes == 0
    last = [LedgerItem(6, 12, True)]
    assert account(make(tied=True), last).weight_bytes == 1000 + 400
    assert account(make(tied=False), last).weight_bytes == 1000 + 400 + 6 * 4


def test_sharing_kv_heads_divides_the_kv_bytes() -> None:
    items = [LedgerItem(1, 20, True)]
    assert account(make(kv_heads=4), items).kv_read_bytes == 2 * account(make(kv_heads=2), items).kv_read_bytes


def test_unfused_attention_pays_for_its_scores() -> None:
    items = [LedgerItem(10, 10, True)]
    fused, plain = account(make(), items), account(make(fused=False), items)
    assert plain.activation_bytes > fused.activation_bytes
    assert plain.total_flops == fused.total_flops


def test_products_done_twice_are_counted_twice() -> None:
    items = [LedgerItem(3, 3, True)]
    once = account(make(), items).linear_flops
    twice = account(replace(make(), block_passes=2.0, head_passes=2.0), items)
    assert twice.linear_flops == 2 * once
    assert twice.weight_bytes == account(make(), items).weight_bytes


def test_an_empty_step_costs_nothing() -> None:
    cost = account(make(), [])
    assert cost.total_bytes == cost.total_flops == 0
    assert cost.arithmetic_intensity == 0.0


def test_linear_flops_by_hand() -> None:
    layer = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16
    assert account(make(), [LedgerItem(3, 3, True)]).linear_flops == 2 * (3 * 2 * layer + 100 * 8)


def test_seconds_come_from_the_machine() -> None:
    machine = MachineFigures("cpu", "test", 2, 1e6, {"bf16": 1e9}, 1e-6, "2026-01-01")
    cost = account(make(), [LedgerItem(1, 5, True)])
    assert memory_seconds(cost, machine) == pytest.approx(cost.total_bytes / 1e6)
    assert compute_seconds(cost, machine, "bf16") == pytest.approx(cost.total_flops / 1e9)
    assert machine.ridge_point("bf16") == pytest.approx(1000)
