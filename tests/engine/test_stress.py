"""Random switches under running chats: no error, no stuck chat, every page accounted for, no memory lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stress import Stress
from tiny_engine import save_model

from engine.options import entry

SECONDS = float(os.environ.get("RIDGELINE_STRESS_SECONDS", "600"))
SEED = int(os.environ.get("RIDGELINE_STRESS_SEED", "0")) or time.time_ns() % 10**9
MOST_GROWTH_BYTES = 48 << 20  # Python's and the allocator's own, over hundreds of chats


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Stress]:
    stress = Stress(
        str(save_model(tmp_path)),
        SEED,
        longest=40,
        longest_prompt=300,
        has_template=False,
        weights_share=0.1,
        flips_per_second=20,
    )
    yield stress
    stress.close()


def test_a_tiny_model_for_ten_seconds(tiny: Stress) -> None:
    tiny.run(min(SECONDS, 9))
    assert tiny.counts["flips"] > 5
    assert tiny.counts["tokens"] > 20


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 1.5 + 600)
def test_the_starter_for_ten_minutes(starter_path: Path) -> None:
    stress = Stress(str(starter_path), SEED, longest=40, longest_prompt=150, settings={"weights": "int4"})
    memory = []
    try:
        for value in entry("weights").values:  # what they import and make once is no leak
            stress.set_options({"weights": value} if value not in stress.unavailable.get("weights", {}) else {})
        for _ in range(4):
            stress.run(SECONDS / 4)
            memory.append(stress.fresh_bytes())
    finally:
        stress.close()
    told = ", ".join(f"{each / 1e6:.0f}" for each in memory)
    print(f"seed {SEED}: {dict(stress.counts)}, memory after each quarter {told} MB")
    assert stress.counts["tokens"] > SECONDS
    assert stress.counts["flips"] > SECONDS / 2
    assert memory[3] - memory[1] < MOST_GROWTH_BYTES  # the first half sees most paths for the first time
