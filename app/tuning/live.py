"""Live: the advice card, the big numbers, three plots on one time axis, and the page map."""

from __future__ import annotations

import time
from typing import Protocol

import psutil
from PySide6.QtWidgets import QHBoxLayout, QWidget

from app import theme
from app.bridge import EngineBridge
from app.tuning import numbers
from app.tuning.advice import HOW_PREDICTED, advice
from app.tuning.cards import AdviceCard, BigNumber, FactLine, PlotHeading, TimeAxis, stack
from app.tuning.figures import LiveFigures, Now
from app.tuning.pace import Meter
from app.tuning.page_map import PageMapView
from app.tuning.plots import PagesPlot, RatePlot, StepTimePlot, TimePlot, page_colour
from engine.events import MemoryUse, PageMap, PoolSnapshot

WORDS_SECONDS = 1.5  # sentences and facts change no more often than they can be read
NUMBERS_SECONDS = 0.2


class Chats(Protocol):
    """What Live asks of the chat controller: whose request it is, and how that chat is called and coloured."""

    def owner_of(self, request_id: int) -> str | None: ...

    def colour_index(self, chat_id: str) -> int: ...

    def title(self, chat_id: str) -> str: ...


class Live(QWidget):
    """Shows LiveFigures. ``refresh`` is called by the dock's Refresher; records only reach the figures before that."""

    def __init__(
        self,
        bridge: EngineBridge,
        figures: LiveFigures,
        meter: Meter,
        chats: Chats | None = None,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._figures, self._chats = figures, chats
        self._colour_indices: dict[int, int] = {}
        self._words_at = self._numbers_at = float("-inf")
        self._shown_until = 0.0
        self._latest_map: PageMap | None = None
        self._process = psutil.Process()
        self.advice = AdviceCard(meter, self)
        self.advice.setToolTip(HOW_PREDICTED)
        self.rate = BigNumber("tokens", meter)
        self.first_token = BigNumber("first token", meter)
        self.batch = BigNumber("in batch", meter)
        self.bandwidth = BigNumber("of bandwidth", meter)
        self.context = FactLine("Longest context", meter)
        self.memory = FactLine("Memory", meter)
        self.process_memory = FactLine("Memory of the whole process", meter)
        self.rate_plot = RatePlot(figures, meter)
        self.step_plot = StepTimePlot(figures, meter)
        self.pages_plot = PagesPlot(figures, meter)
        self.rate_heading = PlotHeading("Tokens per second", meter)
        self.step_heading = PlotHeading("Time per step", meter)
        self.pages_heading = PlotHeading("KV pages", meter)
        self.map_heading = PlotHeading("Page map", meter)
        self.axis = TimeAxis(meter)
        self.page_map = PageMapView(self._colour_of, self._name_of, meter)
        self._lay_out()
        self._explain()
        self._show_legends()
        bridge.pages_mapped.connect(self._on_pages_mapped)

    @property
    def plots(self) -> tuple[TimePlot, ...]:
        return (self.rate_plot, self.step_plot, self.pages_plot)

    def _lay_out(self) -> None:
        numbers_row = QHBoxLayout()
        numbers_row.setSpacing(6)
        for number, share in ((self.rate, 5), (self.first_token, 5), (self.batch, 4), (self.bandwidth, 5)):
            numbers_row.addWidget(number, share)
        layout = stack(self.advice)
        layout.addSpacing(10)
        layout.addLayout(numbers_row)
        layout.addWidget(self.context)
        layout.addWidget(self.memory)
        layout.addWidget(self.process_memory)
        layout.addSpacing(10)
        groups: tuple[tuple[QWidget, ...], ...] = (
            (self.rate_heading, self.rate_plot),
            (self.step_heading, self.step_plot),
            (self.pages_heading, self.pages_plot, self.axis),
            (self.map_heading, self.page_map),
        )
        for group in groups:
            layout.addLayout(stack(*group))
            layout.addSpacing(6)
        self.setLayout(layout)

    def _explain(self) -> None:
        self.rate.setToolTip(
            "Tokens of all replies over the seconds of the steps that decoded, the latest 2 s of them. "
            "Measured; the first token of a reply belongs to its prefill and is not counted."
        )
        self.first_token.setToolTip("From sending the latest message to its first generated token. Measured.")
        self.batch.setToolTip("Chats that shared the last step.")
        self.bandwidth.setToolTip(
            "Bytes moved per second of a decode step, as a share of the read bandwidth measured on this machine. "
            "The bytes are counted from the step's plan. It can pass 100 % when data comes from the processor's cache."
        )
        self.step_plot.setToolTip(
            f"{HOW_PREDICTED} A bar is the mean of half a second. Steps that read a prompt (alone or beside decoding "
            "chats) have a lane and a scale of their own, above."
        )
        self.pages_plot.setToolTip("KV pages over the last minute. The empty part is free.")

    def _show_legends(self) -> None:
        colours = theme.current()
        self.step_heading.show_legend(
            [(colours.memory, "memory"), (colours.compute, "compute"), (colours.overhead, "overhead")]
        )
        self.pages_heading.show_legend([(page_colour(kind), kind) for kind in ("held", "shared", "cached", "free")])

    # ---- refreshing

    def refresh(self, now: float) -> None:
        """Bring what is shown up to ``now`` (time.perf_counter()); each part at its own pace."""
        for plot in self.plots:
            plot.refresh(now)
        if self._latest_map is not None:
            self.page_map.show_map(self._latest_map)
            self._latest_map = None
        if now - self._numbers_at >= NUMBERS_SECONDS:
            self._numbers_at = self._shown_until = now
            figures = self._figures.now(now)
            self._show_numbers(figures)
            if now - self._words_at >= WORDS_SECONDS:
                self._words_at = now
                self._show_words(figures)

    def refresh_words(self, now: float) -> None:
        """Everything at once, whatever the pace: after a change the user waits for, and when work stops."""
        self._words_at = self._numbers_at = float("-inf")
        self.refresh(now)

    def _show_numbers(self, now: Now) -> None:
        self.rate.show_figure(numbers.rate(now.tokens_per_second), "/s", now.is_past)
        self.first_token.show_figure(*numbers.seconds(now.first_token_seconds), now.is_past)
        self.batch.show_figure(numbers.count(now.batch), f"+{now.waiting}" if now.waiting else "", now.is_past)
        self.bandwidth.show_figure(numbers.percent(now.bandwidth_share), "%", now.is_past)

    def _show_words(self, now: Now) -> None:
        info = self._figures.info
        self.advice.show_text(advice(self._figures))
        if info is not None and now.context_tokens is not None:
            self.context.show_value(f"{now.context_tokens:,} of {info.context_length:,} tokens")
        else:
            self.context.show_value(numbers.NONE)
        self.process_memory.show_value(numbers.data(self._process.memory_info().rss))
        parts = [f"{numbers.data(info.weight_bytes)} weights"] if info else []
        if info:
            self.memory.setToolTip(_memory_words(info.memory))
        if now.pool:
            parts.append(_kv_words(now.pool))
        self.memory.show_value(", ".join(parts) or numbers.NONE)
        self._show_notes(now)

    def _show_notes(self, now: Now) -> None:
        last = self._figures.last
        if now.is_past and last is not None:
            ago = time.perf_counter() - self._shown_until
            self.axis.show_last(time.strftime("%H:%M:%S", time.localtime(time.time() - ago)))
        else:
            self.axis.show_last("now")
        drafts = "" if now.acceptance is None else f", drafts accepted {numbers.percent(now.acceptance)} %"
        self.rate_heading.show_note("all chats, last 60 s" + drafts if last is not None else "")
        if now.pool is not None:
            pool = now.pool
            self.map_heading.show_note(
                f"{pool.used:,} of {pool.total:,} held, {pool.shared:,} shared, {pool.cached:,} cached"
            )

    def forget_map(self) -> None:
        """The pages of a model that is gone."""
        self._latest_map = None
        self.page_map.show_map(None)

    def restyle(self) -> None:
        self._show_legends()
        for plot in self.plots:
            plot.restyle()
        self.page_map.restyle()

    # ---- whose page it is

    def _on_pages_mapped(self, pages: PageMap) -> None:
        self._latest_map = pages  # painted with the next refresh

    def _colour_of(self, request_id: int) -> str:
        index = self._colour_indices.get(request_id)
        if index is None:
            chat = self._chats.owner_of(request_id) if self._chats else None
            index = request_id - 1
            if self._chats and chat is not None:
                index = self._colour_indices[request_id] = self._chats.colour_index(chat)
        colours = theme.current().chats
        return colours[index % len(colours)]

    def _name_of(self, request_id: int) -> str:
        chat = self._chats.owner_of(request_id) if self._chats else None
        title = self._chats.title(chat) if self._chats and chat is not None else ""
        return f"“{title}”" if title else f"reply {request_id}"


def _memory_words(use: MemoryUse) -> str:
    """What the model takes, part by part; beside it the panel shows what the process was measured to take."""
    parts = (
        ("weights", use.weight_bytes),
        ("unpacked copies for batches", use.copy_bytes),
        ("KV pages set aside, used or not", use.kv_bytes),
        ("what guesses", use.draft_bytes),
        ("tokenizer, tables and libraries, estimated", use.table_bytes),
        ("scratch of the largest step, estimated", use.scratch_bytes),
    )
    lines = [f"{numbers.data(size)} {name}" for name, size in parts if size]
    return "\n".join([*lines, f"{numbers.data(use.total_bytes)} in all, once all of it has been used"])


def _kv_words(pool: PoolSnapshot) -> str:
    used = numbers.data(pool.used * pool.page_bytes)
    total = numbers.data(pool.total * pool.page_bytes)
    used_number, _, used_unit = used.partition(" ")
    return f"{used_number if total.endswith(used_unit) else used} of {total} KV"
