"""The draft model in the window: every model is listed with its reason, a choice loads, guesses and is remembered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from PySide6.QtCore import Qt

from app.tuning.drafts import CHECKING, NO_DRAFT
from engine.commands import CancelLoad, JudgeDraft, LoadModel, SetDraft
from engine.events import DraftJudged
from tests.app.dock_bench import DockBench
from tests.app.scripted_service import Script
from tests.app.window_parts import make_window

OTHER_WORDS = "Its vocabulary has 256,001 tokens, this model's has 49,152."
TOO_LARGE = "It is larger than this model: 1.71 B weights against 135 M."
BROKEN = "The file is empty. Fetch it again."


def listed(name: str, problem: str = "") -> SimpleNamespace:
    return SimpleNamespace(
        name=name, title=name.capitalize(), format="GGUF Q4_1", num_bytes=20_000_000, problem=problem
    )


LIBRARY = [listed("starter"), listed("small"), listed("gemma"), listed("big"), listed("broken", BROKEN)]


def script() -> Script:
    return Script(reply_tokens=500, misfits={"gemma": OTHER_WORDS, "big": TOO_LARGE})


@pytest.fixture
def bench(qtbot):
    bench = DockBench(qtbot, script(), lambda: LIBRARY)
    bench.dock.show()
    bench.dock.show_tab(1)
    qtbot.waitExposed(bench.dock)
    yield bench
    bench.close()


def draft_row(bench):
    return bench.dock.switches.layout().itemAt(row_index(bench) + 1).widget()


def row_index(bench):
    return bench.dock.switches.layout().indexOf(bench.dock.switches.rows["speculation"])


def lines(menu) -> dict[str, tuple[str, bool]]:
    """Title -> what stands beside it, and whether it can be chosen."""
    parts = [(action.text().partition("\t"), action.isEnabled()) for action in menu.actions()]
    return {title: (words, enabled) for (title, _, words), enabled in parts}


def choose(bench, title: str) -> None:
    menu = draft_row(bench).make_menu()
    bench.steps()
    next(action for action in menu.actions() if action.text().startswith(title)).trigger()
    menu.close()


def test_every_model_is_listed_and_those_that_do_not_fit_say_why(bench):
    bench.load()
    menu = draft_row(bench).make_menu()
    before = lines(menu)
    assert {title: words for title, (words, _) in before.items() if words == CHECKING}.keys() == {
        "Starter", "Small", "Gemma", "Big",
    }  # fmt: skip
    assert before["Broken"] == (BROKEN, False)
    bench.steps()
    assert lines(menu) == {
        "none": ("nothing is loaded to guess", True),
        "Starter": ("This is the model itself.", True),
        "Small": ("GGUF Q4_1, 20 MB", True),
        "Gemma": (OTHER_WORDS, False),
        "Big": (TOO_LARGE, False),
        "Broken": (BROKEN, False),
    }
    gemma = next(action for action in menu.actions() if action.data() == "gemma")
    assert gemma.toolTip() == OTHER_WORDS
    assert menu.toolTipsVisible()
    menu.close()


def test_verdicts_are_asked_anew_each_time_and_those_of_another_model_are_dropped(bench):
    bench.load()
    draft_row(bench).make_menu().close()
    bench.steps()
    bench.script.misfits = {"small": "It was replaced by another file."}
    menu = draft_row(bench).make_menu()
    assert lines(menu)["Gemma"] == (CHECKING, False)
    bench.steps()
    assert lines(menu)["Gemma"] == ("GGUF Q4_1, 20 MB", True)
    assert lines(menu)["Small"] == ("It was replaced by another file.", False)
    menu.close()
    bench.bridge.load_model("gemma")
    bench.steps()
    bench.bridge.draft_judged.emit(DraftJudged("small", "starter"))  # it comes late, about the model before
    assert bench.dock.drafts.choices()[0].words == CHECKING
    assert lines(draft_row(bench).make_menu())["Small"][0] == CHECKING


def test_a_choice_loads_with_progress_then_guesses(bench):
    bench.load()
    row = draft_row(bench)
    assert (row.pill.text(), row.effect.text()) == ("none", NO_DRAFT)
    assert "draft" in bench.dock.board.state("speculation").reasons
    said = []
    bench.dock.drafts.changed.connect(lambda: said.append(row.status.text()))
    choose(bench, "Small")
    assert isinstance(bench.service.posted[-1], SetDraft)
    assert row.pill.text() == "none …"
    bench.steps()  # it is loaded
    bench.steps()  # it guesses
    assert "Draft model: reading weights, 50 %" in said
    assert row.pill.text() == "small"
    assert row.effect.text() == "9.8 MB more are read for each guess"
    assert bench.dock.board.state("speculation").reasons == {}
    assert bench.dock.board.state("speculation").value == "draft"
    assert bench.settings.settings.drafts == {"starter": "small"}
    assert bench.dock.figures.info.memory.draft_bytes == bench.dock.drafts.draft.weight_bytes
    assert "what guesses" in bench.dock.live.memory.toolTip()


def test_letting_the_draft_model_go_turns_drafting_off(bench):
    bench.load()
    choose(bench, "Small")
    bench.steps()
    bench.steps()
    choose(bench, "none")
    bench.steps(2)
    assert draft_row(bench).pill.text() == "none"
    assert bench.dock.board.state("speculation").value == "off"
    assert bench.dock.board.state("speculation").reasons == {"draft": "No draft model is loaded."}
    assert bench.settings.settings.drafts == {}


def test_the_model_itself_is_allowed_and_called_pointless(bench):
    bench.load()
    choose(bench, "Starter")
    bench.steps(2)
    assert draft_row(bench).effect.text().endswith("This is the model itself.")


def test_a_load_can_be_stopped_and_a_failure_stands_in_the_row(bench, qtbot):
    bench.load()
    choose(bench, "Small")
    menu = draft_row(bench).make_menu()
    assert [action.text() for action in menu.actions()] == ["Stop loading"]
    menu.actions()[0].trigger()
    menu.close()
    assert isinstance(bench.service.posted[-1], CancelLoad)
    bench.steps()
    row = draft_row(bench)
    assert row.status.text() == "Loading the draft model was stopped."
    assert row.status.property("tone") == "refusal"
    assert row.status.textInteractionFlags() & Qt.TextInteractionFlag.TextSelectableByMouse
    assert row.pill.text() == "none"
    assert bench.settings.settings.drafts == {}


def test_without_a_model_there_is_nothing_to_choose(bench):
    row = draft_row(bench)
    assert not row.pill.isEnabled()
    bench.dock.drafts.open()
    assert bench.services == []


def test_the_window_loads_the_remembered_draft_model_with_its_model(qtbot, tmp_path):
    parts = make_window(tmp_path, script(), list_models=lambda: LIBRARY)
    qtbot.addWidget(parts.window)
    parts.load()
    drafts = parts.dock.drafts
    drafts.open()
    assert [type(command) for command in parts.service.posted].count(JudgeDraft) == 4
    drafts.choose("small")
    parts.run()
    assert parts.settings.settings.drafts == {"starter": "small"}
    parts.window.chooser.load("gemma")
    parts.run()
    assert drafts.draft is None
    parts.load()
    loads = [command for command in parts.service.posted if isinstance(command, LoadModel)]
    assert [command.draft for command in loads] == ["", "", "small"]
    assert drafts.draft is not None and drafts.draft.source == "small"
    assert not parts.window.chooser.is_loading
    parts.window.close()


def test_a_remembered_draft_model_that_is_gone_does_not_cost_the_model(qtbot, tmp_path):
    parts = make_window(tmp_path, script(), list_models=lambda: LIBRARY)
    qtbot.addWidget(parts.window)
    parts.settings.update(drafts={"starter": "gemma"})
    parts.load()
    assert parts.window.chooser.info is not None
    assert parts.dock.drafts.draft is None
    assert parts.dock.drafts.status == OTHER_WORDS
    assert parts.dock.drafts.is_refusal
    parts.window.close()
