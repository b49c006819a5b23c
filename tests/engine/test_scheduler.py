"""The scheduler with a pretend model: the next token is a function of the text, so any schedule must give the same text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.pool import PagePool
from engine.options import Options
from engine.scheduler import Item, Policy, Request, Scheduler, StepPlan

SIZE = 4
CONTEXT = 48


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 5


class Model:
    """Remembers what each page slot was written with, and checks that a step reads only what was written."""

    def __init__(self, pool: PagePool) -> None:
        self.slots: dict[int, int] = {}
        self.size = pool.page_size

    def run(self, plan: StepPlan) -> dict[int, list[int]]:
        for item in plan.items:
            request = item.request
            for position in range(item.start, item.context):
                page = request.pages[position // self.size]
                assert page != 0
                self.slots[page * self.size + position % self.size] = item.token_ids()[position - item.start]
        out: dict[int, list[int]] = {}
        for item in plan.items:
            request = item.request
            seen = [self.slots[request.pages[p // self.size] * self.size + p % self.size] for p in range(item.context)]
            num_text = item.context - item.num_drafts
            assert seen == request.tokens[:num_text] + request.drafts[: item.num_drafts]
            if item.wants_logits:
                out[request.request_id] = self.verify(seen[:num_text], seen[num_text:])
        return out

    @staticmethod
    def verify(text: list[int], drafts: list[int]) -> list[int]:
        new = [next_token(text)]
        while len(new) <= len(drafts) and new[-1] == drafts[len(new) - 1]:
            new.append(next_token(text + new))
        return new


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def policy(**changes: str) -> Policy:
    return Policy.of(Options(changes))


def make(num_pages: int = 60, **changes: str) -> tuple[Scheduler, Model]:
    pool = PagePool(num_pages, SIZE)
    return Scheduler(pool, policy(**changes), CONTEXT), Model(pool)


def request(number: int, prompt: list[int], max_tokens: int) -> Request:
    return Request(number, list(prompt), len(prompt), max_tokens)


def step(scheduler: Scheduler, model: Model) -> StepPlan:
    plan = scheduler.plan()
    scheduler.commit(plan, model.run(plan))
    for item in plan.items:
        if item.request.num_generated >= item.request.max_tokens:
            scheduler.remove(item.request)
    scheduler.check_integrity()
    return plan


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 12)), min_size=1, max_size=6
)
SWITCHES = st.fixed_dictionaries(
    {
        "batching": st.sampled_from(["continuous", "fixed", "off"]),
        "max_batch": st.sampled_from(["1", "2", "4", "8"]),
        "kv_cache": st.sampled_from(["on", "off"]),
        "paging": st.sampled_from(["on", "off"]),
        "prefix": st.sampled_from(["on", "off"]),
        "eviction": st.sampled_from(["lru", "off"]),
        "chunked_prefill": st.sampled_from(["on", "off"]),
        "token_budget": st.sampled_from(["32", "64"]),
    }
)


def guess(scheduler: Scheduler, pattern: int) -> None:
    """Drafts for every running request, the first ``right`` of them right; now none, now right, now wrong ones."""
    for each in scheduler.running:
        length, right = pattern % 5, pattern // 5 % 4
        text = list(each.tokens)
        for place in range(length):
            text.append((next_token(text) + (place >= right)) % 5)
        each.drafts = text[each.num_tokens :]
        pattern = pattern * 7 + 1


@given(
    PROMPTS, SWITCHES, st.integers(13, 40), st.lists(SWITCHES, max_size=3), st.integers(0, 1000), st.integers(0, 1000)
)
@settings(max_examples=200, deadline=None)
def test_any_schedule_gives_each_text_as_if_alone(prompts, switches, num_pages, flips, abort_at, drafts) -> None:
    """Few pages (so: preemption, waiting), switches flipped while running, one request stopped somewhere, drafts or none."""
    scheduler, model = make(num_pages, **switches)
    requests = [request(i + 1, prompt, count) for i, (prompt, count) in enumerate(prompts)]
    for one in requests:
        scheduler.add(one)
    steps = 0
    while scheduler.has_work:
        if drafts % 3:
            guess(scheduler, drafts + steps)
        assert step(scheduler, model).items, "a step with work to do planned nothing"
        steps += 1
        assert steps < 2000
        if flips and steps % 3 == 0:
            scheduler.change_policy(Policy.of(Options(flips.pop())))
            scheduler.check_integrity()
        if steps == abort_at % 20:
            live = [*scheduler.running, *scheduler.waiting]
            if live:
                victim = live[abort_at % len(live)]
                scheduler.remove(victim)
                requests.remove(victim)
                scheduler.check_integrity()
    for one in requests:
        prompt, count = prompts[one.request_id - 1]
        assert one.tokens[len(prompt) :] == alone(prompt, count)
    assert scheduler.pool.num_held == 0


def test_a_rejected_draft_lowers_num_computed_and_nothing_else() -> None:
    """All, some and none of three drafts right, at every position around page edges."""
    for right in range(4):
        for length in range(1, 2 * SIZE + 2):
            scheduler, model = make()
            one = request(1, [1] * length, 20)
            scheduler.add(one)
            step(scheduler, model)
            text = list(one.tokens)
            for place in range(3):
                text.append((next_token(text) + (place >= right)) % 5)
            one.drafts = text[one.num_tokens :]
            plan = step(scheduler, model)
            assert (plan.num_rows, plan.num_logit_rows, plan.items[0].is_prefill) == (4, 4, False)
            assert one.num_generated == 1 + right + 1
            assert one.num_computed == one.num_tokens - 1
            while scheduler.has_work:
                step(scheduler, model)
            assert one.tokens[length:] == alone([1] * length, 20)


def test_draft_tokens_are_never_registered() -> None:
    scheduler, model = make()
    one = request(1, [1] * SIZE, 9)
    scheduler.add(one)
    step(scheduler, model)
    wrong = [(next_token(one.tokens) + 1) % 5] * SIZE
    one.drafts = list(wrong)
    step(scheduler, model)
    assert scheduler.pool.match([*one.tokens[: SIZE + 1], *wrong, 0]) == one.pages[:1]


def test_drafts_take_no_page_that_text_needs() -> None:
    """The last free page serves drafts only while no text needs it: nobody is preempted for a guess."""
    scheduler, model = make(num_pages=6)
    one, two = request(1, [1] * (SIZE + 1), 20), request(2, [2] * (2 * SIZE - 1), 20)
    scheduler.add(one)
    scheduler.add(two)
    step(scheduler, model)
    one.drafts = [(next_token(one.tokens) + 1) % 5] * SIZE  # wrong, and reaching into the last free page
    two.drafts = list(one.drafts)
    assert [item.num_drafts for item in step(scheduler, model).items] == [SIZE, 0]
    assert (len(one.pages), len(two.pages)) == (3, 2)
    step(scheduler, model)
    assert (len(one.pages), len(two.pages)) == (2, 3)
    assert scheduler.running == [one, two]


def test_drafts_stop_at_max_tokens_context_and_budget() -> None:
    scheduler, model = make(token_budget="32")
    near_limit, near_window = request(1, [1], 4), request(2, [2] * (CONTEXT - 4), 99)
    many = request(3, [3], 40)
    for each in (near_limit, near_window, many):
        scheduler.add(each)
    while near_window.num_generated < 1:
        step(scheduler, model)
    near_limit.max_tokens = near_limit.num_generated + 2
    for each in (near_limit, near_window, many):
        each.drafts = [4] * 40
    items: dict[int, Item] = {item.request.request_id: item for item in scheduler.plan().items}
    assert items[1].num_drafts == 1
    assert items[2].context < CONTEXT
    assert items[2].num_drafts == CONTEXT - near_window.num_tokens - 1
    assert sum(item.count for item in items.values()) == 32


def test_decoders_are_not_stalled_by_a_long_prompt() -> None:
    scheduler, model = make(token_budget="32")
    scheduler.add(request(1, [1], 30))
    step(scheduler, model)
    scheduler.add(request(2, [2] * 40, 2))
    for _ in range(2):
        plan = step(scheduler, model)
        assert plan.items[0].request.request_id == 1
        assert plan.num_rows <= 32
    assert plan.items[1].wants_logits


def test_without_chunks_a_prompt_is_computed_whole_and_alone() -> None:
    scheduler, model = make(token_budget="32", chunked_prefill="off")
    scheduler.add(request(1, [1], 30))
    step(scheduler, model)
    scheduler.add(request(2, [2] * 40, 2))
    plan = step(scheduler, model)
    assert [(item.request.request_id, item.count) for item in plan.items] == [(2, 40)]
    assert [item.count for item in step(scheduler, model).items] == [1, 1]


def test_fixed_groups_admit_nobody_until_all_have_finished() -> None:
    scheduler, model = make(batching="fixed", max_batch="2")
    for number, count in ((1, 2), (2, 6), (3, 2)):
        scheduler.add(request(number, [number] * 3, count))
    batches = []
    while scheduler.has_work:
        batches.append({item.request.request_id for item in step(scheduler, model).items})
    assert batches == [{1, 2}] * 2 + [{2}] * 4 + [{3}] * 2


def test_batching_off_runs_one_after_the_other() -> None:
    scheduler, model = make(batching="off")
    for number in (1, 2):
        scheduler.add(request(number, [number], 3))
    batches = []
    while scheduler.has_work:
        batches.append([item.request.request_id for item in step(scheduler, model).items])
    assert batches == [[1]] * 3 + [[2]] * 3


def test_without_kv_cache_every_token_recomputes_the_text() -> None:
    scheduler, model = make(kv_cache="off")
    scheduler.add(request(1, [1, 2, 3], 3))
    assert [step(scheduler, model).items[0].count for _ in range(3)] == [3, 4, 5]


def test_a_second_turn_computes_only_what_is_new() -> None:
    scheduler, model = make()
    first = request(1, [1] * 10, 7)
    scheduler.add(first)
    while scheduler.has_work:
        step(scheduler, model)
    again = request(2, [*first.tokens, 4, 4, 4], 1)
    scheduler.add(again)
    plan = step(scheduler, model)
    assert again.cached_tokens == 16
    assert plan.num_rows == 20 - 16


def test_preempted_requests_report_what_was_recomputed() -> None:
    scheduler, model = make(num_pages=13)
    one, two = request(1, [1] * 16, 24), request(2, [2] * 16, 24)
    scheduler.add(one)
    scheduler.add(two)
    while scheduler.has_work:
        step(scheduler, model)
    assert one.recomputed_tokens == 0
    assert two.recomputed_tokens > 0


def test_paging_off_reserves_the_longest_conversation_in_one_piece() -> None:
    scheduler, model = make(num_pages=30, paging="off")
    for number in (1, 2, 3):
        scheduler.add(request(number, [number] * 5, 4))
    step(scheduler, model)
    assert len(scheduler.running) == 2  # 29 pages hold two reservations of 12
    snapshot = scheduler.snapshot(page_bytes=100)
    assert (snapshot.used, snapshot.stranded) == (24, 20)
    assert len(scheduler.page_map().stranded) == 20


def test_a_request_stopped_between_plan_and_commit_leaks_nothing() -> None:
    scheduler, model = make()
    one = request(1, [1] * 9, 3)
    scheduler.add(one)
    plan = scheduler.plan()
    tokens = model.run(plan)
    scheduler.remove(one)
    scheduler.commit(plan, tokens)
    scheduler.check_integrity()
    assert scheduler.pool.num_held == 0


@pytest.mark.parametrize("stop_at", range(14))
def test_stopping_at_each_step_leaks_no_page(stop_at: int) -> None:
    scheduler, model = make(num_pages=14)
    one, two = request(1, [1] * 10, 12), request(2, [1] * 12, 12)
    scheduler.add(one)
    scheduler.add(two)
    for _ in range(stop_at):
        if scheduler.has_work:
            step(scheduler, model)
    for each in [*scheduler.running, *scheduler.waiting]:
        scheduler.remove(each)
    scheduler.check_integrity()
    assert scheduler.pool.num_held == 0
