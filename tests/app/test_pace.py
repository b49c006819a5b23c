"""The refresh rate follows what a refresh costs; the meter counts it; the refresher stops when nobody looks."""

from __future__ import annotations

import pytest

from app.tuning.pace import BUDGET, LOWEST_HZ, Meter, Pace
from app.tuning.refresher import IDLE_SECONDS, Refresher


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def settled(cost: float, cores: int = 2) -> float:
    pace = Pace(num_cores=cores)
    for _ in range(200):
        pace.note(cost)
    return pace.hz


def test_cheap_refreshes_run_at_the_fastest_rate():
    assert settled(0.0001) == pytest.approx(30.0)


@pytest.mark.parametrize("cost", [0.001, 0.002, 0.0033])
def test_the_rate_keeps_the_share_within_the_budget(cost):
    hz = settled(cost)
    assert 5.0 < hz < 30.0
    assert hz * cost == pytest.approx(2 * BUDGET)


def test_dear_refreshes_go_below_5_hz_but_not_below_2():
    assert settled(0.006) == pytest.approx(2 * BUDGET / 0.006)
    assert settled(0.1) == LOWEST_HZ


def test_more_cores_afford_more():
    assert settled(0.002, cores=4) == pytest.approx(2 * settled(0.002, cores=2))


def test_one_dear_refresh_slows_down_at_once_and_recovers():
    pace = Pace(num_cores=2)
    for _ in range(50):
        pace.note(0.0005)
    before = pace.hz
    pace.note(0.02)
    assert pace.hz < before / 5
    for _ in range(100):
        pace.note(0.0005)
    assert pace.hz == pytest.approx(before, rel=0.05)


def test_no_faster_than_the_plots_move():
    pace = Pace(num_cores=16)
    pace.note(0.0001)
    pace.useful_hz = 8.0
    assert pace.hz == 8.0
    pace.useful_hz = 1.0
    assert pace.hz == 5.0


def test_meter_counts_nested_sections_once():
    cpu, wall = Clock(), Clock()
    meter = Meter(cpu, wall)
    with meter:
        cpu.now += 0.003
        with meter:
            cpu.now += 0.002
    cpu.now += 1.0  # outside
    assert meter.take() == pytest.approx(0.005)
    assert meter.take() == 0.0


def test_share_of_core_is_over_five_seconds_and_forgets():
    cpu, wall = Clock(), Clock()
    meter = Meter(cpu, wall)
    for _ in range(10):
        wall.now += 0.5
        with meter:
            cpu.now += 0.01
        meter.take()
    assert meter.share_of_core() == pytest.approx(0.02)
    wall.now += 60
    assert meter.share_of_core() == 0.0


@pytest.fixture
def bench(qtbot):
    class Bench:
        clock, cpu = Clock(), Clock()
        cost = 0.0
        calls = 0

        def refresh(self, now: float) -> None:
            self.calls += 1
            self.cpu.now += self.cost

    bench = Bench()
    meter = Meter(bench.cpu, bench.clock)
    bench.refresher = Refresher(bench.refresh, meter, Pace(num_cores=2), bench.clock)
    yield bench
    bench.refresher.set_shown(False)


def test_hidden_does_not_refresh(bench, qtbot):
    bench.refresher.note_work()
    qtbot.wait(120)
    assert bench.calls == 0
    assert not bench.refresher.is_running


def test_shown_refreshes_while_work_goes_on_and_stops_when_idle(bench, qtbot):
    bench.refresher.set_shown(True)
    bench.refresher.note_work()
    qtbot.waitUntil(lambda: bench.calls >= 3)
    with qtbot.waitSignal(bench.refresher.fell_idle, timeout=2000):
        bench.clock.now += IDLE_SECONDS
    assert not bench.refresher.is_running
    calls = bench.calls
    qtbot.wait(100)
    assert bench.calls == calls
    bench.refresher.note_work()
    qtbot.waitUntil(lambda: bench.calls > calls)


def test_hiding_stops_at_once(bench, qtbot):
    bench.refresher.set_shown(True)
    bench.refresher.note_work()
    bench.refresher.set_shown(False)
    calls = bench.calls
    qtbot.wait(100)
    assert bench.calls == calls


def test_the_timer_slows_down_for_a_dear_refresh(bench, qtbot):
    bench.refresher.set_shown(True)
    bench.refresher.note_work()
    qtbot.waitUntil(lambda: bench.calls >= 3)
    assert bench.refresher.interval_milliseconds <= 40
    bench.cost = 0.05
    qtbot.waitUntil(lambda: bench.refresher.interval_milliseconds == 500, timeout=5000)
