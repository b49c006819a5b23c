"""The table of optimizations: what it says of itself, and conflicts, found before anything runs and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.engine import Engine
from engine.options import OPTIONS, Capabilities, Options, check, clashes, entry, unavailable

DEFAULTS = {option.key: option.default for option in OPTIONS}
CLASHING = [(option, needed) for option in OPTIONS for needed in option.requires]


def test_every_entry_explains_itself() -> None:
    for option in OPTIONS:
        assert option.title and option.terms
        assert len(option.explanation.split()) >= 20, option.key
        assert option.default in option.values
        assert all(choice.title and choice.note for choice in option.choices)
        assert len(set(option.values)) == len(option.values)


def test_defaults_go_together_and_can_be_used_on_every_machine() -> None:
    assert clashes(DEFAULTS) == {}
    for capabilities in (Capabilities(), Capabilities(is_fallback=True, has_native_kernels=False, no_draft="None.")):
        refused = unavailable(capabilities)
        assert dict(Options(DEFAULTS, capabilities)) == DEFAULTS
        for option in OPTIONS:
            for value, reason in refused.get(option.key, {}).items():
                assert reason.endswith(".")
                if value != option.default:
                    with pytest.raises(ValueError, match="cannot be used here"):
                        check(option.key, value, capabilities)


@pytest.mark.parametrize(("option", "needed"), CLASHING, ids=lambda each: each.key)
def test_a_conflict_names_both_switches_and_the_ways_out(option, needed) -> None:
    choice = next(value for value in option.values if value != option.default)
    wrong = next(value for value in entry(needed.key).values if value != needed.value)
    both = {option.key: choice, needed.key: wrong}
    with pytest.raises(ValueError, match="cannot go with") as error:
        Options(both)
    for said in (f"{option.key}={choice}", f"{needed.key}={wrong}", f"Set {needed.key}={needed.value}", needed.why):
        assert said in str(error.value)
    assert f"or {option.key}={option.default}" in str(error.value)
    assert choice in clashes({**DEFAULTS, needed.key: wrong})[option.key]
    assert option.default not in clashes({**DEFAULTS, needed.key: wrong}).get(option.key, {})
    assert wrong in clashes({**DEFAULTS, option.key: choice})[needed.key]


@pytest.mark.parametrize(("option", "needed"), CLASHING, ids=lambda each: each.key)
def test_a_conflict_is_told_before_anything_is_read(option, needed, tmp_path: Path) -> None:
    """FIELD 13: not late, and not as "null". There is not even a model to read."""
    choice = next(value for value in option.values if value != option.default)
    wrong = next(value for value in entry(needed.key).values if value != needed.value)
    with pytest.raises(ValueError, match=f"{option.key}={choice} cannot go with {needed.key}={wrong}"):
        Engine.load(str(tmp_path / "nothing.gguf"), {option.key: choice, needed.key: wrong})


def test_clashes_are_those_that_are_refused() -> None:
    """Whatever one switch is set to, what is grey is exactly what Options would refuse (where everything can be used)."""
    everything = Capabilities(device="cuda")

    def fits(values: dict[str, str]) -> bool:
        try:
            Options(values, everything)
        except ValueError:
            return False
        return True

    for changed in OPTIONS:
        for values in ({**DEFAULTS, changed.key: value} for value in changed.values):
            grey = clashes(values)
            for other in OPTIONS:
                for choice in other.values:
                    assert (choice not in grey.get(other.key, {})) == fits({**values, other.key: choice})
