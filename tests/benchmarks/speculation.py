"""What guessing from the chat's own text gains where a reply repeats, and what it costs where it does not.

    python tests/benchmarks/speculation.py [--model starter] [--weights int4] [--rounds 5] [--new-tokens 96] [--kind ngram] [--set key=value] [--json]

Two engines hold the model, one with speculation and one without, and take turns: each round runs every prompt once on each,
in alternating order, with the prefix index off, so that neither finds anything it left before. Replies that repeat end where the
model ends them, those to free prompts after --new-tokens. The first round is a warm-up. Printed: the median tokens/s of both, and
the median of the rounds' ratios (a ratio of neighbours in time survives a noisy machine; a ratio of medians does not).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine import Engine, SamplingParams
from engine.events import RequestUsage

_NOTE = (
    "The garden behind the house has three apple trees, a small pond and a bench made of oak. In spring the trees are white, "
    "and in autumn the grass is covered with leaves. Every Sunday my neighbour Anna comes with a basket, and we pick what is "
    "ripe. Last year we counted two hundred and twelve apples, more than ever before."
)
_LETTER = (
    "Dear Mr Miller,\n\nThank you for your letter of the third of May. We have looked at the roof of your house on Green Street and "
    "found that eleven tiles are broken and that the gutter on the north side has come loose. Our workers can begin on Monday the "
    "twentieth. They will need two days for the tiles and one more day for the gutter. The whole work costs nine hundred and forty "
    "dollars, and the price includes the tiles, the scaffold and the removal of what is old. Please move your car from the "
    "drive before eight o'clock, because the truck with the scaffold needs the space. If it rains, we will come on the first dry "
    "day of the same week. You do not have to be at home while we work.\n\nWith kind regards,\nAnna Baker"
)
_RECIPE = (
    "Apple cake for eight people. Mix two hundred grams of butter with one hundred and fifty grams of sugar until the mixture is "
    "white. Add three eggs, one after the other, and a pinch of salt. Stir in two hundred and fifty grams of flour with two spoons "
    "of baking powder. Peel four large apples, cut them into thin slices and put half of them into the dough. Fill the dough into a "
    "round form, lay the other slices on top and strew cinnamon over them. Bake the cake for fifty minutes at one hundred and "
    "eighty degrees. Let it rest for a quarter of an hour before you take it out of the form, and serve it warm with cream."
)
REPEATING = (
    f"Copy this text, but write Maria instead of Anna:\n\n{_NOTE}",
    f"Copy this letter, but write Maria instead of Anna:\n\n{_LETTER}",
    f"Repeat this recipe exactly, word for word:\n\n{_RECIPE}",
)
LONGEST_REPEAT = 320  # tokens; the model may not find its end
FREE = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain why the sky is blue to a ten year old.",
    "What should I think of before I adopt a dog?",
)


def measure(engine: Engine, prompt: str, params: SamplingParams) -> RequestUsage:
    (answer,) = engine.generate([[{"role": "user", "content": prompt}]], params)
    return answer.usage


def compare(
    engines: dict[str, Engine], prompts: tuple[str, ...], params: SamplingParams, rounds: int
) -> dict[str, float]:
    """Median tokens/s of both, the median ratio, and how many guesses were tested and right."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    ratios: list[float] = []
    tested = accepted = 0
    for number in range(rounds + 1):
        for prompt in prompts:
            order = ("off", "on") if number % 2 else ("on", "off")
            usages = {name: measure(engines[name], prompt, params) for name in order}
            if number == 0:
                continue
            its = {name: usage.tokens_per_second or 0.0 for name, usage in usages.items()}
            for name, rate in its.items():
                rates[name].append(rate)
            ratios.append(its["on"] / its["off"])
            tested += usages["on"].num_drafted
            accepted += usages["on"].num_accepted
    off, on = statistics.median(rates["off"]), statistics.median(rates["on"])
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
    repeats = SamplingParams(temperature=0, max_tokens=LONGEST_REPEAT)
    free = SamplingParams(temperature=0, max_tokens=arguments.new_tokens, ignore_eos=True)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(closing(Engine.load(arguments.model, {**settings, **its}, draft=arguments.draft)))
            for name, its in (("off", {}), ("on", {"speculation": arguments.kind}))
        }
        found = {
            "repeating": compare(engines, REPEATING, repeats, arguments.rounds),
            "free": compare(engines, FREE, free, arguments.rounds),
        }
    if arguments.json:
        print(json.dumps(found))
        return
    for name, its in found.items():
        print(f"{name + ' text:':16}{in_words(its, arguments.kind)}")


if __name__ == "__main__":
    main()
