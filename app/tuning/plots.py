"""The three time plots: tokens per second, time per step, KV pages. They share one time axis and one way of drawing.

A plot keeps one image. Grid and ground are cached and copied, curves are drawn by array operations (`Raster`), and a
plot is drawn again only when the time axis has moved by a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFontMetricsF, QImage, QPainter, QPaintEvent, QPen, QPixmap, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app import theme
from app.tuning import figures as fig
from app.tuning import numbers
from app.tuning.cards import TINY, font
from app.tuning.figures import LiveFigures
from app.tuning.pace import Meter
from app.tuning.raster import Floats, Raster, blend, pixel, ramp
from app.tuning.series import BUCKET_SECONDS, Scale, TimeRing

SPAN_SECONDS = 60.0
RULES_SECONDS = (15, 30, 45)


class TimePlot(QWidget):
    """One minute of something, newest at the right. Subclasses draw the data and name the levels of their grid."""

    def __init__(self, source: LiveFigures, meter: Meter, height: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.num_drawn = 0  # how often the data was drawn; tests count it
        self._source = source
        self._meter = meter
        self._now = 0.0
        self._moment: int | None = None  # the time axis in whole pixels
        self._raster = Raster(1, 1)
        self._image = QImage()
        self._overlay = QPixmap()
        self._ground_is_stale = True
        self._was_empty = True
        self.setFixedHeight(height)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)

    # ---- for subclasses

    def levels(self) -> Sequence[tuple[float, str]]:
        """(y as a share of the height from above, label) of each rule of the grid."""
        raise NotImplementedError

    def fit(self, now: float) -> bool:
        """Adapt the scales to what is in view; True when the grid must be drawn again."""
        raise NotImplementedError

    def draw(self, raster: Raster, times: Floats) -> None:
        """Draw the data; ``times`` [width] is the moment each column stands for."""
        raise NotImplementedError

    def shows_mark_names(self) -> bool:
        return False

    # ---- refreshing

    @property
    def seconds_per_pixel(self) -> float:
        return SPAN_SECONDS / max(1, self._raster.width)

    def refresh(self, now: float) -> None:
        """Draw up to ``now``, unless not even a pixel would differ."""
        self._ensure_raster()
        moment = math.floor(now / self.seconds_per_pixel)
        if moment == self._moment and not self._ground_is_stale:
            return
        self._moment, self._now = moment, now
        is_empty = self._source.last is None
        if is_empty != self._was_empty:
            self._was_empty, self._ground_is_stale = is_empty, True
        if self.fit(now) or self._ground_is_stale:
            self._draw_ground()
        self._draw_all()
        self.update()

    def restyle(self) -> None:
        self._ground_is_stale = True
        self.refresh(self._now)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        with self._meter:
            if self._image.isNull() or self._ground_is_stale:
                self.refresh(self._now)
            painter = QPainter(self)
            painter.drawImage(0, 0, self._image)
            painter.end()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        super().resizeEvent(event)
        self._ground_is_stale = True

    def sizeHint(self) -> QSize:  # noqa: N802
        return QSize(280, self.height())

    # ---- drawing

    def _ensure_raster(self) -> None:
        ratio = self.devicePixelRatioF()
        width, height = max(1, math.ceil(self.width() * ratio)), max(1, math.ceil(self.height() * ratio))
        if (width, height) == (self._raster.width, self._raster.height) and self._image.devicePixelRatio() == ratio:
            return
        self._raster = Raster(width, height)
        self._image = _image_over(self._raster, ratio)
        self._ground_is_stale = True

    def _draw_ground(self) -> None:
        """Ground and grid, once; labels into an overlay, since they stand on top of the data."""
        colours = theme.current()
        raster, ratio = self._raster, self._image.devicePixelRatio()
        raster.background[:] = pixel(colours.panel)
        faint = pixel(blend(colours.line, colours.panel, 0.6))
        for seconds in RULES_SECONDS:
            raster.background[:, round(raster.width * (1 - seconds / SPAN_SECONDS))] = faint
        self._overlay = QPixmap(raster.width, raster.height)
        self._overlay.setDevicePixelRatio(ratio)
        self._overlay.fill(Qt.GlobalColor.transparent)
        painter = QPainter(self._overlay)
        painter.setFont(font(TINY))
        for share, label in self.levels():
            row = min(raster.height - 1, round(share * (raster.height - 1)))
            raster.background[row] = pixel(colours.line)
            if label and not self._was_empty:  # levels of nothing mean nothing
                self._draw_label(painter, label, row / ratio)
        painter.end()
        self._ground_is_stale = False

    def _draw_label(self, painter: QPainter, label: str, y: float) -> None:
        """A level's label just under its rule, on a wash of the ground so that it can be read over data."""
        colours = theme.current()
        metrics = QFontMetricsF(painter.font())
        box = QRectF(2, y + 1, metrics.horizontalAdvance(label) + 2, metrics.height())
        wash = QColor(colours.panel)
        wash.setAlphaF(0.72)
        painter.fillRect(box.adjusted(-2, 0, 3, 0), wash)
        painter.setPen(QColor(colours.muted))
        painter.drawText(box, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, label)

    def _draw_all(self) -> None:
        self.num_drawn += 1
        raster = self._raster
        raster.clear()
        assert self._moment is not None
        newest = (self._moment + 1) * self.seconds_per_pixel
        steps_back = np.arange(raster.width, 0, -1, dtype=np.float64) - 0.5
        times: Floats = newest - steps_back * self.seconds_per_pixel
        self.draw(raster, times)
        painter = QPainter(self._image)
        painter.drawPixmap(0, 0, self._overlay)
        self._draw_marks(painter, newest)
        painter.end()

    def _draw_marks(self, painter: QPainter, newest: float) -> None:
        shown = [mark for mark in self._source.marks if mark.time > newest - SPAN_SECONDS]
        if not shown:
            return
        colours = theme.current()
        painter.setPen(QPen(QColor(colours.text), 1.0, Qt.PenStyle.DotLine))
        places = [self.width() * (1 - (newest - mark.time) / SPAN_SECONDS) for mark in shown]
        for x in places:
            painter.drawLine(QPointF(x, 0), QPointF(x, self.height()))
        if self.shows_mark_names():
            self._draw_mark_names(painter, [mark.name for mark in shown], places)

    def _draw_mark_names(self, painter: QPainter, names: Sequence[str], places: Sequence[float]) -> None:
        """Names beside their lines, at the foot; one that would run into the last goes a row higher."""
        painter.setFont(font(TINY))
        metrics = painter.fontMetrics()
        taken: list[float] = []  # right end of the last name in each row from below
        for name, x in zip(names, places, strict=True):
            width = metrics.horizontalAdvance(name) + 4.0
            left = x + 3 if x + 3 + width <= self.width() else x - 2 - width
            row = next((i for i, end in enumerate(taken) if end < left), len(taken))
            taken[row : row + 1] = [left + width]
            box = QRectF(left, self.height() - (row + 1) * (metrics.height() + 1), width, metrics.height())
            wash = QColor(theme.current().panel)
            wash.setAlphaF(0.72)
            painter.fillRect(box, wash)
            painter.setPen(QColor(theme.current().text))
            painter.drawText(box, Qt.AlignmentFlag.AlignCenter, name)


def _image_over(raster: Raster, ratio: float) -> QImage:
    """A QImage that shows the raster's own memory."""
    image = QImage(
        raster.pixels.data, raster.width, raster.height, raster.width * 4, QImage.Format.Format_RGB32
    )  # fmt: skip
    image.setDevicePixelRatio(ratio)
    return image


def _merged(data: Floats, merge: int) -> Floats:
    """Sums over groups of ``merge`` neighbouring buckets; NaN counts as nothing unless the whole group is NaN."""
    groups = data.reshape(data.shape[0], -1, merge)
    sums: Floats = np.nansum(groups, axis=2)
    sums[np.isnan(groups).all(axis=2)] = np.nan
    return sums


def _columns(source: TimeRing, times: Floats, bar_seconds: float, hold: bool = False) -> tuple[Floats, Floats]:
    """(values [channels, width], place in the bar [width], 0 to 1): each column's bar of ``bar_seconds``."""
    merge = max(1, round(bar_seconds / BUCKET_SECONDS))
    bar = merge * source.bucket_seconds
    numbers_ = np.floor(times / bar).astype(np.int64)
    first, last = int(numbers_[0]), int(numbers_[-1])
    data = source.window(last * merge + merge - 1, (last - first + 1) * merge, hold)
    values = data[:, merge - 1 :: merge] if hold else _merged(data, merge)
    return values[:, numbers_ - first], times / bar - numbers_


class RatePlot(TimePlot):
    """Tokens per second: accepted tokens over decode seconds, per quarter of a second. Pauses are gaps."""

    BAR_SECONDS = 0.25

    def __init__(self, source: LiveFigures, meter: Meter, parent: QWidget | None = None) -> None:
        super().__init__(source, meter, 76, parent)
        self.scale = Scale(smallest=10.0)

    def levels(self) -> Sequence[tuple[float, str]]:
        top = self.scale.top
        return [(0.0, numbers.rate(top)), (0.5, numbers.rate(top / 2)), (1.0, "")]

    def fit(self, now: float) -> bool:
        count = round(SPAN_SECONDS / BUCKET_SECONDS)
        data = self._source.steps.window(self._source.steps.bucket_of(now), count)
        rates = _divided(data[fig.TOKENS], data[fig.DECODING])
        # a slice in which a step just began or ended may say too much; the scale follows the bulk
        largest = float(np.nanquantile(rates, 0.99)) if not np.isnan(rates).all() else math.nan
        return self.scale.fit(largest, now)

    def draw(self, raster: Raster, times: Floats) -> None:
        values, _ = _columns(self._source.steps, times, self.BAR_SECONDS)
        rates = _divided(values[fig.TOKENS], values[fig.DECODING])
        colours = theme.current()
        y = raster.height - 1 - np.minimum(rates / self.scale.top, 1.0) * (raster.height - 2)
        wash = blend(colours.accent, colours.panel, 0.16)
        raster.fill(y, np.where(np.isnan(y), np.nan, raster.height), pixel(wash))
        raster.line(y, 1.5 * self.devicePixelRatioF(), ramp(colours.accent, wash))

    def shows_mark_names(self) -> bool:
        return True


class StepTimePlot(TimePlot):
    """Milliseconds per step in two lanes: steps that prefill above, decode steps below, each with its own scale.

    A bar's height is the measured step: memory or compute (predicted, whichever is longer) from the foot, overhead on
    top; the shorter of the two runs beside the longer one and is drawn as a line inside it.
    """

    BAR_SECONDS = 0.5
    PREFILL_SHARE = 0.36  # of the height
    GAP = 4  # px between the lanes

    def __init__(self, source: LiveFigures, meter: Meter, parent: QWidget | None = None) -> None:
        super().__init__(source, meter, 104, parent)
        self.decode_scale = Scale(smallest=0.001)
        self.prefill_scale = Scale(smallest=0.001)

    def levels(self) -> Sequence[tuple[float, str]]:
        foot = self.PREFILL_SHARE
        head = foot + self.GAP / self.height()
        prefill, decode = self.prefill_scale.top, self.decode_scale.top
        return [
            (0.0, f"{numbers.milliseconds(prefill)} ms, prefill"),
            (foot, ""),
            (head, f"{numbers.milliseconds(decode)} ms, decode"),
            ((1 + head) / 2, ""),
            (1.0, ""),
        ]

    def fit(self, now: float) -> bool:
        ring = self._source.steps
        data = ring.window(ring.bucket_of(now), round(SPAN_SECONDS / BUCKET_SECONDS))
        changed = False
        for lane, scale in ((fig.DECODE_LANE, self.decode_scale), (fig.PREFILL_LANE, self.prefill_scale)):
            means = _divided(data[lane + fig.STEP], data[lane + fig.STEPS])
            if not np.isnan(means).all():
                quantile = 0.98 if lane == fig.DECODE_LANE else 1.0
                changed |= scale.fit(float(np.nanquantile(means, quantile)), now)
        return changed

    def draw(self, raster: Raster, times: Floats) -> None:
        values, place = _columns(self._source.steps, times, self.BAR_SECONDS)
        ratio = self.devicePixelRatioF()
        gap = self.seconds_per_pixel * max(1.0, round(ratio)) / self.BAR_SECONDS
        values[:, place < gap] = np.nan
        foot = self.PREFILL_SHARE * (raster.height - 1)
        self._draw_lane(raster, values, fig.PREFILL_LANE, 0.0, foot, self.prefill_scale.top)
        head = foot + self.GAP * ratio
        self._draw_lane(raster, values, fig.DECODE_LANE, head, raster.height - 1.0, self.decode_scale.top)

    def _draw_lane(self, raster: Raster, values: Floats, lane: int, head: float, foot: float, top: float) -> None:
        steps = values[lane + fig.STEPS]
        per_pixel = (foot - head) / top

        def height(channel: int) -> Floats:
            heights = _divided(values[lane + channel], steps) * per_pixel
            return np.minimum(heights, foot - head)

        colours = theme.current()
        step, memory, compute = height(fig.STEP), height(fig.MEMORY), height(fig.COMPUTE)
        longer = np.fmin(np.fmax(memory, compute), step)
        bottom = np.where(np.isnan(step), np.nan, foot)
        raster.fill(foot - step, foot - longer, pixel(colours.overhead))
        is_memory = memory >= compute
        line = max(1.0, round(1.5 * self.devicePixelRatioF()))
        for first, wins, colour in ((memory, is_memory, colours.memory), (compute, ~is_memory, colours.compute)):
            raster.fill(np.where(wins, foot - longer, np.nan), bottom, pixel(colour))
            inside = np.where(wins, np.nan, foot - np.fmin(first, longer))
            raster.fill(inside, inside + line, pixel(colour))


class PagesPlot(TimePlot):
    """KV pages over time, stacked: held by one chat, shared, cached; the rest of the height is free."""

    BAR_SECONDS = 0.25

    def __init__(self, source: LiveFigures, meter: Meter, parent: QWidget | None = None) -> None:
        super().__init__(source, meter, 46, parent)
        self._total = 0.0

    def levels(self) -> Sequence[tuple[float, str]]:
        return [(0.0, f"{self._total:,.0f} pages" if self._total else ""), (1.0, "")]

    def fit(self, now: float) -> bool:
        pool = self._source.last.pool if self._source.last else None
        total = float(pool.total) if pool else 0.0
        changed, self._total = total != self._total, total
        return changed

    def draw(self, raster: Raster, times: Floats) -> None:
        last = self._source.last
        if last is None or self._total <= 0:
            return
        values, _ = _columns(self._source.pages, times, self.BAR_SECONDS, hold=True)
        values[:, times > self._now + self.seconds_per_pixel] = np.nan
        scale = (raster.height - 1) / np.fmax(values[fig.TOTAL], 1.0)
        foot = raster.height - 1.0
        used, shared, cached = (values[channel] * scale for channel in (fig.USED, fig.SHARED, fig.CACHED))
        stranded = values[fig.STRANDED] * scale
        colours = theme.current()
        edge = np.where(np.isnan(used), np.nan, foot)
        for part, colour in (
            (used - shared - stranded, pixel(page_colour("held"))),
            (shared, pixel(page_colour("shared"))),
            (stranded, pixel(colours.attention)),
            (cached, pixel(page_colour("cached"))),
        ):
            # a page or two among hundreds still shows as a line
            top = edge - np.where(part > 0, np.maximum(part, 1.0), 0.0)
            raster.fill(top, edge, colour)
            edge = top


def page_colour(kind: str) -> str:
    """What pages look like where no chat owns the colour: held, shared, cached, free."""
    colours = theme.current()
    return {
        "held": colours.memory,
        "shared": colours.chats[1],
        "cached": blend(colours.overhead, colours.panel, 0.55),
        "free": blend(colours.line, colours.panel, 0.75),
    }[kind]


def _divided(numerator: Floats, denominator: Floats) -> Floats:
    """Quotient where the denominator is positive, NaN elsewhere."""
    quotient = np.full(numerator.shape, np.nan)
    np.divide(numerator, denominator, out=quotient, where=denominator > 1e-9)
    return quotient
