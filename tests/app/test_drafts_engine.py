"""A draft model chosen in the real window guesses in the real engine, over tiny models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from app.tuning.draft_row import DraftRow
from engine.service import EngineService
from tests.app.window_parts import make_window
from tests.engine.tiny_engine import save_draft, save_model


def test_a_draft_model_is_chosen_in_the_window_and_guesses(qtbot, tmp_path, starter_path):
    """From the list, with the misfit's reason, to the path that ran; let go, it guesses no more."""
    folders = {"target": save_model(tmp_path / "target"), "draft": save_draft(tmp_path / "draft")}
    found = {**folders, "starter": starter_path}
    library = [SimpleNamespace(name=name, title=name, format="tiny", num_bytes=1, problem="") for name in found]
    parts = make_window(
        tmp_path / "data",
        list_models=lambda: library,
        make_engine=lambda wake: EngineService(
            wake, find=lambda name: Path(found[name]), machine_file=tmp_path / "machine"
        ),
    )
    qtbot.addWidget(parts.window)
    parts.window.show()
    parts.settings.update(options={"weights": "none"})
    parts.window.chooser.load("target")
    board, drafts = parts.dock.board, parts.dock.drafts
    qtbot.waitUntil(lambda: board.has_model, timeout=60_000)
    assert "No draft model is loaded" in board.state("speculation").reasons["draft"]

    row = parts.dock.switches.findChild(DraftRow)
    menu = row.make_menu()
    words = {action.data(): action for action in menu.actions()}
    qtbot.waitUntil(lambda: words["starter"].toolTip().startswith("Its vocabulary has"), timeout=20_000)
    assert not words["starter"].isEnabled()
    assert "the model itself" in words["target"].toolTip()
    assert "as many weights" in words["draft"].toolTip()
    words["draft"].trigger()
    menu.close()
    qtbot.waitUntil(lambda: board.state("speculation").value == "draft", timeout=20_000)
    assert drafts.draft is not None and drafts.draft.source == "draft"
    assert parts.settings.settings.drafts == {"target": "draft"}

    records, ended = [], []
    parts.bridge.steps_recorded.connect(records.extend)
    parts.bridge.generation_finished.connect(ended.append)
    parts.settings.update(sampling={"temperature": 0.0, "max_tokens": 40})
    parts.window.panel.send("one two three one two three")
    qtbot.waitUntil(lambda: bool(ended), timeout=60_000)
    assert any(record.active_paths.get("speculation", "").startswith("draft ") for record in records)
    assert sum(record.num_drafted for record in records) > 0

    drafts.choose("")
    qtbot.waitUntil(lambda: drafts.draft is None and not drafts.is_loading, timeout=20_000)
    assert board.state("speculation").value == "off"
    assert parts.settings.settings.drafts == {}
    parts.window.close()
    assert parts.window.lifetime.has_ended
