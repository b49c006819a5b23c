"""The measured table of the README: which lines it has, how a line is told, and where it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.options import OPTIONS, entry
from tests.benchmarks import switch_table
from tests.benchmarks.switch_table import Row, lines, off_value, table, write_readme

ROW = Row("fused_ops", "on", "off", "one chat", 10.0, 15.0, 0.2, 0.1, 1_000_000, 2_000_000)


def test_every_switch_and_every_named_choice_has_a_line() -> None:
    measured = {(option.key, value) for option, value, _ in lines()}
    for option in OPTIONS:
        off = off_value(option)
        assert off in option.values
        choices = {value for key, value in measured if key == option.key}
        assert choices
        assert choices <= {*option.values} - {off}
        if not any(value.isdigit() for value in option.values):
            assert choices == {*option.values} - {off}


def test_a_line_shows_both_sides_and_the_ratio() -> None:
    text = table([ROW], "Here.")
    assert "| `fused_ops` off → on | one chat | 10.0 → 15.0 (**1.50**) | 200 → 100 | 1 → 2 | same | Overhead" in text


def test_what_loses_or_rounds_or_cannot_run_says_so() -> None:
    assert "Slower here: arithmetic" in table([replace(ROW, lost="Slower here: arithmetic takes 2 ms.")], "")
    assert "KL 0.0123, 91% same token" in table([replace(ROW, mean_kl=0.0123, agreement=0.91)], "")
    assert table([replace(ROW, refused="No GPU.")], "").endswith("| No GPU. |")


def test_a_switch_without_a_sentence_says_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_table, "WHY", {})
    assert entry("fused_ops").terms in table([ROW], "")


def test_a_choice_may_have_a_sentence_of_its_own() -> None:
    drafted, copied = (table([replace(ROW, key="speculation", value=value)], "") for value in ("draft", "ngram"))
    assert "its own draft" in drafted
    assert "its own draft" not in copied


def test_only_what_stands_between_the_markers_is_written(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{switch_table.BEGIN}\nold\n{switch_table.END}\nafter\n")
    write_readme("new", readme)
    assert readme.read_text() == f"before\n{switch_table.BEGIN}\n\nnew\n\n{switch_table.END}\nafter\n"
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        write_readme("new", readme)


def test_the_readme_has_the_markers() -> None:
    text = switch_table.README.read_text(encoding="utf-8")
    assert switch_table.BEGIN in text
    assert switch_table.END in text
