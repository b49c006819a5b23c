"""Dock: the tabs Live and Switches, the figures behind them, and the one timer that refreshes what is shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from PySide6.QtCore import QEvent, QObject, QSize, Qt, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import (
    QButtonGroup,
    QFrame,
    QHBoxLayout,
    QPushButton,
    QScrollArea,
    QStackedWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.bridge import EngineBridge
from app.icons import line_icon
from app.tuning.advice import what_runs, what_was_measured
from app.tuning.cards import TINY, Paragraph, stack
from app.tuning.draft_row import DraftRow
from app.tuning.drafts import Drafts, ListedModel
from app.tuning.figures import LiveFigures
from app.tuning.live import Chats, Live
from app.tuning.pace import Meter, Pace
from app.tuning.preset_row import PresetRow
from app.tuning.refresher import Refresher
from app.tuning.style import dock_stylesheet
from app.tuning.switch_board import SwitchBoard, mark_name
from app.tuning.switches import Switches, heading
from engine.events import DraftChanged, EngineError, Finished, ModelLoaded, ModelLoadFailed, OptionsApplied, StepRecord
from engine.options import entry

NARROWEST, WIDEST, USUAL = 320, 560, 372  # px
TABS_HEIGHT = 48  # px, as the window's top bar
IDLE = "This panel: idle, no refreshes"
PAGE_MAPS_PER_SECOND = 3.0
STATUS_SECONDS = 8.0  # what a finished change took is shown that long
SWITCH_WORDS_SECONDS = 2.0
MOST_PENDING = 2000  # records kept unfolded while hidden


class KeepsSettings(Protocol):
    """What the dock asks of the settings store: to remember the tab and the draft models."""

    @property
    def settings(self) -> Any: ...

    def update(self, **changes: Any) -> object: ...


class Dock(QWidget):
    """The instrument beside the chat. Owns the figures and the refresher; hidden, it only collects records.

    Signals:
        detach_requested: the dock wants its own window, or back from it: the button, or a double-click beside the tabs.
    """

    detach_requested = Signal()

    def __init__(
        self,
        bridge: EngineBridge,
        controller: Chats | None = None,
        settings: KeepsSettings | None = None,
        parent: QWidget | None = None,
        clock: Callable[[], float] = time.perf_counter,
        pace: Pace | None = None,
        list_models: Callable[[], Sequence[ListedModel]] = tuple,
    ) -> None:
        super().__init__(parent)
        self.setObjectName("dock")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setMinimumWidth(NARROWEST)
        self.setMaximumWidth(WIDEST)
        self._bridge, self._settings, self._clock = bridge, settings, clock
        self._pending: list[StepRecord] = []
        self._words_at = self._applied_at = float("-inf")
        self.figures = LiveFigures()
        self.meter = Meter(clock=clock)
        self._fold_meter = Meter(clock=clock)  # apart: it grows with the steps, not with the refreshes
        self.refresher = Refresher(self._refresh, self.meter, pace, clock, self)
        self.board = SwitchBoard(bridge, self.figures, self)
        self.live = Live(bridge, self.figures, self.meter, controller)
        self.drafts = Drafts(bridge, settings, list_models, self)
        self.quick_switches = self._make_switches()
        self.presets = PresetRow(self.board, bridge)
        self.switches = self._make_switches()
        self.cost = Paragraph(self.meter, TINY)
        self.cost.show_text(IDLE)
        self.cost.setToolTip("Processor time this panel takes, measured around its refreshes and its painting.")
        self.paths = Paragraph(self.meter)
        self.machine = Paragraph(self.meter)
        self._pages = QStackedWidget(self)
        self._tabs = QButtonGroup(self)
        self.detach_button = QToolButton(self)
        self.detach_button.setIconSize(QSize(16, 16))
        self.detach_button.clicked.connect(self.detach_requested)
        self.show_detached(False)
        self._lay_out()
        self._listen()
        self.setStyleSheet(dock_stylesheet(theme.current()))
        self.show_tab(self._last_tab())

    # ---- building

    def _make_switches(self) -> Switches:
        return Switches(self.board, self.meter, below={"speculation": DraftRow(self.drafts, self.meter)})

    def _lay_out(self) -> None:
        bar = QHBoxLayout()
        bar.setContentsMargins(20, 0, 12, 0)
        bar.setSpacing(18)
        live_page = stack(self.live, self.quick_switches)
        switches_page = stack(
            *(self.presets, self.switches, heading("What runs now"), self.paths),
            *(heading("What this machine was measured to do"), self.machine),
        )
        for title, page in (("Live", live_page), ("Switches", switches_page)):
            tab = QPushButton(title)
            tab.setProperty("look", "tab")
            tab.setCheckable(True)
            self._tabs.addButton(tab, self._pages.count())
            self._pages.addWidget(_scrolled(page))
            bar.addWidget(tab)
        bar.addStretch(1)
        bar.addWidget(self.detach_button)
        self._tabs.idClicked.connect(self._on_tab_clicked)
        tab_row = QWidget()
        tab_row.setFixedHeight(TABS_HEIGHT)
        tab_row.setLayout(bar)
        self._tab_row = tab_row
        tab_row.installEventFilter(self)
        foot = QHBoxLayout()
        foot.setContentsMargins(20, 4, 20, 6)
        foot.addWidget(self.cost)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        layout.addWidget(tab_row)
        layout.addWidget(_rule())
        layout.addWidget(self._pages, 1)
        layout.addWidget(_rule())
        layout.addLayout(foot)

    def show_detached(self, is_detached: bool) -> None:
        """Say what the button does now."""
        words = "Put the panel back (Ctrl+Shift+J)" if is_detached else "Panel in its own window (Ctrl+Shift+J)"
        self.detach_button.setToolTip(words)
        self.detach_button.setAccessibleName(words)
        self.detach_button.setIcon(line_icon("dock" if is_detached else "detach", theme.current().muted))
        self._is_detached = is_detached

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        if watched is self._tab_row and event.type() is QEvent.Type.MouseButtonDblClick:
            self.detach_requested.emit()
            return True
        return super().eventFilter(watched, event)

    def _listen(self) -> None:
        bridge = self._bridge
        bridge.steps_recorded.connect(self._on_steps)
        bridge.generation_requested.connect(self.figures.on_submitted)
        bridge.generation_finished.connect(self._on_finished)
        bridge.model_loaded.connect(self._on_loaded)
        bridge.model_load_failed.connect(self._on_load_failed)
        bridge.draft_changed.connect(self._on_draft_changed)
        bridge.engine_failed.connect(self._on_engine_failed)
        self.board.switches_applied.connect(self._on_applied)
        self.refresher.refreshed.connect(self._on_refreshed)
        self.refresher.fell_idle.connect(self._on_idle)
        theme.notifier().theme_changed.connect(self._on_theme_changed)

    def _last_tab(self) -> int:
        last = getattr(self._settings.settings, "dock_tab", 0) if self._settings is not None else 0
        return last if isinstance(last, int) and 0 <= last < self._pages.count() else 0

    def sizeHint(self) -> QSize:  # noqa: N802
        return QSize(USUAL, 800)

    def _on_tab_clicked(self, index: int) -> None:
        self.show_tab(index)
        if self._settings is not None:
            self._settings.update(dock_tab=index)

    def show_tab(self, index: int) -> None:
        """0 Live, 1 Switches."""
        self._tabs.button(index).setChecked(True)
        self._pages.setCurrentIndex(index)
        self._watch()
        self._words_at = float("-inf")
        self.refresher.refresh_now()

    # ---- shown and hidden

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        super().showEvent(event)
        self._fold()
        self.refresher.set_shown(True)
        self._watch()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        super().hideEvent(event)
        self.refresher.set_shown(False)
        self._watch()

    def _watch(self) -> None:
        """Ask for page maps only while somebody can see them."""
        if self.board.has_model:
            is_seen = self.isVisible() and self._pages.currentIndex() == 0
            self._bridge.watch_pages(PAGE_MAPS_PER_SECOND if is_seen else 0.0)

    # ---- what the engine says

    def _on_steps(self, records: list[StepRecord]) -> None:
        self._pending.extend(records)
        if self.isVisible() or len(self._pending) > MOST_PENDING:
            self._fold()
        self.refresher.note_work()

    def _fold(self) -> None:
        with self._fold_meter:
            pending, self._pending = self._pending, []
            self.figures.fold(pending)
            self.board.consequences.fold(pending)

    def _on_finished(self, finished: Finished) -> None:
        self._fold()
        self.figures.on_finished(finished)

    def _on_loaded(self, loaded: ModelLoaded) -> None:
        self._fold()
        self.figures.on_model(loaded.info)
        self.board.consequences.on_model()
        self.live.forget_map()
        self._watch()
        self._say_at_once()

    def _on_load_failed(self, failed: ModelLoadFailed) -> None:
        if not failed.kept:
            self.figures.on_model(None)
            self.board.consequences.on_model()
        self._say_at_once()

    def _on_draft_changed(self, changed: DraftChanged) -> None:
        self._fold()
        self.figures.on_switched(self._clock(), (), changed.info)
        self._say_at_once()

    def _on_engine_failed(self, error: EngineError) -> None:
        self._say_at_once()

    def _on_applied(self, applied: OptionsApplied) -> None:
        self._fold()
        names = [mark_name(entry(key), applied.options[key]) for key in applied.changed]
        self.figures.on_switched(self._clock(), names, applied.info)
        self.board.consequences.on_switched(applied.changed)
        self._applied_at = self._clock()
        self._say_at_once()

    def _say_at_once(self) -> None:
        if self.isVisible():
            self._fold()
            self.live.refresh_words(self._clock())
            self.quick_switches.refresh()
            self._refresh_switches_page()

    # ---- refreshing

    def _refresh(self, now: float) -> None:
        if self._pages.currentIndex() == 0:
            self.live.refresh(now)
            self.refresher.pace.useful_hz = 1.0 / self.live.rate_plot.seconds_per_pixel
        if now - self._words_at >= SWITCH_WORDS_SECONDS:
            self._words_at = now
            if now - self._applied_at > STATUS_SECONDS:
                self.board.clear_old_statuses()
            if self._pages.currentIndex() == 0:
                self.quick_switches.refresh()
            else:
                self._refresh_switches_page()

    def _refresh_switches_page(self) -> None:
        self.switches.refresh()
        self.paths.show_text(what_runs(self.figures))
        self.machine.show_text(what_was_measured(self.figures.info))

    def _on_refreshed(self, share_of_core: float) -> None:
        self._fold_meter.take()
        share = 100 * (share_of_core + self._fold_meter.share_of_core())
        hz = self.refresher.pace.hz
        words = f"This panel: {share:.1f} % of one core, {hz:.0f} refreshes/s"
        if self._clock() - self._words_at < 0.05:
            self.cost.show_text(words)

    def _on_idle(self) -> None:
        self.live.refresh_words(self._clock())
        self.cost.show_text(IDLE)

    def _on_theme_changed(self, colours: theme.Theme) -> None:
        self.setStyleSheet(dock_stylesheet(colours))
        self.live.restyle()
        self.show_detached(self._is_detached)

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange and self.isVisible():
            self.live.restyle()


def _scrolled(layout: QVBoxLayout) -> QScrollArea:
    """A page that scrolls up and down when it is taller than the dock."""
    page = QWidget()
    page.setObjectName("dockPage")
    outer = QVBoxLayout(page)
    outer.setContentsMargins(20, 14, 20, 14)
    outer.addLayout(layout)
    outer.addStretch(1)
    area = QScrollArea()
    area.setObjectName("dockScroll")
    area.setFrameShape(QFrame.Shape.NoFrame)
    area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    area.setWidgetResizable(True)
    area.setWidget(page)
    return area


def _rule() -> QFrame:
    rule = QFrame()
    rule.setObjectName("rule")
    return rule
