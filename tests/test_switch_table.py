"""The measured table of the README: which lines it has, how a line is told, and where it is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.events import ModelInfo
from engine.options import OPTIONS, OptionEntry, entry
from tests.app.scripted_service import INFO
from tests.benchmarks import switch_table
from tests.benchmarks.switch_table import Row, lines, off_value, table, told_in, write_readme

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


# -- rows that are not measured anew --------------------------------------------------------------

MADE_BY = f"{INFO.name} ({INFO.stored_format})"
TODAY = "2026-12-24"
Measure = Callable[..., dict[str, str]]


def rows_in(readme: Path) -> dict[str, str]:
    """Switch and work -> the rest of the line."""
    table_lines = [line for line in readme.read_text().splitlines() if line.startswith("| `")]
    return {" | ".join(line.split(" | ")[:2]): line for line in table_lines}


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Runs the program, with a stand-in that measures ``rate`` everywhere, on a README of its own; returns its rows."""
    readme = tmp_path / "README.md"
    readme.write_text(f"{switch_table.BEGIN}\n{switch_table.END}\n")
    monkeypatch.setattr(switch_table, "README", readme)
    monkeypatch.setattr(switch_table, "CACHE", tmp_path / "kept")

    def run(*arguments: str, rate: float, date: str = TODAY, machine: str = "Test") -> dict[str, str]:
        class Stub:
            def __init__(self, model: str) -> None:
                self.info: ModelInfo = replace(INFO, machine=replace(INFO.machine, name=machine))

            def measure(self, option: OptionEntry, value: str, work: str, seconds: float) -> Row:
                return replace(ROW, key=option.key, value=value, off=off_value(option), work=work, rate_on=rate)

            def close(self) -> None:
                """Nothing is held."""

        monkeypatch.setattr(switch_table, "Bench", Stub)
        monkeypatch.setattr(switch_table, "today", lambda: date)
        assert switch_table.main([*arguments]) == 0
        return rows_in(readme)

    return run


def names(*keys: str) -> set[str]:
    """Of the rows of these switches, or of all."""
    return {f"| `{o.key}` {off_value(o)} → {value} | {work}" for o, value, work in lines() if not keys or o.key in keys}


def dropped(folder: Path) -> None:
    """What was kept is lost, as in another checkout."""
    for file in (folder / "kept").iterdir():
        file.unlink()


@pytest.mark.parametrize("has_kept", [True, False])
def test_only_some_switches_are_measured_anew_and_the_rest_stays_with_its_date(
    measure: Measure, tmp_path: Path, has_kept: bool
) -> None:
    first = measure(rate=15.0, date="2026-12-01")
    assert set(first) == names()
    assert not any("Earlier run" in line for line in first.values())
    if not has_kept:
        dropped(tmp_path)
    second = measure("--only", "speculation,draft_length", rate=20.0)
    assert list(second) == list(first)  # all of them, in their order
    for name, line in second.items():
        if name in names("speculation", "draft_length"):
            assert "10.0 → 20.0 (**2.00**)" in line
            assert "Earlier run" not in line
        else:
            assert line == first[name].removesuffix(" |") + " Earlier run (2026-12-01). |"


def test_each_row_keeps_the_date_it_was_measured_at(measure: Measure, tmp_path: Path) -> None:
    measure(rate=15.0, date="2026-12-01")
    measure("--only", "prefix", rate=20.0, date="2026-12-02")
    dropped(tmp_path)
    third = measure("--only", "paging", rate=30.0, date="2026-12-03")
    assert {name for name, line in third.items() if "Earlier run" not in line} == names("paging")
    assert {name for name, line in third.items() if line.endswith("Earlier run (2026-12-02). |")} == names("prefix")
    others = names() - names("paging", "prefix")
    assert {name for name, line in third.items() if line.endswith("Earlier run (2026-12-01). |")} == others
    assert all(line.count("Earlier run") <= 1 for line in third.values())


def test_another_machine_is_named_and_what_is_kept_of_it_is_not_taken_for_ours(measure: Measure) -> None:
    measure(rate=15.0, machine="Z80 (2 threads)")
    second = measure("--only", "paging", rate=20.0)
    assert all("Z80 (2 threads)" in line for name, line in second.items() if name not in names("paging"))
    third = measure("--only", "prefix", rate=25.0, date="2026-12-25")
    (paging,) = names("paging")
    assert third[paging].endswith(f"Earlier run ({TODAY}). |")
    assert any(line.endswith(f"Earlier run ({TODAY}, {MADE_BY} on Z80 (2 threads)). |") for line in third.values())
    fourth = measure(rate=30.0, date="2026-12-25")  # all that was not measured here
    assert {name for name, line in fourth.items() if "→ 30.0" in line} == names() - names("paging", "prefix")


def test_a_run_that_was_stopped_goes_on_and_leaves_no_row_out(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(rate=15.0, date="2026-12-01")
    late = measure("--fresh", "--seconds", "-1", rate=20.0)
    assert all(line.endswith("Earlier run (2026-12-01). |") for line in late.values())
    assert set(late) == names()
    assert "Time is up; weights=int8 is left" in capsys.readouterr().err
    measure("--fresh", rate=25.0)
    again = measure(rate=30.0)
    assert all("→ 25.0" in line and "Earlier" not in line for line in again.values())  # of the same day: the same run


def test_the_newer_of_what_is_kept_and_what_the_readme_has_is_shown(measure: Measure, tmp_path: Path) -> None:
    measure(rate=15.0, date="2026-12-01")
    measure("--print", "--fresh", rate=20.0, date="2026-12-02")  # kept, and not in the README
    kept = json.loads(next((tmp_path / "kept").glob("prefix.on.*")).read_text())
    assert (kept["where"], kept["date"]) == (f"{MADE_BY} on Test", "2026-12-02")
    rows = measure("--only", "paging", rate=30.0)
    (prefix,) = names("prefix")
    assert "→ 20.0" in rows[prefix]
    assert rows[prefix].endswith("Earlier run (2026-12-02). |")


def test_a_switch_that_there_is_not_is_refused_and_a_row_that_is_gone_is_named(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        measure("--only", "speculations", rate=1.0)
    assert "there is no switch speculations" in capsys.readouterr().err
    measure(rate=15.0)
    all_lines = list(lines())
    monkeypatch.setattr(switch_table, "lines", lambda: iter(all_lines[1:]))
    assert len(measure("--only", "paging", rate=20.0)) == len(all_lines) - 1
    assert "`weights` none → int8 (one chat) is not among the rows any more" in capsys.readouterr().err


def test_every_line_of_the_readme_is_understood() -> None:
    """Else a run with --only would lose it."""
    told = told_in(switch_table.README)
    text = switch_table.README.read_text(encoding="utf-8")
    assert len(told) == sum(line.startswith("| `") for line in text.partition(switch_table.BEGIN)[2].splitlines())
    assert told
    for line, run in told.values():
        assert "Earlier run" not in line
        assert len(run.date) == 10
        assert " on " in run.where
