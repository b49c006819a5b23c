"""A user's window with sinks: what is seen, what is freed, and that prefix sharing agrees with it (FIELD 14, 33)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_batches import Text, advance, make_cache, scattered_pages
from tiny_engine import drain, greedy, load, save_model, text
from tiny_models import FAMILIES, StateDictSource, make_model
from torch import Tensor

from engine.events import StepRecord
from engine.kv.layout import NUM_SINKS
from engine.kv.pool import PagePool
from engine.model.decoder import Decoder
from engine.model.load import build_decoder
from engine.ops.cpu import CpuOps
from engine.ops.interface import Ops
from engine.ops.reference import ReferenceOps
from engine.options import Options
from engine.roofline.ledger import LedgerItem, LedgerModel, account
from engine.scheduler import Policy, Request, Scheduler

PAGE = 8
OPS: dict[str, Ops] = {
    "cpu": CpuOps(fused=True),
    "torch": CpuOps(fused=True, use_native=False),
    "reference": ReferenceOps(),
}


def decoder_of(family: str, backend: str) -> Decoder:
    source = StateDictSource(FAMILIES[family].spec, make_model(family).state_dict())
    return build_decoder(source, {True: OPS[backend], False: OPS[backend]}, "none")


def by_mask(family: str, tokens: list[int], window: int) -> Tensor:
    """Logits of transformers' model under an explicit mask: ``window`` tokens up to itself, and the sinks."""
    position = torch.arange(len(tokens))
    back = position[:, None] - position[None, :]
    seen = (back >= 0) & ((back < window) | (position[None, :] < NUM_SINKS))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        return make_model(family)(torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0]


def in_steps(decoder: Decoder, tokens: list[int], window: int, counts: list[int], forget: bool) -> Tensor:
    """Logits of ``tokens`` computed ``counts`` at a time, then one by one; ``forget``: unseen pages are taken away and overwritten."""
    (pages,) = scattered_pages(1, len(tokens), PAGE)
    cache = make_cache(decoder, len(pages) + 1, PAGE)
    cache.window = window
    one = Text(tokens, pages)
    while one.num_computed < len(tokens):
        count = counts.pop(0) if counts else 1
        advance(decoder, cache, [(one, min(count, len(tokens) - one.num_computed))])
        if forget:
            for index in range(1, (one.num_computed - window + 1) // PAGE):
                for part in (p for i in range(4) for p in cache.layer(i).keys + cache.layer(i).values):
                    if one.pages[index]:
                        part[one.pages[index]] = torch.nan
                one.pages[index] = 0
    return torch.stack(one.logits)


@pytest.mark.parametrize("backend", OPS)
@pytest.mark.parametrize("window", [1, 15, 16, 17])
def test_each_row_sees_its_window_and_the_sinks_like_a_brute_force_mask(window: int, backend: str) -> None:
    decoder = decoder_of("llama", backend)
    tokens = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = by_mask("llama", tokens, window)
    for counts in ([60], [1], [23, 9, 17]):
        got = in_steps(decoder, tokens, window, list(counts), forget=True)
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("length", [window + NUM_SINKS + more for window in (16,) for more in (-5, -1, 0, 1, 2)])
def test_texts_that_end_around_the_windows_edge(length: int) -> None:
    decoder = decoder_of("llama", "cpu")
    tokens = torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    got = in_steps(decoder, tokens, 16, [7], forget=False)
    torch.testing.assert_close(got, by_mask("llama", tokens, 16), atol=2e-4, rtol=2e-4)


def test_layers_with_a_narrower_window_of_their_own_keep_it() -> None:
    """Gemma 3: three layers of four see 20 tokens. A window of 30 narrows the fourth alone."""
    spec = FAMILIES["gemma3"].spec.with_window(30, NUM_SINKS)
    assert [(layer.window, layer.sinks) for layer in spec.layers] == [(20, 0)] * 3 + [(30, NUM_SINKS)]
    assert spec.widest_window == 30
    tokens = torch.randint(3, 300, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    fast, plain = (in_steps(decoder_of("gemma3", backend), tokens, 30, [20], False) for backend in ("cpu", "reference"))
    torch.testing.assert_close(fast, plain, atol=2e-4, rtol=2e-4)
    unlimited = in_steps(decoder_of("gemma3", "cpu"), tokens, 1000, [20], False)
    torch.testing.assert_close(fast[:34], unlimited[:34], atol=2e-4, rtol=2e-4)  # 30 and the sinks are all there is
    assert not torch.allclose(fast[40:], unlimited[40:], atol=1e-3)


# -- pages --------------------------------------------------------------------------------------


def scheduler_with(window: int, num_pages: int = 40, **changes: str) -> Scheduler:
    policy = replace(Policy.of(Options(changes)), window=window)
    return Scheduler(PagePool(num_pages, 4), policy, 150)


def run(scheduler: Scheduler, request: Request, window: int) -> list[int]:
    """Run to the end; the most pages held, after each step. Checks that what the next token sees is held."""
    scheduler.add(request)
    held = []
    while request.num_generated < request.max_tokens:
        plan = scheduler.plan()
        for item in plan.items:
            for position in range(item.start, item.context):
                seen = [p for p in range(position + 1) if position - p < window or p < NUM_SINKS]
                assert all(request.pages[p // 4] for p in seen), "a page that is seen was given back"
        scheduler.commit(plan, {item.request.request_id: (9,) for item in plan.items if item.wants_logits})
        scheduler.check_integrity()
        held.append(scheduler.pool.num_held)
    scheduler.remove(request)
    scheduler.check_integrity()
    return held


@pytest.mark.parametrize("window", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("budget", ["32", "512"])
def test_pages_that_left_the_window_are_freed_while_the_reply_goes_on(window: int, budget: str) -> None:
    scheduler = scheduler_with(window, token_budget=budget)
    held = run(scheduler, Request(1, [5] * 30, 30, 80), window)
    assert max(held[3:]) <= 1 + 1 + -(-(window + 3) // 4) + 1  # sinks, chained page, window, room for what comes
    assert scheduler.pool.num_held == 0


def test_a_second_turn_shares_what_is_still_there_and_sees_the_same_text() -> None:
    scheduler = scheduler_with(8)
    first = Request(1, list(range(30)), 30, 10)
    run(scheduler, first, 8)
    again = Request(2, [*first.tokens, 1, 2], 42, 5)
    run(scheduler, again, 8)
    assert again.cached_tokens == 36
    scheduler.pool.clear_index()
    gone = Request(3, [*first.tokens, 1, 2], 42, 5)
    run(scheduler, gone, 8)
    assert gone.cached_tokens == 0


def test_pages_given_back_can_be_taken_by_another_chat() -> None:
    scheduler = scheduler_with(8, num_pages=31, eviction="off")
    long = Request(1, [1] * 20, 20, 90)
    scheduler.add(long)
    while long.num_generated < 60:
        plan = scheduler.plan()
        scheduler.commit(plan, {1: (3,)})
    other = Request(2, [2] * 80, 80, 5)
    scheduler.add(other)
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, {item.request.request_id: (9,) for item in plan.items if item.wants_logits})
        for item in plan.items:
            if item.request.num_generated >= item.request.max_tokens:
                scheduler.remove(item.request)
        scheduler.check_integrity()
    assert (long.recomputed_tokens, other.recomputed_tokens) == (0, 0)
    assert scheduler.pool.num_free == 30


@pytest.mark.parametrize("changes", [{"paging": "off"}, {"kv_cache": "off"}])
def test_reservations_and_recomputed_texts_keep_their_pages(changes: dict[str, str]) -> None:
    scheduler = scheduler_with(8, **changes)
    request = Request(1, [5] * 30, 30, 20)
    run(scheduler, request, 8)
    assert request.num_unseen == 0


# -- switch and ledger --------------------------------------------------------------------------


def test_the_window_can_change_while_a_chat_runs(tmp_path: Path) -> None:
    engine = load(save_model(tmp_path))
    prompt = text(700)
    numbers = engine.submit(prompt, greedy(6))
    events = [event for _ in range(4) for event in engine.step()]
    applied = engine.apply({"window": "512"})
    assert applied.preempted == 1
    events += drain(engine)
    last = [event for event in events if isinstance(event, StepRecord)][-1]
    layer_token = engine.info.kv_bytes_per_token // 4
    assert last.cost.kv_read_bytes == 4 * (512 + NUM_SINKS) * layer_token
    assert last.pool.used <= 1 + 1 + 512 // 32 + 1
    assert numbers
    engine.close()


def test_the_ledger_counts_window_and_sinks_once() -> None:
    spec = FAMILIES["gemma3"].spec.with_window(30, NUM_SINKS)
    model = LedgerModel(spec, 0, 0, 0, activation_bytes=4, kv_layer_token_bytes=1, compute_dtype="fp32")
    for count, context in ((1, 10), (1, 33), (1, 34), (1, 35), (1, 90), (7, 38), (40, 40)):
        seen = pairs = 0
        for layer in spec.layers:
            assert layer.window is not None
            keys: set[int] = set()
            for p in range(context - count, context):
                visible = {k for k in range(p + 1) if p - k < layer.window or k < layer.sinks}
                pairs += len(visible)
                keys |= visible
            seen += len(keys)
        cost = account(model, [LedgerItem(count, context, True)])
        assert cost.kv_read_bytes == seen
        assert cost.attention_flops == pairs * 4 * spec.q_size
