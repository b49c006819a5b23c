"""The block pool: property tests over any sequence of operations, and the faults others had."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.kv.pool import PageKey, PagePool

SIZE = 4


def fill(pool: PagePool, tokens: list[int]) -> list[int]:
    """Allocate pages for ``tokens`` as a request would, and register the full ones."""
    shared = pool.match(tokens)
    pool.acquire(shared)
    fresh = pool.allocate(-(-len(tokens) // SIZE) - len(shared))
    assert fresh is not None
    pages = shared + fresh
    for i in range(len(shared), len(tokens) // SIZE):
        pool.register(pages[i], pages[i - 1] if i else None, tokens[i * SIZE : (i + 1) * SIZE])
    return pages


class PoolMachine(RuleBasedStateMachine):
    """Random requests come, share, grow and go; every page stays accounted for and every match tells the truth."""

    tables: Bundle[int] = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, SIZE)
        self.held: dict[int, tuple[list[int], list[int]]] = {}
        self.text_of: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end, as last written
        self.next_id = 0

    @rule(target=tables, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, tokens: list[int]):
        shared = self.pool.match(tokens)
        assert len(shared) * SIZE < len(tokens)
        for i, page in enumerate(shared):
            assert self.text_of[page] == tuple(tokens[: (i + 1) * SIZE])
        self.pool.acquire(shared)
        fresh = self.pool.allocate(-(-len(tokens) // SIZE) - len(shared), after=shared[-1] if shared else None)
        if fresh is None:
            self.pool.release(shared)
            return multiple()
        pages = shared + fresh
        for i in range(len(shared), len(pages)):
            self.text_of[pages[i]] = tuple(tokens[: (i + 1) * SIZE])
        for i in range(len(shared), len(tokens) // SIZE):
            self.pool.register(pages[i], pages[i - 1] if i else None, tokens[i * SIZE : (i + 1) * SIZE])
        self.next_id += 1
        self.held[self.next_id] = (tokens, pages)
        return self.next_id

    @rule(table=consumes(tables))
    def finish(self, table: int) -> None:
        self.pool.release(self.held.pop(table)[1])

    @rule()
    def forget(self) -> None:
        self.pool.clear_index()

    @rule(count=st.integers(1, 4))
    def reserve(self, count: int) -> None:
        run = self.pool.allocate_run(count)
        if run is not None:
            assert run == list(range(run[0], run[0] + count))
            for page in run:
                self.text_of.pop(page, None)
            self.pool.release(run)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.pool.check_integrity(pages for _, pages in self.held.values())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
@settings(deadline=None)
def test_a_match_never_covers_the_last_token(tokens: list[int]) -> None:
    pool = PagePool(20, SIZE)
    pool.release(fill(pool, tokens))
    assert len(pool.match(tokens)) == (len(tokens) - 1) // SIZE


def test_a_prompt_of_exactly_k_pages_cached_to_its_last_token_keeps_one_page_to_compute() -> None:
    pool = PagePool(10, SIZE)
    pool.release(fill(pool, list(range(3 * SIZE))))
    assert len(pool.match(list(range(3 * SIZE)))) == 2


def test_colliding_hashes_never_give_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageKey, "__hash__", lambda self: 7)
    pool = PagePool(20, SIZE)
    one = fill(pool, [1] * 9)
    other = fill(pool, [2] * 9)
    assert pool.match([1] * 9) == one[:2]
    assert pool.match([2] * 9) == other[:2]
    assert pool.match([1] * 4 + [2] * 5) == one[:1]


def test_the_same_tokens_after_another_beginning_do_not_match() -> None:
    pool = PagePool(20, SIZE)
    fill(pool, [1, 1, 1, 1, 5, 5, 5, 5, 9])
    assert pool.match([2, 2, 2, 2, 5, 5, 5, 5, 9]) == []


def test_two_equal_prompts_computed_at_once_share_one_index_entry() -> None:
    pool = PagePool(20, SIZE)
    first = pool.allocate(3)
    second = pool.allocate(3)
    assert first is not None and second is not None
    for pages in (first, second):
        for i in range(2):
            pool.register(pages[i], pages[i - 1] if i else None, [7] * SIZE)
    assert pool.match([7] * 9) == first[:2]
    pool.release(second)
    pool.release(first)
    pool.check_integrity([])
    assert (pool.num_cached, pool.num_free) == (2, 17)


def test_the_end_of_a_text_is_reused_before_its_beginning() -> None:
    pool = PagePool(4, SIZE)
    pages = fill(pool, list(range(3 * SIZE)))
    pool.release(pages)
    assert pool.allocate(1) == [pages[-1]]
    assert pool.match([*range(3 * SIZE), 0]) == pages[:2]


def test_neighbours_are_preferred_so_that_attention_reads_one_piece() -> None:
    pool = PagePool(40, SIZE)
    one = pool.allocate(2)
    two = pool.allocate(2)
    assert one is not None and two is not None
    for _ in range(5):
        for pages in (one, two):
            more = pool.allocate(1, after=pages[-1])
            assert more == [pages[-1] + 1]
            pages += more


def test_a_pool_without_room_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="more memory"):
        PagePool(1, SIZE)
