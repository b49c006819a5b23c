"""Any combination of lossless switches gives the same greedy fp32 tokens as everything off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import greedy, load, save_model, text

from engine.engine import Engine
from engine.options import OPTIONS, Kind

SWITCHES = [option for option in OPTIONS if option.lossless and option.kind is not Kind.WEIGHTS]
OFF = {option.key: "off" for option in SWITCHES if "off" in option.values}
CHOICES = st.fixed_dictionaries(
    {option.key: st.sampled_from([value for value in option.values if value != "draft"]) for option in SWITCHES}
)  # there is no draft model for this one
PROMPTS = [text(70), text(40, 1), (*text(70)[:64], *text(9, 2))]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = load(save_model(tmp_path_factory.mktemp("tiny")))
    yield engine
    engine.close()


def replies(engine: Engine) -> list[tuple[int, ...]]:
    completions = engine.generate(PROMPTS, greedy(16))
    engine.check_integrity()
    return [tuple(completion.token_ids) for completion in completions]


@pytest.fixture(scope="module")
def all_off(engine: Engine) -> list[tuple[int, ...]]:
    engine.apply(OFF)
    return replies(engine)


@given(CHOICES)
@settings(max_examples=12, deadline=None)
def test_lossless_switches_in_any_combination(
    engine: Engine, all_off: list[tuple[int, ...]], chosen: dict[str, str]
) -> None:
    engine.apply(chosen)
    assert replies(engine) == all_off
