"""What guessing from the chat's own text gains where a reply repeats, and what it costs where it does not.

    python tests/benchmarks/speculation.py [--model starter] [--weights int4] [--rounds 5] [--new-tokens 96] [--kind ngram] [--set key=value] [--json]

Each round runs every prompt once without and once with speculation, in alternating order and with the prefix index off,
so that neither finds anything the other left. The first round is a warm-up. Printed: the median tokens/s of both, and the
median of the rounds' ratios (a ratio of neighbours in time survives a noisy machine; a ratio of medians does not).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine import Engine, SamplingParams
from engine.events import RequestUsage

_NOTE = (
    "The garden behind the house has three apple trees, a small pond and a bench made of oak. In spring the trees are white, "
    "and in autumn the grass is covered with leaves. Every Sunday my neighbour Anna comes with a basket, and we pick what is "
    "ripe. Last year we counted two hundred and twelve apples, more than ever before."
)
_CODE = (
    "def total(items):\n    result = 0\n    for item in items:\n        if item.price > 0:\n            result += item.price * item.count\n"
    "    return result\n\n\ndef average(items):\n    if not items:\n        return 0\n    return total(items) / len(items)\n"
)
REPEATING = (
    f"Repeat this text exactly, word for word:\n\n{_NOTE}",
    f"Copy this text, but write Maria instead of Anna:\n\n{_NOTE}",
    f"Repeat this code exactly, and nothing else:\n\n{_CODE}",
)
FREE = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain why the sky is blue to a ten year old.",
    "What should I think of before I adopt a dog?",
)


def measure(engine: Engine, prompt: str, kind: str, new_tokens: int) -> RequestUsage:
    engine.apply({"speculation": kind})
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    (answer,) = engine.generate([[{"role": "user", "content": prompt}]], params)
    return answer.usage


def compare(engine: Engine, prompts: tuple[str, ...], arguments: argparse.Namespace) -> dict[str, float]:
    """Median tokens/s of both, the median ratio, and how many guesses were tested and right."""
    rates: dict[str, list[float]] = {"off": [], arguments.kind: []}
    ratios: list[float] = []
    tested = accepted = 0
    for number in range(arguments.rounds + 1):
        for prompt in prompts:
            order = ("off", arguments.kind) if number % 2 else (arguments.kind, "off")
            usages = {kind: measure(engine, prompt, kind, arguments.new_tokens) for kind in order}
            if number == 0:
                continue
            its = {kind: usage.tokens_per_second or 0.0 for kind, usage in usages.items()}
            for kind, rate in its.items():
                rates[kind].append(rate)
            ratios.append(its[arguments.kind] / its["off"])
            tested += usages[arguments.kind].num_drafted
            accepted += usages[arguments.kind].num_accepted
    off, on = statistics.median(rates["off"]), statistics.median(rates[arguments.kind])
    return {"off": off, "on": on, "ratio": statistics.median(ratios), "tested": tested, "accepted": accepted}


def in_words(found: dict[str, float], kind: str) -> str:
    tested = int(found["tested"])
    share = f"{found['accepted'] / tested:.0%} of {tested:,} guesses right" if tested else "no guesses"
    return f"off {found['off']:.1f}, {kind} {found['on']:.1f} tokens/s; ratio {found['ratio']:.2f} ({share})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="starter")
    parser.add_argument("--draft", help="a smaller model with the same vocabulary, for --kind draft")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--kind", default="ngram", choices=["ngram", "draft", "layer_skip"])
    parser.add_argument("--length", default="adaptive")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    settings = {"weights": arguments.weights, "prefix": "off", "draft_length": arguments.length}
    settings.update(pair.split("=", 1) for pair in arguments.set)
    with closing(Engine.load(arguments.model, settings, draft=arguments.draft)) as engine:
        found = {"repeating": compare(engine, REPEATING, arguments), "free": compare(engine, FREE, arguments)}
    if arguments.json:
        print(json.dumps(found))
        return
    for name, its in found.items():
        print(f"{name + ' text:':16}{in_words(its, arguments.kind)}")


if __name__ == "__main__":
    main()
