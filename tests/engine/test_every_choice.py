"""Every choice of every switch runs on the starter model on a CPU, or says why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.commands import Message
from engine.engine import Engine
from engine.options import OPTIONS, clashes, entry
from engine.params import SamplingParams

QUESTION = (Message("user", "Which city is the capital of France? Answer in one sentence."),)
GREEDY = SamplingParams(temperature=0, max_tokens=10)
CHOICES = [(option.key, value) for option in OPTIONS for value in option.values]


@pytest.fixture(scope="module")
def engine(starter_path: Path) -> Iterator[Engine]:
    """With itself as the draft model, so that drafting can be chosen."""
    engine = Engine.load("starter", kv_bytes=1 << 26, find=lambda name: starter_path, draft="starter")
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), CHOICES)
def test_it_runs_or_says_why_not(engine: Engine, key: str, value: str) -> None:
    before = dict(engine.options)
    reason = entry(key).reason(value, engine.capabilities)
    if reason and value != entry(key).default:
        with pytest.raises(ValueError, match="cannot be used here"):
            engine.apply({key: value})
        assert dict(engine.options) == before
        return
    assert value not in clashes(before).get(key, {})
    try:
        engine.apply({key: value})
        assert engine.options[key] == value
        (done,) = engine.generate([QUESTION], GREEDY)
        assert done.usage.new_tokens
        if entry(key).lossless:
            assert "Paris" in done.text  # where rounding is chosen the words may differ
        engine.check_integrity()
        assert engine.info.active_paths
    finally:
        engine.apply(before)
