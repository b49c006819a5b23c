"""``ridgeline compare``: two settings side by side, in turns on the same work, with what each costs in quality."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from app.commands import Subparsers
from app.commands.bench import positive
from app.commands.session import Progress, add_draft, log_to_file, open_engine, preset_settings
from app.library import catalog
from engine.commands import Message, Prompt
from engine.comparison import Measured, Workload, acts_on, compare
from engine.options import parse_settings
from engine.process_memory import free_bytes, settled_bytes

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.quality import Quality

PROMPT = "Explain how a lighthouse works to a child who has never seen the sea."
_FREE_SHARE = 0.8  # of the free memory, what a second engine may take
_FIGURES = {  # title in the table -> figure of a Sample, factor, format
    "tokens/s": ("tokens_per_second", 1.0, ".1f"),
    "first token, s": ("first_token_seconds", 1.0, ".3f"),
    "moved per token, MB": ("bytes_per_token", 1e-6, ".1f"),
    "reading it, ms": ("memory_seconds", 1e3, ".1f"),
    "arithmetic, ms": ("compute_seconds", 1e3, ".1f"),
    "everything else, ms": ("overhead_seconds", 1e3, ".1f"),
    "KV held, MB": ("kv_bytes", 1e-6, ".1f"),
}


def add_to(commands: Subparsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("compare", help="measure two settings against each other, speed and quality")
    parser.add_argument(
        "-m", "--model", default="starter", metavar="MODEL", help="starter, a path, or a name of 'models'"
    )
    for side in ("a", "b"):
        parser.add_argument(
            f"--{side}", action="append", default=[], metavar="KEY=VALUE,..", help="options; preset=NAME is one too"
        )
    parser.add_argument("-p", "--prompt", default=PROMPT, metavar="TEXT", help="what each chat is asked")
    parser.add_argument("--new-tokens", type=positive, default=32, metavar="N", help="length of the reply (32)")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="chats at once (1)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="measured rounds (5)")
    parser.add_argument(
        "--quality-tokens", type=int, default=256, metavar="N", help="of the fixed text (256); 0 leaves quality out"
    )
    add_draft(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.new_tokens < 2:
        raise ValueError("--new-tokens must be at least 2: the rate counts the tokens after the first.")
    if arguments.quality_tokens < 0 or arguments.quality_tokens == 1:
        raise ValueError("--quality-tokens must be 0 (no quality) or at least 2.")
    if not arguments.prompt.strip():
        raise ValueError("The prompt is empty. Pass one with -p TEXT.")
    with log_to_file(), ExitStack() as stack:
        settings = {side: _settings(getattr(arguments, side), arguments.model) for side in ("a", "b")}
        report = _report(arguments, settings, stack)
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report))
    return 0


def _settings(texts: Iterable[str], model: str) -> dict[str, str]:
    """``["preset=latency,weights=int8"]`` -> the preset's switches with weights=int8 over them."""
    pairs = [pair.strip() for text in texts for pair in text.split(",") if pair.strip()]
    names = [pair.removeprefix("preset=") for pair in pairs if pair.startswith("preset=")]
    given = parse_settings(pair for pair in pairs if not pair.startswith("preset="))
    return {**(preset_settings(names[-1], model) if names else {}), **given}


class _Sides:
    """The engines of both sides: one each while memory allows, else one that is switched before each turn.

    draft: the model that guesses on a side with ``speculation=draft``; the other side does not load it.
    process_bytes: side -> memory the process gained by loading it, weights and pages.
    """

    def __init__(
        self, model: str, settings: Mapping[str, Mapping[str, str]], draft: str | None, stack: ExitStack
    ) -> None:
        self._settings, self._draft = settings, draft
        self._engines: dict[str, Engine] = {}
        self._before: dict[str, int] = {}
        self.process_bytes: dict[str, int] = {}
        for side in settings:
            if side == "b" and self._needed(settings["b"]) > _FREE_SHARE * free_bytes():
                break
            before = settled_bytes()
            self._engines[side] = open_engine(model, settings[side], draft if _drafts(settings[side]) else None)
            stack.callback(self._engines[side].close)
            self.process_bytes[side] = settled_bytes() - before

    def _needed(self, settings: Mapping[str, str]) -> int:
        """What a second engine takes while it loads: its pages, its weights, and one unpacked matrix, at most a quarter."""
        engine = self._engines["a"]
        return engine.expected_memory(settings).total_bytes + engine.info.num_parameters

    @property
    def have_an_engine_each(self) -> bool:
        return len(self._engines) == 2

    def get(self, side: str) -> Engine:
        """The engine of ``side``, set as it should be."""
        if self.have_an_engine_each:
            return self._engines[side]
        engine = self._engines["a"]
        if self._draft and engine.draft is None and _drafts(self._settings[side]):
            engine.set_draft(self._draft, find=catalog.resolve)
        wanted = engine.options.replaced(_over_defaults(self._settings[side], engine), engine.capabilities)
        if engine.options.changed(wanted):
            engine.apply(dict(wanted))
        return engine


def _drafts(settings: Mapping[str, str]) -> bool:
    return settings.get("speculation") == "draft"


def _over_defaults(settings: Mapping[str, str], engine: Engine) -> dict[str, str]:
    from engine.options import OPTIONS

    return {option.key: settings.get(option.key, option.default_for(engine.capabilities)) for option in OPTIONS}


def _report(
    arguments: argparse.Namespace, settings: Mapping[str, Mapping[str, str]], stack: ExitStack
) -> dict[str, Any]:
    progress = Progress()
    judge = _Judge(arguments.model, arguments.quality_tokens, progress)
    sides = _Sides(arguments.model, settings, arguments.draft, stack)
    workload = Workload(_prompts(sides.get("a"), arguments.prompt, arguments.batch), arguments.new_tokens)
    a, b = compare(
        lambda: sides.get("a"),
        lambda: sides.get("b"),
        workload,
        arguments.rounds,
        lambda share: progress("Comparing", share),
    )
    described = {
        side: _describe(sides, side, measured, judge.quality(sides.get(side)))
        for side, measured in (("a", a), ("b", b))
    }
    progress.clear()
    info = sides.get("a").info
    return {
        "model": info.name,
        "stored_format": info.stored_format,
        "machine": {**asdict(info.machine), "flops_per_second": dict(info.machine.flops_per_second)},
        "batch": arguments.batch,
        "new_tokens": arguments.new_tokens,
        "rounds": arguments.rounds,
        "an_engine_each": sides.have_an_engine_each,
        **described,
        "speed_ratio": b.median("tokens_per_second") / max(a.median("tokens_per_second"), 1e-12),
        "sentence": acts_on(a, b),
    }


def _prompts(engine: Engine, text: str, batch: int) -> tuple[Prompt, ...]:
    """The same question from each chat, numbered, so that no two prompts are equal."""
    texts = [text if index == 0 else f"({index + 1}) {text}" for index in range(batch)]
    if not engine.info.has_chat_template:
        return tuple(texts)
    return tuple((Message("user", text),) for text in texts)


class _Judge:
    """Reads the fixed text at full precision once, then scores engines against it; without tokens it scores nothing."""

    def __init__(self, model: str, num_tokens: int, progress: Progress) -> None:
        self._num_tokens = num_tokens
        self._progress = progress
        if not num_tokens:
            return
        from engine.quality import fixed_tokens, full_precision, reference_rows

        engine = open_engine(model, full_precision())
        try:
            progress("Reading the fixed text at full precision", 0.0)
            self._tokens = fixed_tokens(engine, num_tokens)
            self._reference = reference_rows(engine, self._tokens)
        finally:
            engine.close()

    def quality(self, engine: Engine) -> Quality | None:
        if not self._num_tokens:
            return None
        from engine.quality import quality, read

        self._progress("Reading the fixed text", 1.0)
        return quality(self._reference, read(engine, self._tokens), self._tokens)


def _describe(sides: _Sides, side: str, measured: Measured, quality: Quality | None) -> dict[str, Any]:
    engine = sides.get(side)
    spreads = {figure: measured.spread(figure)._asdict() for figure, _, _ in _FIGURES.values()}
    return {
        "options": dict(engine.options),
        **spreads,
        "weight_bytes": engine.info.weight_bytes,
        "pool_bytes": engine.pool_bytes,
        "kv_bytes_per_token": engine.info.kv_bytes_per_token,
        "process_bytes": sides.process_bytes.get(side) if sides.have_an_engine_each else None,
        "cached_tokens": max(sample.cached_tokens for sample in measured.samples),
        "active_paths": dict(engine.info.active_paths),
        "quality": None if quality is None else asdict(quality),
    }


def _as_text(report: Mapping[str, Any]) -> str:
    a, b = report["a"], report["b"]
    differing = [key for key, value in a["options"].items() if b["options"][key] != value]
    lines = [f"{report['model']}, {report['stored_format']}; {report['machine']['name']}"]
    for name, side in (("A", a), ("B", b)):
        named = ", ".join(f"{key}={side['options'][key]}" for key in differing) or "the same setting"
        lines.append(f"{name}: {named}")
    lines += ["", f"{'':<26} {'A':>22} {'B':>22} {'B / A':>7}"]
    for title, (figure, factor, shape) in _FIGURES.items():
        ratio = f"{b[figure]['median'] / a[figure]['median']:.2f}" if a[figure]["median"] else ""
        lines.append(
            f"{title:<26} {_cell(a[figure], factor, shape):>22} {_cell(b[figure], factor, shape):>22} {ratio:>7}"
        )
    for title, key, factor, shape in _facts(a, b):
        values = [format(side[key] * factor, shape) for side in (a, b)]
        lines.append(f"{title:<26} {values[0]:>22} {values[1]:>22} {b[key] / a[key] if a[key] else 0:>7.2f}")
    if a["quality"]:
        lines += _quality_lines(a["quality"], b["quality"])
    return "\n".join([*lines, "", report["sentence"]])


def _facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, float, str]]:
    facts = [
        ("weights, MB", "weight_bytes", 1e-6, ".0f"),
        ("KV per token, kB", "kv_bytes_per_token", 1e-3, ".1f"),
        ("KV pool, MB", "pool_bytes", 1e-6, ".0f"),
    ]
    if a["process_bytes"] and b["process_bytes"]:
        facts.append(("process gained, MB", "process_bytes", 1e-6, ".0f"))
    return facts


def _quality_lines(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [
        f"Quality over {a['num_tokens']} tokens of a fixed text; its perplexity at full precision is {a['reference_perplexity']:.2f}",
        f"{'same likeliest token':<26} {a['token_agreement']:>22.1%} {b['token_agreement']:>22.1%}",
        f"{'mean KL to full precision':<26} {a['mean_kl']:>22.5f} {b['mean_kl']:>22.5f}",
        f"{'perplexity':<26} {a['perplexity']:>22.2f} {b['perplexity']:>22.2f}",
    ]


def _cell(spread: Mapping[str, float], factor: float, shape: str) -> str:
    least, middle, most = (format(spread[name] * factor, shape) for name in ("least", "median", "most"))
    return middle if least == most else f"{middle} ({least}..{most})"
