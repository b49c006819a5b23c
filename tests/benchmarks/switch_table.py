"""What each switch is worth on this machine, for the README: python -m tests.benchmarks.switch_table [-m MODEL] [--seconds 300]

Every choice of every switch against the same switch off, all others at their defaults, on work where it can show itself: two engines
in this process take turns (engine/comparison.py). Finished rows are kept under build/switch_table, so that a run that was stopped
goes on where it was; --fresh measures all again. The table is written between the README's markers, the losing switches too.
A row that is not measured now (--only, or time is up) stays as it was measured last, and says when.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch

from engine.commands import Message
from engine.comparison import NOISE, Measured, Workload, compare
from engine.engine import Engine
from engine.events import ModelInfo
from engine.options import OPTIONS, OptionEntry, entry
from engine.quality import Quality, fixed_text, fixed_tokens, full_precision, quality, read, reference_rows

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "switch_table"
README = ROOT / "README.md"
BEGIN = "<!-- measured:begin (written by tests/benchmarks/switch_table.py) -->"
END = "<!-- measured:end -->"
QUALITY_TOKENS = 320
ROUNDS = 4
MOST_ROW_SECONDS = 12.0
_OFF_VALUES = ("none", "off", "native", "model", "full", "reference")
_OFF_NUMBERS = {"max_batch": "1", "token_budget": "32", "draft_length": "1"}
_SHOWN_NUMBERS = {
    "max_batch": ("4", "16"),
    "token_budget": ("128", "512"),
    "draft_length": ("4", "adaptive"),
    "window": ("512",),  # wider ones than the work's text change nothing
    "sparse": ("8",),
}
_WITH = {"draft_length": {"speculation": "ngram"}}

# One sentence each: which side of the ridge point a switch attacks, and so where it cannot help.
WHY = {
    "weights": "Memory side: fewer bytes per weight read; a prompt is limited by arithmetic and gains little.",
    "activations": "Compute side: 8-bit products; a single chat waits for memory, so it shows in prompts and batches.",
    "sensitive_layers": "Memory side, backwards: a few bytes more for the layers that rounding hurts most.",
    "kv_dtype": "Memory side: fewer bytes per cached token; it counts once the cache is as large as the weights.",
    "gqa": "Memory side: query heads share keys and values; without it the cache and its reads grow by heads per KV head.",
    "window": "Memory side: no reads beyond the window; short chats never reach it.",
    "sparse": "Memory side: reads the pages that matter; choosing them costs more than it saves until contexts are long.",
    "batching": "Towards the ridge: one read of the weights serves all chats.",
    "max_batch": "Towards the ridge: more chats per read of the weights, until arithmetic takes as long as the read.",
    "speculation": "Towards the ridge: one read tests several guessed tokens; it pays where guesses are right and turns itself off elsewhere.",
    "draft_length": "Towards the ridge: more guesses per read of the weights, wasted behind a wrong one.",
    "kv_cache": "Compute side: nothing is computed twice; it costs the memory that the keys and values take.",
    "paging": "Capacity, neither side: only what is used is reserved, so more chats run at once.",
    "eviction": "Capacity: finished pages stay findable while nobody needs their room.",
    "host_offload": "Capacity: waiting pages leave the GPU's memory for the computer's own.",
    "prefix": "Compute side: text that was read before is not computed again; it shows in the time to the first token.",
    "chunked_prefill": "Neither side: the same work cut up, so that other chats do not stall behind a long prompt.",
    "token_budget": "Compute side: more prompt tokens per read of the weights; smaller steps keep other chats smooth.",
    "attention": "Memory side: scores stay on chip; it shows in long prompts.",
    "fused_ops": "Overhead, neither side: fewer calls and fewer intermediate results.",
    "graphs": "Overhead, neither side: the calls of a step are issued at once.",
    "overlap": "Overhead, neither side: the next step is prepared while this one runs.",
}
# Instead, where one choice needs a sentence of its own.
WHY_CHOICE = {
    ("speculation", "draft"): (
        "Measured with the model as its own draft, for want of a smaller one: every guess is right and costs as much as a step."
    ),
}


class Run(NamedTuple):
    """Which model on which machine was measured, and on which day."""

    where: str
    date: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``refused``: why the choice cannot run here, and then nothing was measured.

    where, date: the Run; empty in a row that is not kept yet.
    """

    key: str
    value: str
    off: str
    work: str
    rate_off: float = 0.0
    rate_on: float = 0.0
    first_off: float = 0.0
    first_on: float = 0.0
    memory_off: int = 0
    memory_on: int = 0
    mean_kl: float | None = None  # None: the text stays the same
    agreement: float | None = None
    lost: str = ""
    rounds: int = 0
    refused: str = ""
    where: str = ""
    date: str = ""


class Works:
    """The pieces of work, by name; all texts come from the fixed text, so that runs on two machines do the same."""

    def __init__(self, engine: Engine) -> None:
        self._tokens = engine.encode_text(fixed_text()[:60_000])
        self._window = engine.context_length
        self._has_template = engine.info.has_chat_template
        self._made: dict[str, Callable[[], Workload]] = {
            "one chat": lambda: Workload((self._text(0, 64),), 24),
            "8 chats": lambda: Workload(tuple(self._text(500 * n, 24) for n in range(8)), 16),
            "long text": lambda: Workload((self._text(0, 1000),), 16),
            "a second turn": lambda: Workload((self._text(0, 400),), 8, before=(self._text(0, 384),)),
            "a long prompt among chats": lambda: Workload(
                (self._text(0, 32), self._text(500, 32), self._text(1000, 512)), 16
            ),
            "repeat this text": self._repeat,
        }

    def get(self, name: str) -> Workload:
        return self._made[name]()

    def _text(self, start: int, count: int) -> tuple[int, ...]:
        return tuple(self._tokens[start : start + min(count, self._window // 2)])

    def _repeat(self) -> Workload:
        passage = (
            "The lighthouse keeper climbed the hundred and twelve steps each evening, lit the lamp, and wrote the hour, the wind "
            "and the names of passing ships into a book with a green cover."
        )
        question = f"Repeat this text word for word, twice: {passage}"
        return Workload(((Message("user", question),) if self._has_template else question,), 48)


_WORKS = {
    **dict.fromkeys(("batching", "max_batch", "paging"), ("8 chats",)),
    **dict.fromkeys(("prefix", "eviction"), ("a second turn",)),
    **dict.fromkeys(("kv_dtype", "gqa", "window", "sparse", "attention", "token_budget"), ("long text",)),
    "chunked_prefill": ("a long prompt among chats",),
    "speculation": ("repeat this text", "one chat"),
    "draft_length": ("repeat this text",),
}


def off_value(option: OptionEntry) -> str:
    plain = next((value for value in _OFF_VALUES if value in option.values), option.values[0])
    return _OFF_NUMBERS.get(option.key, plain)


def lines() -> Iterator[tuple[OptionEntry, str, str]]:
    """(switch, choice, work) of every line, in table order."""
    for option in OPTIONS:
        off = off_value(option)
        shown = _SHOWN_NUMBERS.get(option.key, tuple(value for value in option.values if value != off))
        for value in (value for value in shown if value in option.values):
            for work in _WORKS.get(option.key, ("one chat",)):
                yield option, value, work


class Bench:
    """Two engines and the reference reading of the fixed text, made when first needed."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._engines: list[Engine] = []
        self._reference: list[torch.Tensor] = []
        self._tokens: list[int] = []
        self._qualities: dict[str, Quality] = {}

    def engines(self) -> tuple[Engine, Engine]:
        while len(self._engines) < 2:
            self._engines.append(Engine.load(self._model))
        return self._engines[0], self._engines[1]

    def measure(self, option: OptionEntry, value: str, work: str, seconds: float) -> Row:
        off, on = self.engines()
        base = Row(option.key, value, off_value(option), work)
        if (option.key, value) == ("speculation", "draft"):
            on.set_draft(self._model)  # there is no smaller model of this family to be had here; the row says so
        try:
            _set(off, {**_WITH.get(option.key, {}), option.key: base.off})
            _set(on, {**_WITH.get(option.key, {}), option.key: value})
        except ValueError as error:
            return Row(option.key, value, base.off, work, refused=str(error))
        workload = Works(off).get(work)
        before, after = compare(lambda: off, lambda: on, workload, ROUNDS, seconds=seconds)
        its = None if option.lossless else self._quality(on)
        return Row(
            **{name: getattr(base, name) for name in ("key", "value", "off", "work")},
            rate_off=before.median("tokens_per_second"),
            rate_on=after.median("tokens_per_second"),
            first_off=before.median("first_token_seconds"),
            first_on=after.median("first_token_seconds"),
            memory_off=off.info.weight_bytes + int(before.median("kv_bytes")),
            memory_on=on.info.weight_bytes + int(after.median("kv_bytes")),
            mean_kl=its.mean_kl if its else None,
            agreement=its.token_agreement if its else None,
            lost=_why_lost(before, after),
            rounds=len(after.samples),
        )

    def _quality(self, engine: Engine) -> Quality:
        if not self._reference:
            reference = Engine.load(self._model, full_precision())
            self._tokens = fixed_tokens(reference, QUALITY_TOKENS)
            self._reference = reference_rows(reference, self._tokens)
            reference.close()
        return quality(self._reference, read(engine, self._tokens), self._tokens)

    @property
    def info(self) -> ModelInfo:
        return self.engines()[0].info

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


def _set(engine: Engine, values: Mapping[str, str]) -> None:
    """The defaults with ``values`` over them; nothing is applied that holds already."""
    wanted = engine.options.replaced(
        {**{option.key: option.default_for(engine.capabilities) for option in OPTIONS}, **values}, engine.capabilities
    )
    changed = engine.options.changed(wanted)
    if changed:
        engine.apply({key: wanted[key] for key in changed})


def _why_lost(before: Measured, after: Measured) -> str:
    """For a choice that is slower here: what takes longer with it."""
    if after.median("tokens_per_second") >= before.median("tokens_per_second") * (1 - NOISE):
        return ""
    names = {"memory": "reading memory", "compute": "arithmetic", "overhead": "work beside memory and arithmetic"}
    rises = {name: after.median(f"{name}_seconds") - before.median(f"{name}_seconds") for name in names}
    name = max(rises, key=lambda part: rises[part])
    was, now = (1e3 * side.median(f"{name}_seconds") for side in (before, after))
    return f"Slower here: {names[name]} takes {now:.1f} ms per token instead of {was:.1f}."


# -- the table ------------------------------------------------------------------------------------------------------------


def table(rows: Iterable[Row], heading: str) -> str:
    return _table((_line(row) for row in rows), heading)


def _table(rows: Iterable[str], heading: str) -> str:
    text = [
        heading,
        "",
        "| switch | work | tokens/s off → on | first token, ms | weights + KV held, MB | text | why |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*text, *rows])


def _name(option_key: str, off: str, value: str) -> str:
    return f"`{option_key}` {off} → {value}"


def _line(row: Row) -> str:
    name = _name(row.key, row.off, row.value)
    because = WHY_CHOICE.get((row.key, row.value)) or WHY.get(row.key, f"Changes {entry(row.key).terms}.")
    why = " ".join(part for part in (because, row.lost) if part)
    if row.refused:
        return f"| {name} | {row.work} | | | | | {row.refused} |"
    ratio = row.rate_on / row.rate_off if row.rate_off else 0.0
    rate = f"{row.rate_off:.1f} → {row.rate_on:.1f} (**{ratio:.2f}**)"
    first = f"{1e3 * row.first_off:.0f} → {1e3 * row.first_on:.0f}"
    memory = f"{row.memory_off / 1e6:.0f} → {row.memory_on / 1e6:.0f}"
    text = "same" if row.mean_kl is None else f"KL {row.mean_kl:.4f}, {row.agreement:.0%} same token"
    return f"| {name} | {row.work} | {rate} | {first} | {memory} | {text} | {why} |"


def today() -> str:
    return time.strftime("%Y-%m-%d")


def this_run(info: ModelInfo) -> Run:
    return Run(f"{info.name} ({info.stored_format}) on {info.machine.name}", today())


def heading(info: ModelInfo) -> str:
    machine, run = info.machine, this_run(info)
    return (
        f"{run.where}, {machine.read_bytes_per_second / 1e9:.0f} GB/s read, "
        f"ridge point {machine.ridge_point(info.dtype):.0f} operations per byte in {info.dtype}; {run.date}. Medians of runs "
        "in turns, each from a fresh state, all other switches at their defaults. Text: mean KL to full precision and share of equal "
        f"likeliest tokens over {QUALITY_TOKENS} tokens of a fixed text."
    )


def write_readme(table_text: str, readme: Path = README) -> None:
    """Put the table between the markers. ValueError when the README lacks them."""
    before, _, after = _around_table(readme)
    readme.write_text(f"{before}{BEGIN}\n\n{table_text}\n\n{END}{after}", encoding="utf-8")


def _around_table(readme: Path) -> tuple[str, str, str]:
    """What stands before, between and after the markers."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    between, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme.name} lacks the markers {BEGIN} and {END}.")
    return before, between, after


# -- rows of earlier runs -------------------------------------------------------------------------------------------------

_HEADING = re.compile(r"^(.+), [\d.]+ GB/s read, .*; (\d{4}-\d\d-\d\d)\. ", re.MULTILINE)
_EARLIER = re.compile(r" Earlier run \((\d{4}-\d\d-\d\d)(?:, (.+))?\)\. \|$")


class Told(NamedTuple):
    """A line of a README's table, without the remark that it is of an earlier run, and that run."""

    line: str
    run: Run


def told_in(readme: Path) -> dict[tuple[str, str], Told]:
    """The lines of the table that the README has, by switch (as ``_name``) and work."""
    between = _around_table(readme)[1]
    headed = _HEADING.search(between)
    if headed is None:
        return {}
    its = Run(*headed.groups())
    found = {}
    for line in between.splitlines():
        if line.startswith("| `"):
            name, work = (cell.strip() for cell in line.split("|")[1:3])
            found[name, work] = _told(line, its)
    return found


def _told(line: str, of_table: Run) -> Told:
    """``of_table``: the run of a line that names none."""
    remark = _EARLIER.search(line)
    if remark is None:
        return Told(line, of_table)
    date, where = remark.groups()
    return Told(f"{line[: remark.start()]} |", Run(where or of_table.where, date))


def earlier_line(told: Told, now: Run) -> str:
    """The line with the remark that it is of an earlier run, on which day, and with what where that is another."""
    date, where = told.run.date, told.run.where
    detail = date if where == now.where else f"{date}, {where}"
    return f"{told.line.removesuffix(' |')} Earlier run ({detail}). |"


class Before:
    """What was measured before this run: rows kept in ``folder``, and the lines of the README."""

    def __init__(self, now: Run, folder: Path, readme: Path) -> None:
        self._now, self._folder = now, folder
        self._told = told_in(readme)
        folder.mkdir(parents=True, exist_ok=True)

    def row(self, key: str, value: str, work: str) -> Row | None:
        """The kept row, if it is of this model and machine."""
        file = self._file(key, value, work)
        row = Row(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
        return row if row and row.where == self._now.where else None

    def keep(self, row: Row) -> None:
        kept = replace(row, where=self._now.where, date=self._now.date)
        self._file(row.key, row.value, row.work).write_text(json.dumps(asdict(kept)), encoding="utf-8")

    def line(self, option: OptionEntry, value: str, work: str) -> str | None:
        """The newest line of a row that is not measured now, with the remark; None where there is none."""
        told = self._told.get((_name(option.key, off_value(option), value), work))
        row = self.row(option.key, value, work)
        if row and (told is None or told.run.date < row.date):
            told = Told(_line(row), Run(row.where, row.date))
        return earlier_line(told, self._now) if told else None

    def gone(self) -> list[tuple[str, str]]:
        """Rows of the README, by switch and work, that the table has no more."""
        there = {(_name(option.key, off_value(option), value), work) for option, value, work in lines()}
        return [row for row in self._told if row not in there]

    def _file(self, key: str, value: str, work: str) -> Path:
        return self._folder / f"{key}.{value}.{work.replace(' ', '-')}.json"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="starter")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all measuring, about")
    parser.add_argument("--only", default="", metavar="KEY,KEY", help="measure these switches anew; the rest stay")
    parser.add_argument("--fresh", action="store_true", help="measure again what is kept")
    parser.add_argument("--print", action="store_true", help="print the table and leave the README alone")
    given = parser.parse_args(arguments)
    only = frozenset(key for key in given.only.split(",") if key)
    unknown = only - {option.key for option in OPTIONS}
    if unknown:
        parser.error(f"there is no switch {', '.join(sorted(unknown))}")
    bench = Bench(given.model)
    before = Before(this_run(bench.info), CACHE, README)
    text = _table(_measured(bench, before, only, given.fresh, given.seconds), heading(bench.info))
    bench.close()
    for name, work in before.gone():
        print(f"{name} ({work}) is not among the rows any more and is left out.", file=sys.stderr)
    if given.print:
        print(text)
    else:
        write_readme(text, README)
    return 0


def _measured(bench: Bench, before: Before, only: frozenset[str], fresh: bool, seconds: float) -> Iterator[str]:
    """The lines of the table, measured within about ``seconds``, or as they were measured before."""
    todo, until = list(lines()), time.monotonic() + seconds
    for index, (option, value, work) in enumerate(todo):
        is_wanted = not only or option.key in only
        kept = None if fresh or only else before.row(option.key, value, work)
        is_late = time.monotonic() > until
        if kept and kept.date == today():  # of this run, which was stopped
            yield _line(kept)
        elif kept or not is_wanted or is_late:
            line = before.line(option, value, work)
            if is_wanted and not kept:
                print(f"Time is up; {option.key}={value} is left. Run again to go on.", file=sys.stderr)
            if line:
                yield line
        else:
            left = sum(not only or other.key in only for other, _, _ in todo[index:])
            share = max(1.0, (until - time.monotonic()) / left)
            started = time.monotonic()
            row = bench.measure(option, value, work, min(MOST_ROW_SECONDS, 0.6 * share))
            before.keep(row)
            yield _line(row)
            print(f"{time.monotonic() - started:5.1f} s  {_line(row)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
