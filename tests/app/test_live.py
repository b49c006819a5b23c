"""The Live tab: records drive what is shown, only what changed is drawn, nothing happens while hidden."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication

from app import theme
from app.tuning.dock import IDLE, NARROWEST, WIDEST, Dock
from app.tuning.raster import pixel
from engine.commands import WatchPages
from engine.events import EngineError, ModelLoadFailed
from tests.app.dock_bench import DockBench, FakeSettings
from tests.app.scripted_service import Script


@pytest.fixture
def bench(qtbot):
    bench = DockBench(qtbot)
    yield bench
    bench.close()


@pytest.fixture
def shown(bench, qtbot):
    bench.dock.show()
    qtbot.waitExposed(bench.dock)
    return bench


def colours_in(plot) -> set[int]:
    return set(plot._raster.pixels.flatten().tolist())


def test_records_drive_the_numbers(shown):
    shown.load()
    shown.script.step_seconds = 0.02
    for _ in range(3):
        shown.chat()
    shown.steps(60)
    shown.refresh(0.5)
    live = shown.dock.live
    assert (live.rate.number, live.rate.unit) == ("150", "/s")
    assert live.batch.number == "3"
    assert (live.first_token.number, live.first_token.unit) != ("–", "")
    means = shown.dock.figures.now(shown.now).bandwidth_share
    assert live.bandwidth.number == f"{means * 100:.0f}"
    assert live.context.value.startswith("63 of 8,192")
    assert "98 MB weights, " in live.memory.value
    assert "of 189 MB KV" in live.memory.value
    assert "24 MB scratch of the largest step" in live.memory.toolTip()
    assert "311 MB in all" in live.memory.toolTip()
    assert live.process_memory.value.endswith(("MB", "GB"))
    assert not live.rate.is_past
    assert "Reading weights takes" in live.advice.text


def test_idle_figures_are_shown_as_past(shown):
    shown.load()
    shown.chat(max_tokens=20)
    shown.steps(30)
    shown.refresh(0.5)
    number = shown.dock.live.rate.number
    shown.refresh(10.0)
    assert shown.dock.live.rate.is_past
    assert shown.dock.live.rate.number == number
    assert shown.dock.live.batch.number == "0"


def test_before_anything_ran_there_are_dashes_and_a_word(shown):
    assert shown.dock.live.rate.number == "–"
    assert "Load a model" in shown.dock.live.advice.text or shown.dock.live.advice.text == ""
    shown.refresh()
    assert "Load a model" in shown.dock.live.advice.text
    shown.load()
    assert "is ready" in shown.dock.live.advice.text


def test_plots_show_memory_compute_and_overhead(shown):
    shown.load()
    shown.chat("word " * 400)
    shown.steps(200)
    shown.refresh()
    colours = theme.current()
    seen = colours_in(shown.dock.live.step_plot)
    assert {pixel(colours.memory), pixel(colours.compute), pixel(colours.overhead)} <= seen
    assert pixel(colours.accent) in colours_in(shown.dock.live.rate_plot)


def test_prefill_and_decode_stand_in_different_lanes(shown):
    shown.load()
    shown.script.step_seconds = 0.4
    shown.chat("word " * 400)
    shown.steps(1)
    shown.refresh(0.2)
    plot = shown.dock.live.step_plot
    foot = int(plot.PREFILL_SHARE * plot._raster.height)
    ground = {pixel(theme.current().memory), pixel(theme.current().compute)}
    assert ground & set(plot._raster.pixels[:foot].flatten().tolist())
    assert not ground & set(plot._raster.pixels[foot + 8 :].flatten().tolist())


def test_a_plot_is_drawn_again_only_when_time_moves_by_a_pixel(shown):
    shown.load()
    shown.chat()
    shown.steps(20)
    plot = shown.dock.live.rate_plot
    shown.refresh(0.0)
    drawn = plot.num_drawn
    shown.refresh(0.0)
    shown.refresh(plot.seconds_per_pixel / 1000)
    assert plot.num_drawn - drawn <= 1
    shown.refresh(plot.seconds_per_pixel * 1.5)
    assert plot.num_drawn > drawn


def test_a_flip_leaves_its_name_in_the_plots(shown):
    shown.load(weights="none")
    shown.chat()
    shown.steps(20)
    shown.dock.board.choose("weights", "int4")
    shown.dock.board.choose("prefix", "off")
    shown.steps(3)
    assert [mark.name for mark in shown.dock.figures.marks] == ["int4", "prefix sharing off"]


def test_hidden_dock_collects_but_does_not_refresh(bench, qtbot):
    bench.load()
    bench.chat()
    bench.steps(50)
    qtbot.wait(150)
    assert bench.dock.refresher.num_refreshes == 0
    assert not bench.dock.refresher.is_running
    bench.dock.show()
    qtbot.waitExposed(bench.dock)
    assert bench.dock.refresher.num_refreshes >= 1
    assert bench.dock.live.rate.number != "–"
    bench.dock.hide()
    refreshes = bench.dock.refresher.num_refreshes
    bench.steps(50)
    qtbot.wait(150)
    assert bench.dock.refresher.num_refreshes == refreshes


def test_a_dock_hidden_for_long_keeps_few_records(bench):
    bench.script.reply_tokens = 5000
    bench.load()
    bench.chat()
    for _ in range(5):
        bench.steps(600)
    assert len(bench.dock._pending) <= 2600


def test_page_maps_are_asked_for_only_while_seen(bench, qtbot):
    bench.load()
    assert [c.per_second for c in bench.service.posted if isinstance(c, WatchPages)][-1:] in ([], [0.0])
    bench.dock.show()
    qtbot.waitExposed(bench.dock)
    watching = [c.per_second for c in bench.service.posted if isinstance(c, WatchPages)]
    assert watching[-1] > 0
    bench.dock.show_tab(1)
    assert [c.per_second for c in bench.service.posted if isinstance(c, WatchPages)][-1] == 0
    bench.dock.show_tab(0)
    bench.dock.hide()
    assert [c.per_second for c in bench.service.posted if isinstance(c, WatchPages)][-1] == 0


def test_showing_the_dock_without_a_model_starts_no_engine(shown):
    assert shown.services == []


def test_the_map_shows_the_chats_pages(shown):
    shown.load()
    shown.chat("word " * 64)
    shown.steps(60)
    shown.refresh()
    assert "held" in shown.dock.live.map_heading.note
    assert shown.dock.live.page_map.words_for(1) == "Page 1: held by “Chat 1”"


def test_the_dock_has_one_timer_and_says_what_it_costs(shown, qtbot):
    shown.load()
    assert [timer.objectName() for timer in shown.dock.findChildren(QTimer) if timer.objectName()] == ["tuning.refresh"]
    shown.chat()
    shown.steps(10)
    shown.dock.refresher.note_work()
    with qtbot.waitSignal(shown.dock.refresher.refreshed):
        shown.now += 2.1
    assert "% of one core, " in shown.dock.cost.text()


def test_width_is_limited(bench):
    assert bench.dock.minimumWidth() == NARROWEST == 320
    assert bench.dock.maximumWidth() == WIDEST == 560
    assert bench.dock.live.minimumSizeHint().width() <= NARROWEST - 40 - 11


@pytest.mark.parametrize(("kept", "shown"), [(1, 1), (0, 0), (7, 0), ("Live", 0), (None, 0)])
def test_the_tab_is_remembered(qtbot, bench, kept, shown):
    dock = Dock(bench.bridge, None, FakeSettings(kept))
    qtbot.addWidget(dock)
    assert dock._pages.currentIndex() == shown
    dock._tabs.button(1 - shown).click()
    assert dock._settings.settings.dock_tab == 1 - shown


def test_theme_change_restyles(shown, qapp):
    shown.load()
    theme.apply(QApplication.instance(), "light")
    shown.refresh()
    light = shown.dock.live.rate_plot._raster.pixels[30, 100]
    theme.apply(QApplication.instance(), "dark")
    shown.refresh()
    assert shown.dock.live.rate_plot._raster.pixels[30, 100] != light
    assert shown.dock.live.rate_plot._raster.pixels[30, 100] == pixel(theme.DARK.panel)


def test_a_failed_load_clears_the_figures(shown):
    shown.load()
    shown.chat(max_tokens=30)
    shown.steps(40)
    shown.bridge.model_load_failed.emit(ModelLoadFailed("x.gguf", "not a model"))
    shown.refresh()
    assert shown.dock.live.rate.number == "–"
    assert "Load a model" in shown.dock.live.advice.text


def test_an_engine_error_does_not_stop_the_panel(shown):
    shown.load()
    shown.chat()
    shown.steps(5)
    shown.bridge.engine_failed.emit(EngineError("something"))
    shown.steps(5)
    shown.refresh(0.5)
    assert shown.dock.live.rate.number != "–"


def test_an_idle_script_is_no_work(qtbot):
    bench = DockBench(qtbot, Script(reply_tokens=5))
    bench.dock.show()
    bench.load()
    assert not bench.dock.refresher.is_running
    bench.chat()
    bench.steps(10)
    assert bench.dock.refresher.is_running
    bench.now += 100
    qtbot.waitUntil(lambda: not bench.dock.refresher.is_running, timeout=3000)
    assert bench.dock.cost.text() == IDLE
    bench.close()
