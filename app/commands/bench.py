"""``ridgeline bench``: prefill and decode measured beside what the ledger predicts, for people and for scripts."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from app.commands import Subparsers
from app.commands.session import Progress, add_draft, add_switches, chosen_settings, log_to_file, open_engine
from engine.events import EngineError, Finished, FinishReason, Phase, StepRecord
from engine.options import entry
from engine.params import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine

_WARM_UP_STEPS = 2  # of each decode run
_PREFILL_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Run:
    """One row. Seconds, bytes and FLOPs are medians over the steps of the run, per step.

    context: tokens before the measured ones (decode), or the length of the prompt (prefill).
    bandwidth_share: bytes / measured seconds, as a share of this machine's measured read bandwidth.
    """

    phase: str
    batch: int
    context: int
    tokens_per_s: float
    bytes_per_step: float
    flops_per_step: float
    memory_seconds: float
    compute_seconds: float
    measured_seconds: float
    bandwidth_share: float


def add_to(commands: Subparsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("bench", help="measure prefill and decode beside the ledger's prediction")
    parser.add_argument(
        "-m", "--model", default="starter", metavar="MODEL", help="starter, a path, or a name of 'models'"
    )
    parser.add_argument("--prompt-tokens", type=positive, default=512, metavar="N", help="prefill length (512)")
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="decode steps per run (64)")
    parser.add_argument("--batch", type=_numbers, default=[1, 4, 16], metavar="N,N", help="chats at once (1,4,16)")
    parser.add_argument("--context", type=_numbers, default=[16, 512], metavar="N,N", help="tokens before (16,512)")
    add_switches(parser)
    add_draft(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    settings = chosen_settings(arguments, replaces_best=True)  # to measure is what it is for
    if arguments.new_tokens <= _WARM_UP_STEPS + 1:
        raise ValueError(f"--new-tokens must be more than {_WARM_UP_STEPS + 1}; the first steps only warm up.")
    with log_to_file(), closing(open_engine(arguments.model, settings, arguments.draft)) as engine:
        _check_sizes(engine, arguments)
        runs = _measure(engine, arguments)
        _print(engine, runs, as_json=arguments.json)
    return 0


def _check_sizes(engine: Engine, arguments: argparse.Namespace) -> None:
    window = engine.info.context_length
    longest = max(arguments.prompt_tokens + 1, max(arguments.context) + arguments.new_tokens)
    if longest > window:
        raise ValueError(
            f"{longest} tokens do not fit this model's window of {window}. Lower --prompt-tokens or --context."
        )
    limit = engine.options.number("max_batch")
    if max(arguments.batch) > limit:
        largest = entry("max_batch").values[-1]
        remedy = f"--set max_batch={largest} allows more" if str(limit) != largest else "Lower --batch"
        raise ValueError(f"--batch {max(arguments.batch)} is above the batch limit of {limit}. {remedy}.")


def _measure(engine: Engine, arguments: argparse.Namespace) -> list[Run]:
    progress = Progress()
    prompts = _Prompts(engine.info.vocab_size)
    bandwidth = engine.info.machine.read_bytes_per_second
    progress("Warming up", 0.0)
    _records(engine, prompts.fresh(1, 32), 4)
    runs = [_prefill(engine, prompts, arguments.prompt_tokens, bandwidth)]
    cells = [(batch, context) for context in arguments.context for batch in arguments.batch]
    for index, (batch, context) in enumerate(cells):
        progress(f"Decoding, batch {batch}, context {context}", index / len(cells))
        records = _records(engine, prompts.fresh(batch, context), arguments.new_tokens)
        runs.append(_decode(records, batch, context, bandwidth))
    progress.clear()
    learned = engine.info.machine.read_bytes_per_second  # a step that read faster than the measurement corrects it
    return [replace(run, bandwidth_share=run.bandwidth_share * bandwidth / learned) for run in runs]


def _prefill(engine: Engine, prompts: _Prompts, num_tokens: int, bandwidth: float) -> Run:
    """The median of a few whole prompts; a prompt may take several steps."""
    timed = []
    for _ in range(_PREFILL_REPEATS):
        steps = [step for step in _records(engine, prompts.fresh(1, num_tokens), 1) if step.phase is Phase.PREFILL]
        timed.append((sum(step.step_seconds for step in steps), steps))
    seconds, steps = sorted(timed, key=lambda pair: pair[0])[len(timed) // 2]
    return _row("prefill", 1, num_tokens, num_tokens / seconds, steps, bandwidth)


def _decode(records: Sequence[StepRecord], batch: int, context: int, bandwidth: float) -> Run:
    """Only steps in which all chats that can share a step did, and none was still in prefill."""
    decode = [step for step in records if step.phase is Phase.DECODE]
    together = max((step.batch for step in decode), default=0)
    steps = [step for step in decode if step.batch == together][_WARM_UP_STEPS:]
    if not steps:
        raise ValueError(f"With batch {batch} no step decoded alone. Raise --new-tokens, or --set token_budget higher.")
    rate = statistics.median(step.num_new_tokens / step.step_seconds for step in steps)
    return _row("decode", batch, context, rate, steps, bandwidth)


def _row(phase: str, batch: int, context: int, rate: float, steps: Sequence[StepRecord], bandwidth: float) -> Run:
    def median(values: Sequence[float]) -> float:
        return float(statistics.median(values))

    return Run(
        phase=phase,
        batch=batch,
        context=context,
        tokens_per_s=rate,
        bytes_per_step=median([step.cost.total_bytes for step in steps]),
        flops_per_step=median([step.cost.total_flops for step in steps]),
        memory_seconds=median([step.memory_seconds for step in steps]),
        compute_seconds=median([step.compute_seconds for step in steps]),
        measured_seconds=median([step.step_seconds for step in steps]),
        bandwidth_share=median([step.cost.total_bytes / step.step_seconds / bandwidth for step in steps]),
    )


def _records(engine: Engine, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> list[StepRecord]:
    """Every step of generating ``new_tokens`` for each prompt, all at once, whatever the model would rather say."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    waiting = {engine.submit(prompt, params) for prompt in prompts}
    records: list[StepRecord] = []
    while waiting:
        for event in engine.step():
            if isinstance(event, StepRecord):
                records.append(event)
            elif isinstance(event, Finished):
                waiting.discard(event.request_id)
                if event.reason is FinishReason.ERROR:
                    raise ValueError(event.message)
            elif isinstance(event, EngineError):
                raise ValueError(event.message)
    return records


class _Prompts:
    """Random token ids, never the same prompt twice, so that the prefix index cannot help."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(0)
        self._vocab_size = vocab_size

    def fresh(self, count: int, num_tokens: int) -> list[tuple[int, ...]]:
        return [tuple(self._random.randrange(self._vocab_size) for _ in range(num_tokens)) for _ in range(count)]


def _print(engine: Engine, runs: Sequence[Run], as_json: bool) -> None:
    info = engine.info
    if as_json:
        report = {
            "model": info.name,
            "stored_format": info.stored_format,
            "weight_bytes": info.weight_bytes,
            "runs": [asdict(run) for run in runs],
            "options": dict(engine.options),
            "machine": {**asdict(info.machine), "flops_per_second": dict(info.machine.flops_per_second)},
            "active_paths": dict(info.active_paths),
        }
        print(json.dumps(report, indent=2))
        return
    print(
        f"{info.name}, {info.stored_format}; {info.machine.name}: {info.machine.read_bytes_per_second / 1e9:.1f} GB/s read"
    )
    print(
        f"{'phase':<8} {'batch':>5} {'context':>7} {'tokens/s':>9} {'step ms':>8} {'memory':>7} {'compute':>8} {'bandwidth':>9}"
    )
    for row in runs:
        print(
            f"{row.phase:<8} {row.batch:>5} {row.context:>7} {row.tokens_per_s:>9.1f} {1e3 * row.measured_seconds:>8.1f} "
            f"{1e3 * row.memory_seconds:>7.1f} {1e3 * row.compute_seconds:>8.1f} {row.bandwidth_share:>9.0%}"
        )
    print("; ".join(f"{op}: {path}" for op, path in info.active_paths.items()), file=sys.stderr)


def positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def _numbers(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]
