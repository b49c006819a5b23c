"""Our decoder against the plain eager loop, interleaved: python -m tests.benchmarks.decode_vs_plain [model.gguf] [--json]

Decode at contexts of 16 and 512, prefill of 512, and our decoder with 8 chats at once. Both run in this process, turn by
turn, so that whatever else the machine does harms both; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# As engine/__init__.py has it, for both contestants; torch is imported before it here.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch

from engine.kv.cache import KvCache
from engine.model.decoder import Decoder
from engine.model.load import build_decoder
from engine.ops.cpu import CpuOps
from engine.ops.interface import Span, StepBatch
from engine.weights.source import open_source
from tests.benchmarks.plain_loop import PlainLoop

PAGE_SIZE = 16
PREFILL_TOKENS = 512
CONTEXTS = (16, 512)
CHATS = 8
TOKENS_PER_TURN = 16
WARM_UP_TOKENS = 32  # batches come to their copies of the weights over some twenty steps


class PagedChats:
    """``num_chats`` requests on pages of their own, advanced together."""

    def __init__(self, decoder: Decoder, num_chats: int, max_tokens: int) -> None:
        self.decoder = decoder
        self.pages_each = -(-max_tokens // PAGE_SIZE)
        self.cache = KvCache(decoder.spec, 1 + num_chats * self.pages_each, PAGE_SIZE, decoder.kv_dtype)
        first = range(1, 1 + num_chats * self.pages_each, self.pages_each)
        self.pages = [list(range(start, start + self.pages_each)) for start in first]
        self.length = 0

    def forward(self, token_ids: list[int]) -> torch.Tensor:
        """The same new tokens for every chat; logits [chats, vocab] after them."""
        count, end = len(token_ids), self.length + len(token_ids)
        positions = list(range(self.length, end))
        slots = [pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for pages in self.pages for p in positions]
        spans = tuple(
            Span(index * count, count, end, pages[: -(-end // PAGE_SIZE)]) for index, pages in enumerate(self.pages)
        )
        batch = StepBatch(
            torch.tensor(token_ids * len(self.pages)),
            torch.tensor(positions * len(self.pages)),
            torch.tensor(slots),
            spans,
            torch.tensor([span.start + count - 1 for span in spans]),
        )
        self.length = end
        return self.decoder.forward(batch, self.cache)

    def rewind(self, length: int) -> None:
        self.length = length


def decode_seconds(chats: PlainLoop | PagedChats, context: int) -> float:
    """Seconds per greedy token, over a few tokens from ``context`` on."""
    chats.rewind(context)
    token = 1
    started = time.perf_counter()
    for _ in range(TOKENS_PER_TURN):
        logits = chats.forward([token])
        token = int((logits if logits.dim() == 1 else logits[0]).argmax())
    return (time.perf_counter() - started) / TOKENS_PER_TURN


def prefill_seconds(chats: PlainLoop | PagedChats) -> float:
    chats.rewind(0)
    started = time.perf_counter()
    chats.forward([1 + index % 1000 for index in range(PREFILL_TOKENS)])
    return time.perf_counter() - started


def interleaved(runs: dict[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """Median seconds of each run; the order is reversed at every turn, the first turn is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            elapsed = runs[name]()
            if turn:
                seconds[name].append(elapsed)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(path: Path, scheme: str, turns: int) -> dict[str, float]:
    """tokens/s by name, and the ratios ours / plain."""
    max_tokens = max(*CONTEXTS, PREFILL_TOKENS) + TOKENS_PER_TURN + 1
    plain = PlainLoop(path, max_tokens)
    decoder = build_decoder(open_source(path), {True: CpuOps(), False: CpuOps(fused=False)}, scheme)
    ours, many = PagedChats(decoder, 1, max_tokens), PagedChats(decoder, CHATS, max_tokens)
    prompt = list(range(1, max(CONTEXTS) + 1))
    for chats in (plain, ours, many):
        chats.forward(prompt)
        for _ in range(WARM_UP_TOKENS):
            chats.rewind(len(prompt))
            chats.forward([1])
    rates: dict[str, float] = {}
    for context in CONTEXTS:
        runs: dict[str, Callable[[], float]] = {
            "plain": lambda context=context: decode_seconds(plain, context),
            "ours": lambda context=context: decode_seconds(ours, context),
            "eight": lambda context=context: decode_seconds(many, context),
        }
        seconds = interleaved(runs, turns)
        rates[f"plain decode at {context}"] = 1 / seconds["plain"]
        rates[f"our decode at {context}"] = 1 / seconds["ours"]
        rates[f"our decode at {context}, {CHATS} chats"] = CHATS / seconds["eight"]
        rates[f"ratio to plain at {context}"] = seconds["plain"] / seconds["ours"]
        rates[f"ratio of {CHATS} chats to one at {context}"] = CHATS * seconds["ours"] / seconds["eight"]
    seconds = interleaved({"plain": lambda: prefill_seconds(plain), "ours": lambda: prefill_seconds(ours)}, turns // 4)
    rates[f"plain prefill {PREFILL_TOKENS}"] = PREFILL_TOKENS / seconds["plain"]
    rates[f"our prefill {PREFILL_TOKENS}"] = PREFILL_TOKENS / seconds["ours"]
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--weights", default="int4", choices=("none", "int8", "int4"))
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rates = measure(arguments.model, arguments.weights, arguments.turns)
    if arguments.json:
        print(json.dumps(rates))
    else:
        for name, value in rates.items():
            print(f"{name:36} {value:9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
