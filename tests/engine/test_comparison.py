"""Comparisons: fresh state, alternating order, warm-up dropped, and sentences that follow from the figures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from saved_models import save_tiny

from engine.comparison import Measured, Sample, TooSlow, Workload, acts_on, compare, run_once
from engine.engine import Engine

PROMPT = tuple(range(1, 80))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine.load(
        str(save_tiny("llama", tmp_path_factory.mktemp("tiny"))), {"weights": "none"}, kv_bytes=1 << 20
    )
    yield engine
    engine.close()


def test_a_run_counts_the_tokens_after_the_first(engine: Engine) -> None:
    sample = run_once(engine, Workload((PROMPT,), 9))
    assert sample.tokens_per_second > 0
    assert sample.first_token_seconds > 0
    assert sample.tokens_per_second * sample.step_seconds == pytest.approx(1.0, rel=0.5)  # one token per step
    assert sample.bytes_per_token > engine.info.weight_bytes * 0.5
    assert sample.kv_bytes >= len(PROMPT) * engine.info.kv_bytes_per_token


def test_chats_of_a_batch_share_the_bytes(engine: Engine) -> None:
    alone = run_once(engine, Workload((PROMPT,), 9))
    together = run_once(engine, Workload(tuple((index, *PROMPT) for index in range(1, 5)), 9))
    assert together.bytes_per_token < 0.5 * alone.bytes_per_token


def test_each_run_starts_from_a_fresh_state(engine: Engine) -> None:
    work = Workload((PROMPT,), 2)
    a, b = compare(lambda: engine, lambda: engine, work, 3)
    assert [sample.cached_tokens for sample in (*a.samples, *b.samples)] == [0] * 6


def test_an_earlier_turn_may_be_shared_where_asked_for(engine: Engine) -> None:
    sample = run_once(engine, Workload(((*PROMPT, 3, 4),), 2, before=(PROMPT,)))
    assert sample.cached_tokens >= 32


def test_the_order_alternates_and_the_warm_up_is_dropped(engine: Engine) -> None:
    order: list[str] = []

    def side(name: str):
        def get() -> Engine:
            order.append(name)
            return engine

        return get

    a, b = compare(side("a"), side("b"), Workload((PROMPT,), 2), 3)
    assert "".join(order) == "abbaabba"
    assert (len(a.samples), len(b.samples)) == (3, 3)


def test_a_run_beyond_its_limit_is_stopped_and_leaves_nothing(engine: Engine) -> None:
    with pytest.raises(TooSlow):
        run_once(engine, Workload((PROMPT,), 100), limit_seconds=0.0)
    assert not engine.has_work
    engine.check_integrity()


def measured(**changes: float) -> Measured:
    figures = {
        "tokens_per_second": 50.0,
        "first_token_seconds": 0.2,
        "bytes_per_token": 1e8,
        "flops_per_token": 3e8,
        "memory_seconds": 0.010,
        "compute_seconds": 0.002,
        "step_seconds": 0.020,
    }
    return Measured([Sample(**{**figures, **changes}, kv_bytes=0, recomputed_tokens=0, cached_tokens=0)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"bytes_per_token": 4e8, "memory_seconds": 0.04, "step_seconds": 0.05},
            "B moves 4 times the bytes per token: the difference acts on the memory side",
        ),
        (
            {"bytes_per_token": 2.5e7, "memory_seconds": 0.0025, "step_seconds": 0.0125},
            "A moves 4 times the bytes per token",
        ),
        (
            {"flops_per_token": 9e9, "compute_seconds": 0.06, "step_seconds": 0.07},
            "B computes 30 times the operations per token: the difference acts on the compute side",
        ),
        ({"step_seconds": 0.030}, "overhead, on neither side: 10 ms with A, 20 with B"),
        (
            {"bytes_per_token": 1.2e8, "memory_seconds": 0.012, "step_seconds": 0.040},
            "the memory side of the ridge point (10 ms per token with A, 12 with B). By the clock most of the difference is overhead",
        ),
        ({"first_token_seconds": 0.1}, "B gives its first token 2.0 times sooner"),
        ({}, "the same bytes and do the same arithmetic in the same time"),
    ],
)
def test_the_sentence_names_the_side_of_the_ridge(changes: dict[str, float], said: str) -> None:
    assert said in acts_on(measured(), measured(**changes))


@pytest.mark.parametrize(
    ("rate", "said"),
    [(25.0, "B is slower: 0.50 times"), (100.0, "B writes 2.00 times as fast"), (51.0, "equally fast")],
)
def test_the_sentence_says_who_is_faster(rate: float, said: str) -> None:
    assert said in acts_on(measured(), measured(tokens_per_second=rate))


def test_each_side_is_said_to_be_bound_by_what_takes_longest() -> None:
    slow = measured(compute_seconds=0.1, step_seconds=0.1)
    assert "A is memory-bound and B is compute-bound" in acts_on(measured(), slow)
