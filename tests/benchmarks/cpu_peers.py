"""Our engine against llama.cpp on the same weights and threads, interleaved:

    python -m tests.benchmarks.cpu_peers MODEL.gguf --llama-python PYTHON --llama-script SCRIPT [--rounds 5] [--json FILE]

PYTHON is an interpreter with llama-cpp-python, SCRIPT a program that measures it and prints one JSON object of tokens per
second (keys prefill_512, decode_at_16, decode_at_512, batch_16). llama.cpp runs twice a round: on the file as it is, and
requantized to Q4_0, its repacked fast path. Each contestant is a process of its own that loads, warms up and measures; they
take turns, so that whatever else the machine does harms all of them; medians over the rounds are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FIGURES = ("decode_at_16", "decode_at_512", "prefill_512", "batch_8", "batch_16")
# (figure, peer, ratio wanted): issue 4's table
GOALS = (
    ("decode_at_16", "as stored", 2.0),
    ("decode_at_16", "q4_0", 1.5),
    ("decode_at_512", "q4_0", 1.9),
    ("prefill_512", "q4_0", 2.2),
    ("batch_16", "q4_0", 2.5),
)
Figures = dict[str, float]


def main() -> None:
    args = _arguments()
    runs: dict[str, list[Figures]] = {"ridgeline": [], "as stored": [], "q4_0": []}
    for number in range(args.rounds):
        names = list(runs) if number % 2 == 0 else list(reversed(runs))
        for name in names:
            print(f"round {number + 1}: {name}", file=sys.stderr)
            runs[name].append(_ours(args) if name == "ridgeline" else _llama(args, name))
    medians = {name: _medians(each) for name, each in runs.items()}
    report = {"threads": args.threads, "rounds": args.rounds, "medians": medians, "ratios": _ratios(medians)}
    _print_table(medians)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--llama-script", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _ours(args: argparse.Namespace) -> Figures:
    settings = [part for pair in args.set for part in ("--set", pair)]
    found: Figures = {}
    # llama.cpp's batches have 64 tokens each to start with, so ours have too
    for extra in (["--context", "16,512", "--batch", "1"], ["--context", "64", "--batch", "8,16"]):
        command = [sys.executable, "-m", "app", "bench", "-m", str(args.model), "--json", "--prompt-tokens", "512"]
        report = _json([*command, "--new-tokens", "48", *extra, *settings])
        for run in report["runs"]:
            found.setdefault(_name(run), run["tokens_per_s"])
    return found


def _name(run: Mapping[str, object]) -> str:
    if run["phase"] == "prefill":
        return "prefill_512"
    return f"decode_at_{run['context']}" if run["batch"] == 1 else f"batch_{run['batch']}"


def _llama(args: argparse.Namespace, form: str) -> Figures:
    requantize = [] if form == "as stored" else ["--requantize", form]
    command = [args.llama_python, str(args.llama_script), str(args.model), "--threads", str(args.threads)]
    report = _json([*command, "--repeat", "2", "--new-tokens", "48", "--batch", "8,16", *requantize])
    return {name: float(report[name]) for name in FIGURES if name in report}


def _json(command: list[str]) -> dict[str, object]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def _medians(runs: list[Figures]) -> Figures:
    return {name: statistics.median(run[name] for run in runs) for name in FIGURES if all(name in run for run in runs)}


def _ratios(medians: Mapping[str, Figures]) -> list[dict[str, object]]:
    return [
        {"figure": figure, "peer": f"llama.cpp {peer}", "ratio": _ratio(medians, figure, peer), "goal": goal}
        for figure, peer, goal in GOALS
    ]


def _ratio(medians: Mapping[str, Figures], figure: str, peer: str) -> float:
    return round(medians["ridgeline"][figure] / medians[peer][figure], 2)


def _print_table(medians: Mapping[str, Figures]) -> None:
    print(
        f"{'tokens/s':16}" + "".join(f"{name:>22}" for name in ("ridgeline", "llama.cpp as stored", "llama.cpp q4_0"))
    )
    for figure in FIGURES:
        print(f"{figure:16}" + "".join(f"{medians[name].get(figure, float('nan')):22.1f}" for name in medians))
    for row in _ratios(medians):
        print(f"{row['figure']:16}{row['peer']:>24}: {row['ratio']} times (goal {row['goal']})")


if __name__ == "__main__":
    main()
