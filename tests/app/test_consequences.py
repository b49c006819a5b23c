"""What flipping a switch did to the speed here: said once it can be judged, never from noise or unlike steps (FIELD 17)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.tuning.consequences import NUM_STEPS, WARM_UP_STEPS, Consequences
from engine.events import Phase, RequestProgress, StepRecord
from tests.app.dock_bench import DockBench
from tests.app.scripted_service import Script

ENOUGH = NUM_STEPS + WARM_UP_STEPS


def steps(count: int, seconds: float, batch: int = 1, context: int = 100, new: int = 1) -> list[StepRecord]:
    bench_free = {"cost": None, "pool": None, "active_paths": {}, "memory_seconds": 0.0, "compute_seconds": 0.0}
    progress = tuple(RequestProgress(number, 1, new, context) for number in range(batch))
    record = StepRecord(
        index=1, ended_at=0.0, phase=Phase.DECODE, step_seconds=seconds, num_prefill_tokens=0, num_decode_tokens=batch,
        num_new_tokens=new * batch, batch=batch, waiting=0, requests=progress, **bench_free,
    )  # type: ignore[arg-type]  # fmt: skip
    return [record] * count


def judged(before: list[StepRecord], after: list[StepRecord], key: str = "weights") -> str:
    consequences = Consequences()
    consequences.fold(before)
    consequences.on_switched([key])
    consequences.fold(after)
    return consequences.line(key)


def test_slower_faster_and_the_same() -> None:
    before = steps(ENOUGH, 0.05)
    assert judged(before, steps(ENOUGH, 0.1)) == "Slower since it was set: 10 tokens/s, 20 before."
    assert judged(before, steps(ENOUGH, 0.025)) == "Faster since it was set: 40 tokens/s, 20 before."
    assert judged(before, steps(ENOUGH, 0.052)).startswith("No faster and no slower since it was set: 19 tokens/s")


def test_tokens_count_and_not_steps() -> None:
    """A step with accepted guesses takes longer and gains more."""
    assert judged(steps(ENOUGH, 0.05), steps(ENOUGH, 0.075, new=3)).startswith("Faster since it was set: 40 tokens/s")


@pytest.mark.parametrize(
    "after",
    [
        steps(ENOUGH - 1, 0.1),
        steps(ENOUGH, 0.1, batch=2),
        steps(ENOUGH, 0.1, context=2000),
        [replace(step, phase=Phase.PREFILL) for step in steps(40, 0.1)],
    ],
    ids=["too few", "more chats", "a longer text", "prompts"],
)
def test_nothing_is_said_of_steps_that_cannot_be_compared(after: list[StepRecord]) -> None:
    assert judged(steps(ENOUGH, 0.05), after) == ""


def test_nothing_is_said_without_steps_before() -> None:
    assert judged(steps(NUM_STEPS - 1, 0.05), steps(40, 0.1)) == ""


def test_flips_too_close_to_be_told_apart_are_judged_together() -> None:
    consequences = Consequences()
    consequences.fold(steps(ENOUGH, 0.05, batch=3))
    consequences.on_switched(["weights"])
    consequences.fold(steps(4, 0.1, batch=3))
    consequences.on_switched(["attention"])
    consequences.fold(steps(ENOUGH, 0.1, batch=3))
    wanted = "Slower since 2 switches were set: 30 tokens/s, 60 before, 3 chats."
    assert dict(consequences.lines) == {"weights": wanted, "attention": wanted}
    consequences.on_switched(["weights"])
    assert consequences.line("weights") == ""
    assert consequences.line("attention") == wanted
    consequences.on_model()
    assert not consequences.lines


def test_a_hidden_panel_judges_the_same(qtbot) -> None:
    bench = DockBench(qtbot, Script(reply_tokens=500, step_seconds=0.02))
    bench.load()
    bench.chat()
    bench.steps(ENOUGH + 2)
    bench.dock.board.choose("attention", "reference")
    bench.steps()
    bench.script.step_seconds = 0.05
    bench.steps(ENOUGH + 2)
    bench.dock.show()
    qtbot.waitExposed(bench.dock)
    assert bench.dock.board.consequences.line("attention") == "Slower since it was set: 20 tokens/s, 50 before."
    bench.close()


def test_the_row_of_a_switch_that_made_things_slower_says_so(qtbot) -> None:
    bench = DockBench(qtbot, Script(reply_tokens=500, step_seconds=0.02))
    bench.dock.show()
    bench.dock.show_tab(1)
    qtbot.waitExposed(bench.dock)
    bench.load()
    bench.chat()
    bench.steps(ENOUGH + 2)
    bench.dock.board.choose("attention", "reference")
    bench.steps()  # the answer comes behind the steps of its drain
    bench.script.step_seconds = 0.05
    bench.steps(ENOUGH + 2)
    bench.refresh()
    for tab, rows in ((1, bench.dock.switches.rows), (0, bench.dock.quick_switches.rows)):
        bench.dock.show_tab(tab)
        assert rows["attention"].effect.text().endswith(". Slower since it was set: 20 tokens/s, 50 before.")
        assert "since it was set" not in rows["weights"].effect.text()
    bench.load()
    assert "Slower" not in bench.dock.switches.rows["attention"].effect.text()
    bench.close()
