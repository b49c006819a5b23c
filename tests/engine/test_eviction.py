"""Pages of finished texts: kept until their room is needed, or freed at once."""

from __future__ import annotations

import pytest

from engine.kv.pool import PagePool
from engine.options import Options
from engine.scheduler import Policy, Request, Scheduler

SIZE = 4


def make(num_pages: int = 30, **changes: str) -> Scheduler:
    return Scheduler(PagePool(num_pages, SIZE), Policy.of(Options(changes)), 100)


def submit(scheduler: Scheduler, number: int, tokens: list[int], max_tokens: int = 1) -> Request:
    request = Request(number, list(tokens), len(tokens), max_tokens)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    scheduler.commit(plan, {item.request.request_id: [7] for item in plan.items if item.wants_logits})
    for item in plan.items:
        if item.request.num_generated >= item.request.max_tokens:
            scheduler.remove(item.request)
    scheduler.check_integrity()


@pytest.mark.parametrize(("eviction", "hit"), [("lru", 8), ("off", 0)])
def test_the_next_turn_finds_its_beginning_only_when_finished_pages_are_kept(eviction: str, hit: int) -> None:
    scheduler = make(eviction=eviction)
    submit(scheduler, 1, [1] * 10)
    step(scheduler)
    assert scheduler.pool.num_cached == hit // SIZE
    assert scheduler.pool.num_held == 0
    again = submit(scheduler, 2, [1] * 10)
    step(scheduler)
    assert again.cached_tokens == hit


def test_chats_that_run_together_share_even_when_pages_are_freed_at_once() -> None:
    scheduler = make(eviction="off")
    submit(scheduler, 1, [1] * 10, max_tokens=3)
    step(scheduler)
    second = submit(scheduler, 2, [1] * 10, max_tokens=5)
    step(scheduler)
    assert second.cached_tokens == 8
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.pool.num_free == 29


def test_turning_it_off_frees_what_was_kept_and_spares_what_is_held() -> None:
    scheduler = make()
    submit(scheduler, 1, [1] * 9)
    step(scheduler)
    submit(scheduler, 2, [2] * 9, max_tokens=5)
    step(scheduler)
    assert scheduler.pool.num_cached == 2
    assert scheduler.change_policy(Policy.of(Options({"eviction": "off"}))) == 0
    scheduler.check_integrity()
    assert (scheduler.pool.num_cached, scheduler.pool.num_held) == (0, 3)
    third = submit(scheduler, 3, [2] * 9)
    step(scheduler)
    assert third.cached_tokens == 8
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.pool.num_free == 29


def test_the_least_recently_used_text_is_given_up_first() -> None:
    scheduler = make(num_pages=7)
    for number, token in ((1, 1), (2, 2)):
        submit(scheduler, number, [token] * 9)
        step(scheduler)
    submit(scheduler, 3, [1] * 9)  # touches the first text again
    step(scheduler)
    submit(scheduler, 4, [3] * 13)  # needs four of six pages, two are free
    step(scheduler)
    assert scheduler.pool.match([1] * 9)
    assert not scheduler.pool.match([2] * 9)
