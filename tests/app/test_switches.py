"""Switches: generated from the option table, one click posts one command, the answer stands where it was asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLabel

from app.tuning.effects import KIND_WORDS
from app.tuning.preset_row import SEARCH
from app.tuning.switch_board import NO_MODEL, mark_name
from app.tuning.switches import PLAIN_VALUES
from engine.commands import FindBest
from engine.events import EngineError
from engine.options import OPTIONS, Kind, Pile, entry
from engine.presets import presets
from tests.app.dock_bench import DockBench
from tests.app.scripted_service import Script


@pytest.fixture
def bench(qtbot):
    bench = DockBench(qtbot)
    bench.dock.show()
    bench.dock.show_tab(1)
    qtbot.waitExposed(bench.dock)
    yield bench
    bench.close()


def row(bench, key):
    return bench.dock.switches.rows[key]


def click(qtbot, bench, key):
    qtbot.mouseClick(row(bench, key).pill, Qt.MouseButton.LeftButton)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_every_option_has_a_control_that_reaches_the_engine(bench, qtbot, option):
    bench.load()
    reasons = bench.dock.board.state(option.key).reasons
    if len(option.choices) == 2 and reasons:
        assert not row(bench, option.key).pill.isEnabled()
        assert row(bench, option.key).pill.toolTip() in reasons.values()
        return
    for other in (value for value in option.values if value != bench.dock.board.state(option.key).value):
        if len(option.choices) == 2:
            click(qtbot, bench, option.key)
        else:
            menu = row(bench, option.key).pill.make_menu()
            menu.actions()[option.values.index(other)].trigger()
            menu.deleteLater()
        assert bench.asked()[-1] == {option.key: other}
        bench.steps()
        assert row(bench, option.key).pill.text() == option.choice(other).title


def test_every_row_says_what_it_is(bench):
    for option in OPTIONS:
        shown = row(bench, option.key)
        assert shown.title.text().startswith(option.title)
        assert shown.kind.text() == KIND_WORDS[option.kind]
        assert shown.effect.text()
        assert shown.explanation.isHidden()
    assert {option.kind for option in OPTIONS} <= set(KIND_WORDS)


def test_rows_are_grouped_by_pile(bench):
    headings = [label.text() for label in bench.dock.switches.findChildren(QLabel) if label.property("part") == "pile"]
    assert sorted(headings) == sorted({str(option.pile.value) for option in OPTIONS})
    assert set(headings) <= {str(pile.value) for pile in Pile}


def test_the_paths_that_ran_and_the_machine_are_named(bench):
    assert "Load a model" in bench.dock.paths.text()
    bench.load()
    assert bench.dock.paths.text() == "attention: scripted\nlinear: int4: scripted"
    said = bench.dock.machine.text()
    assert "Reads 14 GB/s" in said
    assert "bf16 35" in said
    assert "Ridge point in bf16: 2.4 operations per byte" in said
    assert said.endswith("Measured 2026-11-30")


def test_the_quick_switches_show_the_same_table_and_state(bench, qtbot):
    bench.load()
    assert list(bench.dock.quick_switches.rows) == list(bench.dock.switches.rows)
    click(qtbot, bench, "prefix")
    bench.steps()
    assert bench.dock.quick_switches.rows["prefix"].pill.text() == "off"


def test_a_click_on_the_title_opens_the_explanation(bench, qtbot):
    shown = row(bench, "weights")
    qtbot.mouseClick(shown.title, Qt.MouseButton.LeftButton)
    assert not shown.explanation.isHidden()
    assert entry("weights").explanation in shown.explanation.text()
    assert "running chats go on afterwards" in shown.explanation.text()
    qtbot.mouseClick(shown.title, Qt.MouseButton.LeftButton)
    assert shown.explanation.isHidden()


def test_pending_is_shown_and_not_asked_twice(bench, qtbot):
    bench.load()
    click(qtbot, bench, "paging")
    bench.dock.board.choose("paging", "off")
    assert bench.asked() == [{"paging": "off"}]
    assert row(bench, "paging").pill.text() == "off …"
    bench.steps()
    assert row(bench, "paging").pill.text() == "off"


def test_two_flips_before_an_answer_end_at_the_last(bench):
    bench.load()
    bench.dock.board.choose("prefix", "off")
    bench.dock.board.choose("prefix", "on")
    assert bench.asked() == [{"prefix": "off"}, {"prefix": "on"}]
    bench.steps()
    assert bench.dock.board.state("prefix").value == "on"
    assert bench.dock.board.state("prefix").pending is None


def test_a_refusal_stands_in_its_row_and_can_be_copied(bench, qtbot):
    bench.script.refuse = {"paging": "Not with this model: its window slides."}
    bench.load()
    click(qtbot, bench, "paging")
    bench.steps()
    shown = row(bench, "paging")
    assert shown.status.text() == "Not with this model: its window slides."
    assert not shown.status.isHidden()
    assert shown.status.property("tone") == "refusal"
    assert shown.status.textInteractionFlags() & Qt.TextInteractionFlag.TextSelectableByMouse
    assert shown.pill.text() == "on"
    assert row(bench, "prefix").status.isHidden()
    bench.script.refuse = {}
    click(qtbot, bench, "paging")
    bench.steps()
    assert "Not with" not in shown.status.text()


def test_reloading_weights_shows_progress_and_what_it_took(bench):
    bench.load()
    bench.chat()
    bench.steps(3)
    bench.dock.board.choose("weights", "int8")
    said = []
    bench.dock.board.switch_changed.connect(lambda key: said.append(bench.dock.board.state("weights").status))
    bench.steps()
    assert "Reading weights, 50 %" in said
    assert bench.dock.board.state("weights").status == "Took 4.0 ms; 1 running chat is recomputed."
    assert row(bench, "weights").effect.text() == "135 MB read per step; was 98 MB"


def test_what_a_change_took_is_forgotten_after_a_while(bench):
    bench.load()
    bench.dock.board.choose("paging", "off")
    bench.steps()
    assert bench.dock.board.state("paging").status
    bench.refresh(20.0)
    assert not bench.dock.board.state("paging").status


def test_unavailable_choices_are_grey_with_their_reason(qtbot):
    reasons = {
        "weights": {"int8": "No product for it here.", "none": "Too large."},
        "fused_ops": {"off": "Only fused."},
    }
    bench = DockBench(qtbot, Script(unavailable=reasons))
    bench.load()
    menu = row(bench, "weights").pill.make_menu()
    grey = {action.text().split("\t")[0]: action.text() for action in menu.actions() if not action.isEnabled()}
    assert set(grey) == {"full", "int8"}
    assert "No product for it here." in grey["int8"]
    menu.deleteLater()
    assert not row(bench, "fused_ops").pill.isEnabled()
    assert row(bench, "fused_ops").pill.toolTip() == "Only fused."
    bench.dock.board.choose("weights", "int8")
    assert bench.asked() == []
    bench.close()


def grey(bench, key):
    """Choice title -> reason, of what cannot be chosen now."""
    menu = row(bench, key).pill.make_menu()
    menu.deleteLater()
    return {action.text().split("\t")[0]: action.toolTip() for action in menu.actions() if not action.isEnabled()}


CLASHING = [(option, needed) for option in OPTIONS for needed in option.requires]


@pytest.mark.parametrize(("option", "needed"), CLASHING, ids=lambda each: each.key)
def test_choices_that_clash_with_another_switch_are_grey_while_it_stands_so(bench, option, needed):
    """In both directions, named in the tooltip, following the other switch as it moves (FIELD 13)."""
    bench.load()
    board, other = bench.dock.board, entry(needed.key)
    wrong = next(value for value in other.values if value != needed.value)
    choice = next(value for value in option.values if value != option.default)
    assert not board.state(option.key).clashes
    assert not board.state(other.key).clashes
    board.choose(other.key, wrong)  # asked for, not yet answered: grey already
    reason = board.state(option.key).clashes[choice]
    for said in (option.title, option.choice(choice).title, other.title, other.choice(needed.value).title, needed.why):
        assert said in reason
    bench.steps()
    if len(option.choices) > 2:
        assert grey(bench, option.key)[option.choice(choice).title] == reason
        assert option.choice(option.default).title not in grey(bench, option.key)
    else:
        assert row(bench, option.key).pill.toolTip() == reason
    asked = len(bench.asked())
    board.choose(option.key, choice)
    assert len(bench.asked()) == asked
    board.choose(other.key, needed.value)
    board.choose(option.key, choice)
    bench.steps()
    assert board.state(option.key).value == choice
    if len(other.choices) == 2:
        assert not row(bench, other.key).pill.isEnabled()
        assert option.title in row(bench, other.key).pill.toolTip()
    board.choose(option.key, option.default)
    assert row(bench, other.key).pill.isEnabled()


def test_a_refused_flip_gives_the_choices_of_the_others_back(bench):
    bench.script.refuse = {"kv_cache": "Not now."}
    bench.load()
    bench.dock.board.choose("kv_cache", "off")
    assert bench.dock.board.state("sparse").clashes
    bench.steps()
    assert not bench.dock.board.state("sparse").clashes


def test_a_preset_may_move_both_of_two_that_clash(bench):
    """One command with both: what would clash with the switches as they are now is not left out."""
    bench.load(kv_cache="off")
    assert bench.dock.board.state("sparse").clashes
    bench.dock.board.choose_all({"kv_cache": "on", "sparse": "8"})
    assert bench.asked()[-1] == {"kv_cache": "on", "sparse": "8"}
    bench.steps()
    assert bench.dock.board.state("sparse").value == "8"


def test_without_a_model_nothing_can_be_flipped(bench, qtbot):
    for shown in bench.dock.switches.rows.values():
        assert not shown.pill.isEnabled()
        assert shown.pill.toolTip() == NO_MODEL
    bench.dock.board.choose("prefix", "off")
    assert bench.services == []
    bench.load()
    for key, shown in bench.dock.switches.rows.items():
        assert shown.pill.isEnabled() != bool(bench.dock.board.state(key).reasons)


def test_a_load_shows_the_values_in_force(bench):
    bench.load(weights="int8", prefix="off")
    assert row(bench, "weights").pill.text() == "int8"
    assert row(bench, "prefix").pill.text() == "off"
    assert row(bench, "prefix").pill.property("tone") == "plain"
    assert row(bench, "weights").pill.property("tone") == "on"
    assert "off" in PLAIN_VALUES


def test_a_dead_engine_takes_the_pending_back(bench, qtbot):
    bench.load()
    click(qtbot, bench, "prefix")
    bench.bridge.engine_failed.emit(EngineError("The engine stopped. Load the model again."))
    state = bench.dock.board.state("prefix")
    assert state.pending is None
    assert state.is_refusal
    assert row(bench, "prefix").status.text().startswith("The engine stopped")


def test_a_change_made_elsewhere_is_shown_too(bench):
    bench.load()
    bench.bridge.set_options({"max_batch": "4"})
    bench.steps()
    assert row(bench, "max_batch").pill.text() == "4"


def test_effects_speak_of_this_machine(bench):
    bench.load()
    for _ in range(3):
        bench.chat("word " * 60)
    bench.steps(30)
    bench.refresh()
    effects = {key: shown.effect.text() for key, shown in bench.dock.switches.rows.items()}
    assert effects["weights"] == "98 MB read per step"
    assert effects["batching"] == "3 chats share each read of 98 MB"
    assert effects["max_batch"] == "3 of up to 16 in the last step"
    assert effects["kv_cache"].startswith("23 KB kept per token")
    assert effects["paging"].startswith("18 of 512 pages held")
    assert effects["token_budget"].endswith("predicted")
    assert "ms" in effects["fused_ops"]


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("weights", "int4", "int4"),
        ("weights", "none", "weights full"),
        ("prefix", "off", "prefix sharing off"),
        ("kv_cache", "off", "KV cache off"),
        ("max_batch", "8", "batch limit 8"),
        ("batching", "fixed", "fixed groups"),
    ],
)
def test_mark_names(key, value, name):
    assert mark_name(entry(key), value) == name


def test_kinds_that_cost_something_say_so():
    assert KIND_WORDS[Kind.FREE] == "instant"
    assert KIND_WORDS[Kind.CACHE] == "recomputes running chats"
    assert KIND_WORDS[Kind.WEIGHTS] == "reloads weights"


def preset_menu(bench):
    menu = bench.dock.presets.make_menu()
    menu.deleteLater()
    return {action.text().split("\t")[0]: action for action in menu.actions()}


def test_a_preset_posts_one_command_with_all_that_differs(bench):
    bench.load()
    before = len(bench.asked())
    wanted = next(row for row in presets() if row.name == "small_memory")
    preset_menu(bench)[wanted.title].trigger()
    differing = {key: value for key, value in wanted.settings().items() if value != entry(key).default}
    assert bench.asked()[before:] == [differing]
    bench.steps()
    assert bench.dock.presets.pill.text() == wanted.title
    assert preset_menu(bench)[wanted.title].isChecked()
    assert all(bench.dock.board.state(key).value == value for key, value in wanted.settings().items())


def test_a_setting_of_ones_own_is_named_so_and_a_preset_leaves_nothing_of_it(bench, qtbot):
    bench.load()
    click(qtbot, bench, "prefix")
    bench.steps()
    assert bench.dock.presets.pill.text() == "own"
    preset_menu(bench)["Latency"].trigger()
    bench.steps()
    assert bench.dock.board.state("prefix").value == "on"
    assert bench.dock.presets.pill.text() == "Latency"


def test_a_preset_leaves_out_what_cannot_be_used_here(qtbot):
    bench = DockBench(qtbot, Script(unavailable={"max_batch": {"4": "Too many."}}))
    bench.load()
    preset_menu(bench)["Small memory"].trigger()
    assert "token_budget" in bench.asked()[-1]
    assert "max_batch" not in bench.asked()[-1]
    bench.close()


def test_without_a_model_presets_cannot_be_chosen(bench):
    assert not bench.dock.presets.pill.isEnabled()
    preset_menu(bench)["Throughput"].trigger()
    assert bench.services == []  # nothing was asked of an engine


def test_what_a_preset_has_to_leave_out_is_named(qtbot):
    bench = DockBench(qtbot, Script(unavailable={"max_batch": {"4": "Too many."}}))
    bench.load()
    preset_menu(bench)["Small memory"].trigger()
    assert bench.dock.presets.status.text() == "Small memory, without Batch limit 4: Too many."
    preset_menu(bench)["Throughput"].trigger()
    assert bench.dock.presets.status.text() == ""
    bench.close()


def test_the_best_setting_is_searched_for_said_kept_and_offered_again(bench):
    bench.load()
    assert "Best here" not in preset_menu(bench)
    said = []
    bench.bridge.model_loading.connect(lambda _: said.append(bench.dock.presets.status.text()))
    preset_menu(bench)[SEARCH].trigger()
    assert isinstance(bench.service.posted[-1], FindBest)
    assert bench.dock.presets.pill.text() == "searching …"
    bench.steps()
    assert said == ["Trying weights=int8, 50 %"]
    row = bench.dock.presets
    assert row.status.text() == "Best here: weights=int8: 1.31 times the speed of the defaults."
    assert row.pill.text() == "Best here"
    assert bench.dock.board.state("weights").value == "int8"
    assert "1.31 times" in preset_menu(bench)["Best here"].text()
    preset_menu(bench)["Throughput"].trigger()
    bench.steps()
    bench.load()  # as after a restart: it was kept
    preset_menu(bench)["Best here"].trigger()
    assert bench.asked()[-1] == {"weights": "int8"}


def test_a_best_setting_of_another_model_is_not_offered(bench):
    bench.load()
    preset_menu(bench)[SEARCH].trigger()
    bench.steps()
    bench.script.info = replace(bench.script.info, name="Another model")
    bench.load()
    assert "Best here" not in preset_menu(bench)


def test_a_search_can_be_stopped_and_is_refused_while_a_reply_runs(bench):
    bench.load()
    bench.chat()
    bench.steps(2)
    preset_menu(bench)[SEARCH].trigger()
    bench.steps()
    assert bench.dock.presets.status.text() == "A reply is being written."
    bench.load()  # ends the reply
    preset_menu(bench)[SEARCH].trigger()
    menu = bench.dock.presets.make_menu()
    assert [action.text() for action in menu.actions()] == ["Stop searching"]
    menu.actions()[0].trigger()
    menu.deleteLater()
    bench.steps()
    assert "stopped" in bench.dock.presets.status.text()
    assert bench.dock.presets.pill.text() != "searching …"
    assert bench.dock.board.state("weights").value == "int4"
