"""Help for tests that run a model on pages without the pool: hand-made page lists, batches of any mixture of spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.kv.cache import KvCache
from engine.model.decoder import Decoder
from engine.ops.interface import Span, StepBatch


@dataclass
class Text:
    """One request: its tokens, the pages it lies in and how many tokens are computed."""

    token_ids: list[int]
    pages: list[int]
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)  # [vocab] of every position computed so far


def scattered_pages(num_texts: int, num_tokens: int, page_size: int, seed: int = 0) -> list[list[int]]:
    """Disjoint page lists in random order, none of them page 0."""
    each = -(-num_tokens // page_size)
    order = torch.randperm(num_texts * each, generator=torch.Generator().manual_seed(seed)) + 1
    return [[int(page) for page in order[i * each : (i + 1) * each]] for i in range(num_texts)]


def make_cache(decoder: Decoder, num_pages: int, page_size: int, fill: float = 0.0) -> KvCache:
    """A cache whose never-written slots hold ``fill``, but for page 0, which is zeros."""
    cache = KvCache(decoder.spec, num_pages, page_size, decoder.kv_dtype)
    for index in range(decoder.spec.num_layers):
        for parts in (cache.layer(index).keys, cache.layer(index).values):
            for part in parts:
                part[1:] = fill
    return cache


def make_batch(parts: Sequence[tuple[Text, int]], page_size: int, wanted: Sequence[int] | None = None) -> StepBatch:
    """A step that computes ``count`` more tokens of each text; logits of all rows unless ``wanted`` names some."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    for text, count in parts:
        start, end = text.num_computed, text.num_computed + count
        spans.append(Span(len(token_ids), count, end, text.pages))
        token_ids += text.token_ids[start:end]
        positions += range(start, end)
        slots += [text.pages[p // page_size] * page_size + p % page_size for p in range(start, end)]
    rows = range(len(token_ids)) if wanted is None else wanted
    return StepBatch(
        torch.tensor(token_ids),
        torch.tensor(positions),
        torch.tensor(slots),
        tuple(spans),
        torch.tensor(list(rows), dtype=torch.int64),
    )


def advance(decoder: Decoder, cache: KvCache, parts: Sequence[tuple[Text, int]]) -> None:
    """Run one step and keep every row's logits with its text."""
    batch = make_batch(parts, cache.page_size)
    logits = decoder.forward(batch, cache)
    for (text, count), span in zip(parts, batch.spans, strict=True):
        text.logits += logits[span.start : span.start + count].unbind()
        text.num_computed += count


def run_in_chunks(
    decoder: Decoder, token_ids: Sequence[int], chunk: int, page_size: int = 16, fill: float = 0.0
) -> Tensor:
    """Logits [len, vocab] of one text computed ``chunk`` tokens at a time, alone in a cache of scattered pages."""
    (pages,) = scattered_pages(1, len(token_ids), page_size)
    cache = make_cache(decoder, len(pages) + 1, page_size, fill)
    text = Text(list(token_ids), pages)
    while text.num_computed < len(token_ids):
        advance(decoder, cache, [(text, min(chunk, len(token_ids) - text.num_computed))])
    return torch.stack(text.logits)
