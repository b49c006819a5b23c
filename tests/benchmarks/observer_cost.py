"""What the open panel costs: tokens/s with and without it, the GUI thread's punctuality, and what the panel says itself.

    python -m tests.benchmarks.observer_cost [--source starter] [--pairs 6] [--seconds 4] [--weights int4] [--json]

A reply runs in the real engine beside the real dock in the app's main window, drawn offscreen unless a platform is given. Each
pair is shown, hidden, hidden, shown (and the other way round in the next pair), so that a steady drift, such as the
growing context, cancels out. Exit code 1 when a target is missed: the panel costs less than 5 % of tokens/s; a 10 ms
heartbeat is late by less than 33 ms at the 99th percentile; the panel says it takes less than 2 % of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import itertools

from PySide6.QtCore import QEventLoop, Qt, QTimer

from app.application import build
from app.bridge import EngineBridge
from app.chat.controller import ChatController
from app.paths import Paths
from app.settings import SettingsStore
from app.tuning.dock import Dock
from engine.events import Finished, ModelLoadFailed, Phase, StepRecord

HEARTBEAT_SECONDS = 0.010
WARM_UP_SECONDS = 1.5
PATIENCE_SECONDS = 60.0
PROMPT = "Write a long, detailed story about a lighthouse keeper who collects clocks."


@dataclass
class Period:
    """One stretch of measuring. ``gui_share``: processor time of the GUI thread, share of one core."""

    shown: bool
    tokens_per_second: float
    gui_share: float
    late: list[float]


@dataclass(frozen=True)
class Result:
    tokens_per_second_hidden: float
    tokens_per_second_shown: float
    cost_percent: float  # median over the pairs
    cost_percent_by_pair: list[float]
    late_p50_milliseconds: float
    late_p99_milliseconds: float
    late_p99_milliseconds_hidden: float
    panel_says_percent_of_core: float
    panel_takes_percent_of_core: float  # GUI thread with it less without it: all it causes, not just what it counts
    refreshes_per_second: float
    num_cores: int

    @property
    def misses(self) -> list[str]:
        found = []
        if self.cost_percent >= 5:
            found.append(f"costs {self.cost_percent:.1f} % of tokens/s (limit 5)")
        if self.late_p99_milliseconds >= 33:
            found.append(f"heartbeat late by {self.late_p99_milliseconds:.1f} ms at p99 (limit 33)")
        if self.panel_says_percent_of_core >= 2 * self.num_cores:
            found.append(f"panel takes {self.panel_says_percent_of_core:.1f} % of a core (limit 2 % of the machine)")
        return found


class Bench:
    """The main window with the real engine behind it, and the clocks."""

    def __init__(self, folder: Path, source: str, weights: str, width: int) -> None:
        folders = [folder / name for name in ("data", "config", "cache", "logs")]
        paths = Paths(*folders).create()
        settings = SettingsStore(paths.settings_file)
        settings.update(options={"weights": weights}, model_source=source, theme="dark", dock_width=width)
        self.app, self.window = build(paths=paths, settings=settings)
        found = self.window.findChild(EngineBridge)
        assert found is not None
        self.bridge = found
        self.dock = self._find_dock()
        self.controller = self.window.findChild(ChatController)
        self.records: list[StepRecord] = []
        self.late: list[float] = []
        self._chat = ""
        self._is_wanted = False
        self._beat = 0.0
        self.heartbeat = QTimer()
        self.heartbeat.setTimerType(Qt.TimerType.PreciseTimer)
        self.heartbeat.setInterval(round(HEARTBEAT_SECONDS * 1000))
        self.heartbeat.timeout.connect(self._on_heartbeat)
        self.bridge.steps_recorded.connect(self.records.extend)
        self.bridge.generation_finished.connect(self._on_finished)
        self.window.resize(1280, 800)
        self.window.show()
        self._wait_for_model()

    def _find_dock(self) -> Dock:
        found = self.window.findChild(Dock)
        assert found is not None
        return found

    def _wait_for_model(self) -> None:
        loop = QEventLoop()
        failed: list[ModelLoadFailed] = []

        def on_failed(event: ModelLoadFailed) -> None:
            failed.append(event)
            loop.quit()

        self.bridge.model_loaded.connect(loop.quit)
        self.bridge.model_load_failed.connect(on_failed)
        loop.exec()
        if failed:
            raise SystemExit(failed[0].message)

    def _on_heartbeat(self) -> None:
        now = time.perf_counter()
        self.late.append(max(0.0, now - self._beat - HEARTBEAT_SECONDS))
        self._beat = now

    def _on_finished(self, finished: Finished) -> None:
        if self._is_wanted:  # it ended early: go on, so that there is always something to measure
            QTimer.singleShot(0, self._ask)

    def _ask(self) -> None:
        self.controller.send(self._chat, PROMPT)

    def start_reply(self) -> None:
        """A new chat, shown in the window, with a reply under way."""
        self._chat = self.controller.new_chat()
        self.window.show_chat(self._chat)
        self._is_wanted = True
        self.records.clear()
        self._ask()
        patience = time.perf_counter() + PATIENCE_SECONDS
        while not any(record.phase is Phase.DECODE for record in self.records):
            if time.perf_counter() > patience:
                raise SystemExit(f"No token came within {PATIENCE_SECONDS:.0f} s: the machine is too busy to measure.")
            self.wait(0.1)
        self.wait(WARM_UP_SECONDS)

    def stop_reply(self) -> None:
        self._is_wanted = False
        self.controller.stop(self._chat)
        while self.bridge.is_busy:
            self.wait(0.05)

    def wait(self, seconds: float) -> None:
        loop = QEventLoop()
        QTimer.singleShot(round(seconds * 1000), loop.quit)
        loop.exec()

    def measure(self, shown: bool, seconds: float) -> Period:
        if self.window.is_dock_shown != shown:
            self.window.dock_place.toggle()
        self.wait(0.4)  # the first paint is not what an open panel costs
        self.late.clear()
        self._beat = time.perf_counter()
        self.heartbeat.start()
        began, cpu = time.perf_counter(), time.thread_time()
        self.wait(seconds)
        took, spent = time.perf_counter() - began, time.thread_time() - cpu
        self.heartbeat.stop()
        self.wait(0.1)  # the last records arrive
        steps = [r for r in self.records if began <= r.ended_at <= began + took]
        return Period(shown, decode_rate(steps), spent / took, list(self.late))

    def close(self) -> None:
        self._is_wanted = False
        self.window.close()
        self.window.lifetime.shut_down()


def decode_rate(steps: list[StepRecord]) -> float:
    """Tokens per second of wall time between neighbouring decode steps: what the window does to the engine between
    two steps counts as well; prefills and pauses do not."""
    pairs = [
        (after.num_new_tokens, after.ended_at - before.ended_at)
        for before, after in itertools.pairwise(steps)
        if after.phase is Phase.DECODE and after.index == before.index + 1
    ]
    if not pairs:
        raise SystemExit("Not two decode steps in one period: the machine is too busy to measure. Try --seconds 10.")
    return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)


def run(bench: Bench, pairs: int, seconds: float) -> Result:
    periods: list[Period] = []
    by_pair = []
    says: list[float] = []
    refreshes = shown_seconds = 0.0
    for pair in range(pairs):
        bench.start_reply()
        order = (True, False, False, True) if pair % 2 == 0 else (False, True, True, False)
        group = []
        for shown in order:
            before = bench.dock.refresher.num_refreshes
            group.append(bench.measure(shown, seconds))
            if shown:
                says.append(bench.dock.meter.share_of_core())
                refreshes += bench.dock.refresher.num_refreshes - before
                shown_seconds += seconds + 0.5
        bench.stop_reply()
        with_it = statistics.mean(p.tokens_per_second for p in group if p.shown)
        without = statistics.mean(p.tokens_per_second for p in group if not p.shown)
        by_pair.append(100 * (1 - with_it / without))
        periods.extend(group)
    late = sorted(1000 * late for p in periods if p.shown for late in p.late)
    late_hidden = sorted(1000 * late for p in periods if not p.shown for late in p.late)
    shown_share = statistics.median(p.gui_share for p in periods if p.shown)
    hidden_share = statistics.median(p.gui_share for p in periods if not p.shown)
    return Result(
        tokens_per_second_hidden=statistics.median(p.tokens_per_second for p in periods if not p.shown),
        tokens_per_second_shown=statistics.median(p.tokens_per_second for p in periods if p.shown),
        cost_percent=statistics.median(by_pair),
        cost_percent_by_pair=by_pair,
        late_p50_milliseconds=late[len(late) // 2],
        late_p99_milliseconds=late[int(len(late) * 0.99)],
        late_p99_milliseconds_hidden=late_hidden[int(len(late_hidden) * 0.99)],
        panel_says_percent_of_core=100 * statistics.median(says),
        panel_takes_percent_of_core=100 * (shown_share - hidden_share),
        refreshes_per_second=refreshes / shown_seconds,
        num_cores=os.cpu_count() or 1,
    )


def report(result: Result) -> str:
    pairs = ", ".join(f"{cost:.1f}" for cost in result.cost_percent_by_pair)
    return "\n".join(
        (
            f"tokens/s          hidden {result.tokens_per_second_hidden:.1f}   shown {result.tokens_per_second_shown:.1f}",
            f"cost of the panel {result.cost_percent:.1f} % (median of pairs: {pairs})",
            f"10 ms heartbeat   late by {result.late_p50_milliseconds:.1f} ms (p50), "
            f"{result.late_p99_milliseconds:.1f} ms (p99); hidden {result.late_p99_milliseconds_hidden:.1f} ms (p99)",
            f"panel says        {result.panel_says_percent_of_core:.2f} % of one core at "
            f"{result.refreshes_per_second:.1f} refreshes/s; the GUI thread takes "
            f"{result.panel_takes_percent_of_core:.2f} % more with it than without",
            "all targets met" if not result.misses else "MISSED: " + "; ".join(result.misses),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", default=os.environ.get("RIDGELINE_STARTER", "starter"))
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each of the four periods of a pair")
    parser.add_argument("--width", type=int, default=372, help="of the dock, px")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.source, args.weights, args.width)
        try:
            result = run(bench, args.pairs, args.seconds)
        finally:
            bench.close()
    print(json.dumps(asdict(result), indent=2) if args.json else report(result))
    return 1 if result.misses else 0


if __name__ == "__main__":
    sys.exit(main())
