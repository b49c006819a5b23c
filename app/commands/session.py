"""What ``chat``, ``bench`` and ``compare`` share: their switches, an engine loaded with progress, one reply driven to its end."""

from __future__ import annotations

import argparse
import logging
import shlex
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from app.library import catalog
from app.library.starter import STARTER, fetch_starter, find_starter
from app.log import start_logging
from app.paths import find_paths
from engine.commands import Overflow, Prompt
from engine.events import Finished, FinishReason, Phase, RequestUsage, StepRecord, TokenDelta
from engine.options import parse_settings
from engine.params import SamplingParams
from engine.presets import BEST_HERE, Found, canonical, keep_best, preset, presets, stored_best

if TYPE_CHECKING:
    from engine.engine import Engine

INTERRUPTED = 130  # the shell's code for a program ended by Ctrl+C


@dataclass(frozen=True, slots=True)
class Reply:
    """One finished reply. ``message`` is set when it failed; ``steps`` are its step records, in order."""

    text: str
    reason: FinishReason
    usage: RequestUsage
    message: str = ""
    steps: list[StepRecord] = field(default_factory=list)


def add_switches(parser: argparse.ArgumentParser) -> None:
    """The arguments ``--set`` and ``--preset``."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option; see 'options'")
    names = ", ".join((*(row.name for row in presets()), BEST_HERE))
    parser.add_argument("--preset", metavar="NAME", help=f"a row of options, which --set can change: {names}")


def add_draft(parser: argparse.ArgumentParser) -> None:
    """The argument ``--draft``."""
    text = "a smaller model with the same vocabulary, which guesses with --set speculation=draft"
    parser.add_argument("--draft", metavar="MODEL", help=text)


def chosen_settings(arguments: argparse.Namespace, replaces_best: bool = False) -> dict[str, str]:
    """What ``--preset`` and, over it, ``--set`` ask for. ValueError names what is wrong. replaces_best: see preset_settings."""
    given = parse_settings(arguments.set)
    if not arguments.preset:
        return given
    return {**preset_settings(arguments.preset, arguments.model, replaces_best), **given}


def preset_settings(name: str, model: str, replaces_best: bool = False) -> dict[str, str]:
    """Every switch of the preset ``name``. "best_here" is searched for now, with ``model``, where it was not before.

    replaces_best: it is searched for too where it was found for another model or machine; else that is a ValueError.
    """
    best = _best_here(model, replaces_best) if canonical(name) == BEST_HERE else None
    return preset(name, best).settings()


def _best_here(model: str, replaces_best: bool) -> Found:
    file = find_paths().create().best_here_file
    found = stored_best(file)
    if found is None:
        return _search_best(model, file)
    path = _find_model(model, Progress())
    from engine.model.load import name_of
    from engine.roofline.machine import this_machine

    name, machine = name_of(path), this_machine()
    if found.is_of(machine, name):
        return found
    if replaces_best:
        return _search_best(model, file)
    ours, theirs = (f"{name} on {machine}", f"{found.model} on {found.machine}")
    raise ValueError(
        f"The best setting kept here was measured for {theirs}, not for {ours}. Measure it for this one, in its place, with: "
        f"ridgeline bench -m {shlex.quote(model)} --preset {BEST_HERE}"
    )


def _search_best(model: str, file: Path) -> Found:
    from engine.best_here import search

    progress = Progress()
    with closing(open_engine(model, {})) as engine:
        found = search(engine, progress)
    progress.clear()
    keep_best(found, file)
    print(f"Best here: {found.words}.", file=sys.stderr)
    return found


def open_engine(model: str, settings: Mapping[str, str], draft: str | None = None) -> Engine:
    """Load ``model`` (as for ``-m``) with progress on stderr; the starter is fetched if it is not here yet.

    draft: a smaller model that guesses for it, for ``speculation=draft``.
    Raises ValueError with the remedy when there is no such model or it cannot be loaded.
    """
    progress = Progress()
    _find_model(model, progress)  # a wrong name is told at once, before torch is imported
    progress("Loading", 0.0)
    from engine.engine import Engine

    machine_file = find_paths().create().machine_file
    engine = Engine.load(model, settings, progress, machine_file=machine_file, find=catalog.resolve, draft=draft)
    progress.clear()
    return engine


def _find_model(model: str, progress: Progress) -> Path:
    """Where ``model`` lies; the starter is fetched if it is not here yet. ValueError when there is no such model."""
    if model == STARTER and find_starter() is None:
        fetch_starter(progress=progress)
    return catalog.resolve(model)


def run_reply(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    write: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
    overflow: Overflow = "stop",
) -> Reply:
    """Submit, step until the reply has ended, hand each piece of text to ``write``. ``stopped`` is asked at each step."""
    request = engine.submit(prompt, params, overflow=overflow)
    pieces: list[str] = []
    steps: list[StepRecord] = []
    asked_to_stop = False
    while True:
        if stopped() and not asked_to_stop:
            asked_to_stop = True
            engine.abort(request)
        for event in engine.step():
            if isinstance(event, TokenDelta) and event.request_id == request:
                pieces.append(event.text)
                write(event.text)
            elif isinstance(event, StepRecord):
                steps.append(event)
            elif isinstance(event, Finished) and event.request_id == request:
                return Reply("".join(pieces), event.reason, event.usage, event.message, steps)


@contextmanager
def log_to_file() -> Iterator[None]:
    """While inside, what engine and app log goes to the log file, not between the words of an answer."""
    hooks, level = (sys.excepthook, threading.excepthook), logging.getLogger().level
    handler = start_logging(find_paths().log_file)
    logging.raiseExceptions = False  # a log that cannot be written (full disk) must not spoil the answer
    try:
        yield
    finally:
        logging.raiseExceptions = True
        sys.excepthook, threading.excepthook = hooks
        logging.getLogger().setLevel(level)
        if handler:
            logging.getLogger().removeHandler(handler)
            with suppress(OSError):  # its last lines find no room either
                handler.close()


@contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl+C sets a flag instead of raising in the middle of a step; a second one raises."""
    pressed = 0

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed > 0
    finally:
        signal.signal(signal.SIGINT, before)


def figures(reply: Reply) -> str:
    """The reply's figures in two lines, for a person."""
    usage = reply.usage
    rate = usage.tokens_per_second
    parts = [f"{usage.new_tokens} tokens" + (f" at {rate:.1f} tokens/s" if rate else "")]
    if usage.first_token_seconds is not None:
        parts.append(f"first after {usage.first_token_seconds:.2f} s")
    shared = f", {usage.cached_tokens} of them shared" if usage.cached_tokens else ""
    parts.append(f"{usage.prompt_tokens} prompt tokens{shared}")
    if usage.acceptance is not None:
        parts.append(f"{usage.acceptance:.0%} of {usage.num_drafted} drafts accepted")
    return "; ".join(parts) + _step_line(reply.steps)


def _step_line(steps: list[StepRecord]) -> str:
    decode = [step for step in steps if step.phase is Phase.DECODE][1:]
    if not decode:
        return ""
    step_ms, memory_ms, compute_ms, rest_ms = (
        1e3 * statistics.median(getattr(step, name) for step in decode)
        for name in ("step_seconds", "memory_seconds", "compute_seconds", "overhead_seconds")
    )
    bound = max((memory_ms, "memory"), (compute_ms, "compute"), (rest_ms, "overhead"))[1]
    return (
        f"\none step {step_ms:.1f} ms: reading memory takes {memory_ms:.1f}, arithmetic {compute_ms:.1f}, "
        f"everything else {rest_ms:.1f} ({bound}-bound)"
    )


class Progress:
    """Progress on stderr: one line rewritten in a terminal, a line per stage elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._stage = ""
        self._line = ""

    def __call__(self, stage: str, fraction: float) -> None:
        line = f"\r\033[K{stage} {fraction:.0%}"
        if self._is_terminal and line != self._line:
            print(line, end="", file=sys.stderr, flush=True)
            self._line = line
        elif not self._is_terminal and stage != self._stage:
            print(f"{stage} ...", file=sys.stderr, flush=True)
        self._stage = stage

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
