"""VerdictLabel: the product in one line, for the top bar. "Decode waits for memory: 84 % of each step"."""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetricsF, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app import theme
from app.bridge import EngineBridge
from app.tuning.advice import HOW_PREDICTED, Verdict, verdict
from app.tuning.figures import LiveFigures
from app.tuning.numbers import percent
from engine.events import Finished, ModelLoaded, ModelLoadFailed, OptionsApplied, StepRecord

REFRESH_SECONDS = 0.5  # a line of text that changes more often cannot be read
DOT, GAP = 9, 8  # px
WIDEST_FIGURE = "100 %"  # the place of the words must not hang on the figure
LIMIT_WORDS = {"memory": "Memory", "compute": "Arithmetic", "overhead": "Overhead"}
Parts = tuple[tuple[str, bool], ...]  # (text, is it the figure) in reading order


class VerdictLabel(QWidget):
    """Which side of the ridge point this moment is on, and by how much. Needs no timer: records drive it."""

    def __init__(
        self, bridge: EngineBridge, parent: QWidget | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(parent)
        self._bridge, self._clock = bridge, clock
        self._figures = LiveFigures()
        self._verdict = verdict(self._figures, 0.0)
        self._refreshed_at = float("-inf")
        self.setObjectName("verdict")
        self.setToolTip(HOW_PREDICTED)
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        bridge.steps_recorded.connect(self._on_steps)
        bridge.generation_finished.connect(self._on_finished)
        bridge.model_loaded.connect(self._on_loaded)
        bridge.model_load_failed.connect(self._on_load_failed)
        bridge.options_applied.connect(self._on_applied)
        theme.notifier().theme_changed.connect(self._on_theme_changed)

    @property
    def verdict(self) -> Verdict:
        return self._verdict

    @property
    def text(self) -> str:
        return self._verdict.text

    def _on_steps(self, records: list[StepRecord]) -> None:
        self._figures.fold(records)
        if self._clock() - self._refreshed_at >= REFRESH_SECONDS:
            self._show(self._clock())

    def _on_finished(self, finished: Finished) -> None:
        self._figures.on_finished(finished)
        if not self._bridge.is_busy:
            self._show(float("inf"))  # all is past now

    def _on_loaded(self, loaded: ModelLoaded) -> None:
        self._figures.on_model(loaded.info)
        self._show(self._clock())

    def _on_load_failed(self, failed: ModelLoadFailed) -> None:
        if not failed.kept:
            self._figures.on_model(None)
            self._show(self._clock())

    def _on_applied(self, applied: OptionsApplied) -> None:
        self._figures.on_switched(self._clock(), (), applied.info)

    def _on_theme_changed(self, _theme: object) -> None:
        self.update()

    def _show(self, now: float) -> None:
        self._refreshed_at = self._clock()
        fresh = verdict(self._figures, now)
        if fresh == self._verdict:
            return
        # the place of the numbers must not tremble: only other words change the width
        if (fresh.lead, fresh.tail) != (self._verdict.lead, self._verdict.tail):
            self.updateGeometry()
        self._verdict = fresh
        self.setAccessibleName(fresh.text)
        self.update()

    # ---- drawing

    @property
    def shown_text(self) -> str:
        """What stands there at the present width: the whole, something shorter, or one word and the figure."""
        return "".join(text for text, _ in _forms(self._verdict)[self._form()])

    def _form(self) -> int:
        """Which form fits, whatever the figure: the longest that does."""
        room = self.width() - DOT - GAP
        widths = [_width(form) for form in _forms(self._verdict, WIDEST_FIGURE)]
        return next((index for index, width in enumerate(widths) if width <= room), len(widths) - 1)

    def sizeHint(self) -> QSize:  # noqa: N802
        return self._size_of(_forms(self._verdict, WIDEST_FIGURE)[0])

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Room for one word and the figure, in whatever font; a sentence without a figure may be cut."""
        least = QSize(120, 26)
        return (
            least
            if self._verdict.share is None
            else least.expandedTo(self._size_of(_forms(self._verdict, WIDEST_FIGURE)[-1]))
        )

    def _size_of(self, form: Parts) -> QSize:
        return QSize(round(DOT + GAP + _width(form)) + 4, 26)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        colours = theme.current()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        form = self._form()
        left = max(0.0, self.width() - DOT - GAP - _width(_forms(self._verdict, WIDEST_FIGURE)[form]))
        dot = {"memory": colours.memory, "compute": colours.compute, "overhead": colours.overhead}
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(dot.get(self._verdict.limit, colours.line)))
        painter.drawEllipse(QRectF(left, (self.height() - DOT) / 2, DOT, DOT))
        left += DOT + GAP
        for text, is_figure in _forms(self._verdict)[form]:
            painter.setFont(_font(is_figure))
            painter.setPen(QColor(colours.text if is_figure else colours.muted))
            metrics = QFontMetricsF(painter.font())
            shown = metrics.elidedText(text, Qt.TextElideMode.ElideRight, self.width() - left)
            painter.drawText(QRectF(left, 0, self.width() - left, self.height()), Qt.AlignmentFlag.AlignVCenter, shown)
            left += metrics.horizontalAdvance(text)
        painter.end()


def _forms(verdict: Verdict, figure: str = "") -> list[Parts]:
    """The verdict from its longest form to its shortest. figure: instead of its own."""
    if verdict.share is None:
        return [((verdict.lead, False),)]
    share = (figure or f"{percent(verdict.share)} %", True)
    lead, word = (f"{verdict.lead} ", False), (f"{LIMIT_WORDS[verdict.limit]} ", False)
    tails = ((f" {tail}", False) for tail in (verdict.tail, verdict.short_tail))
    return [*((lead, share, tail) if tail[0].strip() else (lead, share) for tail in tails), (word, share)]


def _width(parts: Parts) -> float:
    return sum(QFontMetricsF(_font(is_figure)).horizontalAdvance(text) for text, is_figure in parts)


def _font(is_figure: bool) -> QFont:
    return theme.font(weight=QFont.Weight.DemiBold if is_figure else QFont.Weight.Normal)
