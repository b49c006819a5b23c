"""One line per switch: what its present setting does here, in this machine's own figures. Knows no Qt.

A switch without a line of its own (or without figures yet) shows its choice's note from the option table.
"""

from __future__ import annotations

from collections.abc import Callable

from app.tuning.figures import LiveFigures
from app.tuning.numbers import count, data, milliseconds, percent, plural
from engine.events import ModelInfo, Phase, PoolSnapshot
from engine.options import Kind, OptionEntry

KIND_WORDS = {
    Kind.FREE: "instant",
    Kind.GRAPH: "records graphs again",
    Kind.CACHE: "recomputes running chats",
    Kind.WEIGHTS: "reloads weights",
}
KIND_SENTENCES = {
    Kind.FREE: "Takes effect between two steps; nothing is lost.",
    Kind.GRAPH: "Recorded graphs are dropped and recorded again; running chats go on.",
    Kind.CACHE: "Running chats go on, but their text so far is computed again; remembered pages are forgotten.",
    Kind.WEIGHTS: "The weights are read again from disk; running chats go on afterwards.",
}


class Effects:
    """Makes the lines. Remembers the weight bytes before the last change, to say what they were."""

    def __init__(self, figures: LiveFigures) -> None:
        self._figures = figures
        self._weight_bytes: int | None = None
        self._weight_bytes_before: int | None = None
        self._lines: dict[str, Callable[[str, ModelInfo], str]] = {
            "weights": self._weights,
            "batching": self._batching,
            "max_batch": self._max_batch,
            "kv_cache": self._kv_cache,
            "paging": self._paging,
            "prefix": self._prefix,
            "token_budget": self._token_budget,
            "chunked_prefill": self._chunked_prefill,
            "fused_ops": self._fused_ops,
        }

    def on_info(self, info: ModelInfo, is_same_model: bool) -> None:
        """Fresh figures of the model; ``is_same_model`` when a switch reloaded its weights."""
        if is_same_model and info.weight_bytes != self._weight_bytes:
            self._weight_bytes_before = self._weight_bytes
        elif not is_same_model:
            self._weight_bytes_before = None
        self._weight_bytes = info.weight_bytes

    def line(self, option: OptionEntry, value: str) -> str:
        """What ``option`` set to ``value`` does; its note where nothing was measured."""
        info, make = self._figures.info, self._lines.get(option.key)
        line = make(value, info) if info and make else ""
        return line or option.choice(value).note

    # ---- one per switch; "" where there is nothing to say yet

    def _weights(self, value: str, info: ModelInfo) -> str:
        before = self._weight_bytes_before
        was = f"; was {data(before)}" if before is not None else ""
        return f"{data(info.weight_bytes)} read per step{was}"

    def _batching(self, value: str, info: ModelInfo) -> str:
        means = self._figures.means(Phase.DECODE)
        if means is None or means.batch < 1.5:
            return ""
        return f"{means.batch:.0f} chats share each read of {data(info.weight_bytes)}"

    def _max_batch(self, value: str, info: ModelInfo) -> str:
        last = self._figures.last
        if last is None:
            return ""
        waiting = f"; {plural(last.waiting, 'chat')} waiting" if last.waiting else ""
        return f"{last.batch} of up to {value} in the last step{waiting}"

    def _kv_cache(self, value: str, info: ModelInfo) -> str:
        last = self._figures.last
        if value == "off":
            computed = last.num_prefill_tokens + last.num_decode_tokens if last else 0
            return f"{plural(computed, 'token')} computed in the last step" if computed else ""
        pool = self._pool()
        held = f"; {data(pool.used * pool.page_bytes)} held now" if pool and pool.used else ""
        return f"{data(info.kv_bytes_per_token)} kept per token{held}"

    def _paging(self, value: str, info: ModelInfo) -> str:
        pool = self._pool()
        if pool is None:
            return ""
        stranded = f", {data(pool.stranded * pool.page_bytes)} reserved but empty" if pool.stranded else ""
        return f"{count(pool.used)} of {plural(pool.total, 'page')} held{stranded}"

    def _prefix(self, value: str, info: ModelInfo) -> str:
        pool = self._pool()
        if pool is None or value == "off":
            return ""
        return f"{plural(pool.shared, 'page')} shared now, {count(pool.cached)} kept for reuse"

    def _chunked_prefill(self, value: str, info: ModelInfo) -> str:
        means = self._figures.means(Phase.PREFILL)
        if means is None:
            return ""
        return f"the last prefill steps took {milliseconds(means.step)} ms each"

    def _token_budget(self, value: str, info: ModelInfo) -> str:
        throughput = info.machine.flops_per_second.get(info.dtype)
        if not throughput:
            return ""
        seconds = 2.0 * info.num_parameters * int(value) / throughput
        return f"a full step's arithmetic takes {milliseconds(seconds)} ms, predicted"

    def _fused_ops(self, value: str, info: ModelInfo) -> str:
        means = self._figures.means(Phase.DECODE)
        if means is None:
            return ""
        return f"overhead is {milliseconds(means.overhead)} of {milliseconds(means.step)} ms ({percent(means.overhead_share)} %)"

    def _pool(self) -> PoolSnapshot | None:
        return self._figures.last.pool if self._figures.last else None
