"""Our engine against llama.cpp on the same weights and threads, interleaved:

    python -m tests.benchmarks.cpu_peers MODEL.gguf --llama-python PYTHON --llama-script SCRIPT [--rounds 5] [--json FILE] [--readme]

PYTHON is an interpreter with llama-cpp-python, SCRIPT a program that measures it and prints one JSON object of tokens per
second (keys prefill_512, decode_at_16, decode_at_512, batch_16). llama.cpp runs twice a round: on the file as it is, and
requantized to Q4_0, its repacked fast path; so do we: with activations in 8 bits, the default and what llama.cpp does, and in
16. Each contestant is a process of its own that loads, warms up and measures; they take turns, so that whatever else
the machine does harms all of them; medians over the rounds are compared. Beside the peers stand our own share of the
memory's bandwidth and what n-gram speculation gains on text that repeats. ``--readme`` writes the README's table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BEGIN = "<!-- peers:begin (written by tests/benchmarks/cpu_peers.py) -->"
END = "<!-- peers:end -->"

FIGURES = {
    "decode_at_16": "one chat, context 16",
    "decode_at_512": "one chat, context 512",
    "prefill_512": "reading a prompt of 512",
    "batch_8": "8 chats, in all",
    "batch_16": "16 chats, in all",
}
OURS = {"ridgeline": (), "ridgeline 16 bits": ("activations=none",)}
PEERS = {"llama.cpp as stored": (), "llama.cpp Q4_0": ("--requantize", "q4_0")}
# (figure, peer, ratio wanted): issue 4's table
GOALS = (
    ("decode_at_16", "llama.cpp as stored", 2.0),
    ("decode_at_16", "llama.cpp Q4_0", 1.5),
    ("decode_at_512", "llama.cpp Q4_0", 1.9),
    ("prefill_512", "llama.cpp Q4_0", 2.2),
    ("batch_16", "llama.cpp Q4_0", 2.5),
)
SHARE, NGRAM = "bandwidth_share", "ngram_on_repeats"  # more figures of ours, with goals of 0.75 and 1.8
Figures = dict[str, float]


def main() -> None:
    args = _arguments()
    runs: dict[str, list[Figures]] = {name: [] for name in (*OURS, *PEERS)}
    machine: dict[str, object] = {}
    for number in range(args.rounds):
        names = list(runs) if number % 2 == 0 else list(reversed(runs))
        for name in names:
            print(f"round {number + 1}: {name}", file=sys.stderr)
            runs[name].append(_ours(args, OURS[name], machine) if name in OURS else _llama(args, PEERS[name]))
    medians = {name: _medians(each) for name, each in runs.items()}
    report = {
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "model": args.model.name,
        "machine": machine,
        "threads": args.threads,
        "rounds": args.rounds,
        "medians": medians,
        "ratios": _ratios(medians),
    }
    print(_table(report))
    for row in report["ratios"]:
        print(f"{row['ours']:18} {row['figure']:14} to {row['peer']:20}: {row['ratio']} times (goal {row['goal']})")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.readme:
        _write_readme(report, args.llama_note)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--llama-script", type=Path, required=True)
    parser.add_argument("--llama-note", default="", help="how that llama.cpp was built, for the README")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--readme", action="store_true")
    return parser.parse_args()


def _ours(args: argparse.Namespace, settings: tuple[str, ...], machine: dict[str, object]) -> Figures:
    switches = [part for pair in settings for part in ("--set", pair)]
    found: Figures = {}
    # llama.cpp's batches have 64 tokens each to start with, so ours have too
    for extra in (["--context", "16,512", "--batch", "1"], ["--context", "64", "--batch", "8,16"]):
        command = [sys.executable, "-m", "app", "bench", "-m", str(args.model), "--json", "--prompt-tokens", "512"]
        report = _json([*command, "--new-tokens", "48", *extra, *switches])
        machine.update(report["machine"])
        for run in report["runs"]:
            found.setdefault(_name(run), run["tokens_per_s"])
            if run["phase"] == "decode" and run["context"] == 16:
                found[SHARE] = run["bandwidth_share"]
    command = [sys.executable, str(ROOT / "tests/benchmarks/speculation.py"), "--model", str(args.model), "--json"]
    report = _json([*command, "--rounds", "1", *switches])
    found[NGRAM] = report["repeating"]["ratio"]
    return found


def _name(run: Mapping[str, object]) -> str:
    if run["phase"] == "prefill":
        return "prefill_512"
    return f"decode_at_{run['context']}" if run["batch"] == 1 else f"batch_{run['batch']}"


def _llama(args: argparse.Namespace, requantize: tuple[str, ...]) -> Figures:
    command = [args.llama_python, str(args.llama_script), str(args.model), "--threads", str(args.threads)]
    report = _json([*command, "--repeat", "2", "--new-tokens", "48", "--batch", "8,16", *requantize])
    return {name: float(report[name]) for name in FIGURES if name in report}


def _json(command: list[str]) -> dict[str, object]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def _medians(runs: list[Figures]) -> Figures:
    names = (*FIGURES, SHARE, NGRAM)
    return {name: statistics.median(run[name] for run in runs) for name in names if all(name in run for run in runs)}


def _ratios(medians: Mapping[str, Figures]) -> list[dict[str, object]]:
    return [
        {
            "ours": ours,
            "figure": figure,
            "peer": peer,
            "ratio": round(medians[ours][figure] / medians[peer][figure], 2),
            "goal": goal,
        }
        for ours in OURS
        for figure, peer, goal in GOALS
    ]


def _table(report: Mapping[str, object]) -> str:
    """One Markdown table: tokens/s, and each of ours as a multiple of llama.cpp's better form."""
    medians: dict[str, Figures] = report["medians"]
    lines = [
        "| tokens/s | "
        + " | ".join(("Ridgeline", "Ridgeline, `activations=none`", *PEERS))
        + " | to llama.cpp's best |",
        "|---|" + "---|" * (len(medians) + 1),
    ]
    for figure, title in FIGURES.items():
        best = max(medians[peer][figure] for peer in PEERS)
        cells = [f"{medians[name][figure]:.0f}" for name in medians]
        ratios = ", ".join(f"{medians[ours][figure] / best:.2f}" for ours in OURS)
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {ratios} |")
    shares = " | ".join(f"{medians[ours][SHARE]:.0%}" for ours in OURS)
    gains = " | ".join(f"{medians[ours][NGRAM]:.2f} times" for ours in OURS)
    lines.append(f"| of the measured read bandwidth, one chat | {shares} | | | |")
    lines.append(f"| with n-gram speculation, repeating a text | {gains} | | | |")
    return "\n".join(lines)


def _write_readme(report: Mapping[str, object], llama_note: str) -> None:
    machine = report["machine"]
    where = (
        f"{report['model']} on {machine['name']}, {machine['read_bytes_per_second'] / 1e9:.0f} GB/s read; "
        f"{report['date']}; medians of {report['rounds']} interleaved rounds. llama.cpp through llama-cpp-python{llama_note}, on the file "
        "as it is and requantized to Q4_0, its fast path. The last column gives both of ours."
    )
    before, begin, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "the README lost its markers"
    README.write_text(f"{before}{BEGIN}\n\n{where}\n\n{_table(report)}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
