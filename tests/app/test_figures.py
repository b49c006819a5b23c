"""The numbers behind the live panel: what counts as a token, a second, a first token; and how they are written."""

from __future__ import annotations

import dataclasses

import pytest

from app.tuning import numbers
from app.tuning.advice import advice, verdict
from app.tuning.figures import DECODE_LANE, PREFILL_LANE, STEPS, TOKENS, LiveFigures
from engine.events import (
    Finished,
    FinishReason,
    Phase,
    PoolSnapshot,
    RequestProgress,
    RequestUsage,
    StepCost,
    StepRecord,
)
from tests.app.scripted_service import INFO

POOL = PoolSnapshot(total=100, used=10, shared=2, cached=5, free=85, stranded=0, page_size=16, page_bytes=1000)


def record(
    ended_at: float,
    step: float = 0.01,
    phase: Phase = Phase.DECODE,
    gains: dict[int, int] | None = None,
    memory: float = 0.007,
    compute: float = 0.001,
) -> StepRecord:
    gained = {1: 1} if gains is None else gains
    return StepRecord(
        index=0,
        ended_at=ended_at,
        phase=phase,
        step_seconds=step,
        memory_seconds=memory,
        compute_seconds=compute,
        cost=StepCost(90, 10, 0, 0, 0, 10, 10),
        num_prefill_tokens=0,
        num_decode_tokens=len(gained),
        num_new_tokens=sum(gained.values()),
        batch=len(gained),
        waiting=0,
        pool=POOL,
        requests=tuple(RequestProgress(key, 1, new, 100 + new) for key, new in gained.items()),
        active_paths={},
    )


def run(figures: LiveFigures, count: int, start: float = 0.0, **how) -> float:
    step = how.get("step", 0.01)
    for i in range(count):
        figures.fold([record(start + (i + 1) * step, **how)])
    return start + count * step


def test_rate_is_accepted_tokens_over_decode_seconds():
    figures = LiveFigures()
    figures.fold([record(1.0, step=1.0, phase=Phase.PREFILL, gains={1: 1})])  # a slow prefill and its first token
    end = run(figures, 50, start=1.0, step=0.02)
    assert figures.now(end).tokens_per_second == pytest.approx(50.0)


def test_several_accepted_tokens_per_step_count_in_full():
    figures = LiveFigures()
    figures.fold([record(0.1, phase=Phase.PREFILL)])
    end = run(figures, 50, start=0.1, step=0.02, gains={1: 3})
    assert figures.now(end).tokens_per_second == pytest.approx(150.0)


def test_first_token_of_a_prompt_in_a_mixed_step_is_not_decode():
    figures = LiveFigures()
    figures.fold([record(0.1, phase=Phase.PREFILL)])
    figures.fold([record(0.3, step=0.2, phase=Phase.MIXED, gains={1: 1, 2: 1})])
    assert figures.now(0.3).tokens_per_second == pytest.approx(1 / 0.2)


def test_pauses_do_not_thin_out_the_rate_and_idle_keeps_the_last_value_as_past():
    figures = LiveFigures()
    figures.fold([record(0.05, phase=Phase.PREFILL)])
    end = run(figures, 100, start=0.05)
    live, later = figures.now(end), figures.now(end + 500)
    assert not live.is_past
    assert later.is_past
    assert later.tokens_per_second == live.tokens_per_second == pytest.approx(100.0)
    assert later.batch == 0


def test_a_new_burst_after_a_pause_does_not_mix_with_the_old():
    figures = LiveFigures()
    run(figures, 200, step=0.01)
    end = run(figures, 3, start=100.0, step=0.1)
    assert figures.now(end).tokens_per_second == pytest.approx(10.0)


def test_nothing_measured_is_none_and_never_a_division_by_zero():
    figures = LiveFigures()
    assert figures.now(5.0).tokens_per_second is None
    figures.fold([record(1.0, step=0.0, memory=0.0, compute=0.0)])
    now = figures.now(1.0)
    assert now.tokens_per_second is None
    assert now.bandwidth_share is None
    figures.fold([record(2.0, phase=Phase.PREFILL, gains={})])
    assert figures.now(2.0).tokens_per_second is None


def test_acceptance_is_of_compared_drafts_and_unknown_without_any():
    figures = LiveFigures()
    figures.fold([record(1.0)])
    assert figures.now(1.0).acceptance is None
    figures.fold([dataclasses.replace(record(1.1), num_drafted=4, num_accepted=3)])
    figures.fold([dataclasses.replace(record(1.2), num_drafted=1)])
    assert figures.now(1.2).acceptance == pytest.approx(0.6)


def test_one_generated_token_gives_no_rate():
    figures = LiveFigures()
    figures.fold([record(1.0, phase=Phase.PREFILL, gains={7: 1})])
    assert figures.now(1.0).tokens_per_second is None


def test_first_token_runs_from_submit_and_the_engines_own_figure_replaces_it():
    figures = LiveFigures()
    figures.on_submitted(1, 10.0)
    figures.fold([record(10.1, phase=Phase.PREFILL, gains={})])  # the first chunk: no token yet
    assert figures.now(10.1).first_token_seconds is None
    figures.fold([record(10.25, phase=Phase.PREFILL, gains={1: 1})])
    assert figures.now(10.25).first_token_seconds == pytest.approx(0.25)
    usage = RequestUsage(prompt_tokens=3, new_tokens=1, first_token_seconds=0.24)
    figures.on_finished(Finished(1, FinishReason.STOP, usage))
    assert figures.now(10.3).first_token_seconds == pytest.approx(0.24)


def test_an_abort_before_any_token_leaves_first_token_alone():
    figures = LiveFigures()
    figures.on_submitted(1, 10.0)
    figures.on_finished(Finished(1, FinishReason.ABORT, RequestUsage(prompt_tokens=3)))
    assert figures.now(11.0).first_token_seconds is None


def test_another_model_starts_from_nothing():
    figures = LiveFigures()
    end = run(figures, 100)
    figures.on_model(INFO)
    assert figures.now(end).tokens_per_second is None
    assert figures.now(end).pool is None


def test_a_flipped_switch_marks_and_does_not_mix_before_and_after():
    figures = LiveFigures()
    end = run(figures, 100, step=0.02)
    figures.on_switched(end, ["int4"], None)
    assert [(mark.time, mark.name) for mark in figures.marks] == [(end, "int4")]
    end = run(figures, 10, start=end, step=0.005)
    assert figures.now(end).tokens_per_second == pytest.approx(200.0)


def test_prefill_and_decode_have_their_own_lanes():
    figures = LiveFigures()
    figures.fold([record(0.05, step=0.05, phase=Phase.PREFILL), record(0.1, step=0.05), record(0.11, step=0.005)])
    data = figures.steps.window(0, 1)[:, 0]
    assert data[PREFILL_LANE + STEPS] == pytest.approx(1.0)
    assert data[DECODE_LANE + STEPS] == pytest.approx(2.0)
    assert data[TOKENS] == pytest.approx(2.0)


def test_bandwidth_share_is_predicted_memory_time_over_measured_time():
    figures = LiveFigures()
    end = run(figures, 10, step=0.01, memory=0.0088)
    assert figures.now(end).bandwidth_share == pytest.approx(0.88)


def test_verdict_names_the_limit():
    def said(time_after: float = 0.0, **how) -> str:
        figures = LiveFigures()
        figures.on_model(INFO)
        return verdict(figures, run(figures, 20, **how) + time_after).text

    assert said(memory=0.0084) == "Decode waits for memory: 84 % of each step"
    assert said(memory=0.002, compute=0.0062) == "Decode waits for arithmetic: 62 % of each step"
    assert said(memory=0.003, compute=0.001) == "Decode spends 70 % of each step on overhead"
    assert said(memory=0.002, compute=0.009, phase=Phase.PREFILL) == "Prefill waits for arithmetic: 90 % of each step"
    assert said(memory=0.0084, time_after=60) == "Decode waited for memory: 84 % of each step"
    assert said(memory=0.02) == "Decode waits for memory: 100 % of each step"


def test_verdict_without_steps():
    figures = LiveFigures()
    assert verdict(figures, 0.0).text == "No model loaded"
    figures.on_model(INFO)
    assert verdict(figures, 0.0).text == "Nothing measured yet"


def test_advice_uses_the_users_own_numbers_and_says_predicted():
    figures = LiveFigures()
    figures.on_model(INFO)
    run(figures, 20, step=0.0089, memory=0.0074 / 0.9)  # nine tenths of the bytes are weights
    said = advice(figures)
    assert "Reading weights takes 7.4 of 8.9 ms, predicted." in said
    assert "a second chat would share the same read" in said
    assert "!" not in said


def test_advice_counts_the_chats_that_share_a_read():
    figures = LiveFigures()
    figures.on_model(INFO)
    run(figures, 20, gains={1: 1, 2: 1, 3: 1})
    assert "Each read of the weights serves 3 chats." in advice(figures)


def test_advice_admits_a_prediction_that_is_beaten():
    figures = LiveFigures()
    figures.on_model(INFO)
    run(figures, 20, step=0.005, memory=0.007)
    assert "faster than the 14 GB/s measured for this machine predict" in advice(figures)


def test_advice_right_after_a_switch_waits_for_new_steps():
    figures = LiveFigures()
    figures.on_model(INFO)
    end = run(figures, 20)
    figures.on_switched(end, ["int4"], None)
    assert advice(figures).startswith("Nothing measured since the last change.")


def test_advice_teaches_while_there_is_nothing():
    figures = LiveFigures()
    assert "Load a model" in advice(figures)
    figures.on_model(dataclasses.replace(INFO, name="Tiny"))
    assert "Tiny is ready" in advice(figures)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (float("inf"), "–"),
        (0.0, "0.0"),
        (9.44, "9.4"),
        (9.97, "10"),
        (118.4, "118"),
        (120.0, "120"),
        (1240.4, "1,240"),
        (123456.0, "123,456"),
    ],
)
def test_rates_have_no_exponent(value, written):
    assert numbers.rate(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, ("–", "")),
        (0.0874, ("87", "ms")),
        (0.0004, ("0.4", "ms")),
        (0.214, ("0.21", "s")),
        (0.9949, ("0.99", "s")),
        (0.996, ("1.0", "s")),
        (4.26, ("4.3", "s")),
        (75.2, ("75", "s")),
    ],
)
def test_seconds(value, written):
    assert numbers.seconds(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(640, "640 B"), (23_040, "23 KB"), (98_000_000, "98 MB"), (999_600_000, "1.0 GB"), (1_240_000_000, "1.2 GB")],
)
def test_bytes(value, written):
    assert numbers.data(value) == written


@pytest.mark.parametrize(("value", "written"), [(0.842, "84"), (0.004, "0.4"), (0.0, "0"), (1.04, "104"), (None, "–")])
def test_percent(value, written):
    assert numbers.percent(value) == written
