"""Every lossless switch, each pair of their choices, and any combination: the same greedy fp32 tokens as everything off."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import greedy, load, save_draft, save_model, text

from engine.engine import Engine
from engine.options import OPTIONS, Capabilities, Kind, Options, entry

SWITCHES = [option for option in OPTIONS if option.lossless and option.kind is not Kind.WEIGHTS]
# Of numbers the extremes and the middle; of all else every choice that this machine has.
NUMBERS = {"max_batch": ("1", "2", "16"), "token_budget": ("32", "512"), "draft_length": ("adaptive", "1", "8")}
HERE = Capabilities()  # with a draft model
VALUES: dict[str, tuple[str, ...]] = {
    option.key: tuple(value for value in NUMBERS.get(option.key, option.values) if not option.reason(value, HERE))
    for option in SWITCHES
}
PLAINEST = ("off", "reference", "1")
OFF = {key: next((value for value in PLAINEST if value in values), values[0]) for key, values in VALUES.items()}
Pair = tuple[tuple[str, str], tuple[str, str]]
PROMPTS = [text(70), text(40, 1), (*text(70)[:64], *text(9, 2)), text(12, 3) * 3]  # the last one repeats itself


def pairs_of(setting: Mapping[str, str]) -> set[Pair]:
    return set(itertools.combinations(setting.items(), 2))


def goes_together(setting: Mapping[str, str]) -> bool:
    try:
        Options(setting)
    except ValueError:
        return False
    return True


def every_pair() -> set[Pair]:
    """Each two choices of two switches; those that are refused together are not among them."""
    choices = [[(key, value) for value in VALUES[key]] for key in VALUES]
    found = (pair for one, two in itertools.combinations(choices, 2) for pair in itertools.product(one, two))
    return {pair for pair in found if goes_together(dict(pair))}


def covering() -> list[dict[str, str]]:
    """Few settings that hold every pair between them: each begins with a missing pair, and of some fillings the best is kept."""
    chance, missing, rows = random.Random(0), every_pair(), []
    while missing:
        first = dict(min(missing))
        fillings = ({key: first.get(key) or chance.choice(values) for key, values in VALUES.items()} for _ in range(60))
        rows.append(max(filter(goes_together, fillings), key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return rows


COVERING = covering()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    engine = load(save_model(target), draft=save_draft(draft))
    yield engine
    engine.close()


def replies(engine: Engine, setting: Mapping[str, str], count: int = 16) -> list[tuple[int, ...]]:
    """What is written; guesses are made in every step, whether they pay or not."""
    engine.apply({**OFF, **setting})
    assert all(engine.options[key] == value for key, value in setting.items())
    if engine._speculator:
        engine._speculator.controller.automatic_off = False
    completions = engine.generate(PROMPTS, greedy(count))
    engine.check_integrity()
    if setting.get("speculation", "off") != "off" and setting.get("kv_cache") == "on":
        assert sum(completion.usage.num_drafted for completion in completions) > 0
    return [tuple(completion.token_ids) for completion in completions]


@pytest.fixture(scope="module")
def all_off(engine: Engine) -> list[tuple[int, ...]]:
    return replies(engine, {})


def test_every_lossless_switch_is_among_them() -> None:
    assert set(VALUES) >= {
        *("batching", "chunked_prefill", "paging", "prefix", "eviction", "gqa", "kv_cache"),
        *("speculation", "fused_ops", "attention", "token_budget", "max_batch", "draft_length"),
    }
    assert VALUES["speculation"] == entry("speculation").values
    assert every_pair() == set().union(*map(pairs_of, COVERING))


@pytest.mark.parametrize("setting", COVERING, ids=range(len(COVERING)))
def test_each_pair_of_choices(engine: Engine, all_off: list[tuple[int, ...]], setting: dict[str, str]) -> None:
    assert replies(engine, setting) == all_off


@given(st.fixed_dictionaries({key: st.sampled_from(values) for key, values in VALUES.items()}).filter(goes_together))
@settings(max_examples=12, deadline=None)
def test_any_combination(engine: Engine, all_off: list[tuple[int, ...]], chosen: dict[str, str]) -> None:
    assert replies(engine, chosen) == all_off


@pytest.mark.slow
def test_each_pair_with_everything_else_off(engine: Engine, all_off: list[tuple[int, ...]]) -> None:
    for one, two in sorted(every_pair()):
        assert replies(engine, {**OFF, **dict((one, two))}) == all_off, (one, two)
