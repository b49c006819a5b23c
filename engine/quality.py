"""What a setting costs in quality: how far its predictions for a fixed text lie from full precision.

The text is read teacher-forced through the engine's own paths (``Engine.read_text``): a first part as a prompt, the rest
token by token, so that rounded weights, a rounded KV cache, a window or sparse pages are all felt as a chat feels them.
The reference is the same model with everything off and full-precision weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pydoc_data import topics
from typing import Protocol

import torch
from torch import Tensor

from engine.options import OPTIONS

DECODED_SHARE = 0.25  # of the text, read token by token as replies are written
_PLAIN_VALUES = ("none", "off", "native", "model", "full")  # of switches that can change the text


@dataclass(frozen=True, slots=True)
class Quality:
    """Against full precision, over ``num_tokens`` positions of the fixed text.

    token_agreement: share of positions whose likeliest token is the reference's. mean_kl: KL(reference || setting),
    nats per token. perplexity: of the text itself; reference_perplexity: the same at full precision.
    """

    num_tokens: int
    token_agreement: float
    mean_kl: float
    perplexity: float
    reference_perplexity: float


class ReadsText(Protocol):
    """What quality asks of an Engine."""

    @property
    def context_length(self) -> int: ...

    def encode_text(self, text: str) -> list[int]: ...

    def read_text(self, token_ids: Sequence[int], num_prefill: int) -> Iterator[Tensor]: ...


def fixed_text() -> str:
    """English about Python, shipped with every Python: the help topics, in the order of their names."""
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def fixed_tokens(engine: ReadsText, num_tokens: int) -> list[int]:
    """The first ``num_tokens`` tokens of the fixed text, fewer where the window is smaller. ValueError below 2."""
    wanted = min(num_tokens, engine.context_length - 1)
    if wanted < 2:
        raise ValueError(f"Quality needs a text of at least 2 tokens; {wanted} were asked for or fit.")
    text = fixed_text()
    tokens = engine.encode_text(text[: 12 * wanted])  # no tokenizer averages 12 characters of English per token
    return tokens[:wanted]


def full_precision() -> dict[str, str]:
    """The reference's settings: every switch that can change the text at its plain value."""
    lossy = [option for option in OPTIONS if not option.lossless]
    return {
        option.key: next((value for value in _PLAIN_VALUES if value in option.values), option.default)
        for option in lossy
    }


def read(engine: ReadsText, token_ids: Sequence[int]) -> Iterator[Tensor]:
    """Logits, fp32 [vocab], of each position of the text in order; the last quarter computed as decode steps."""
    num_prefill = max(1, round(len(token_ids) * (1 - DECODED_SHARE)))
    return chain.from_iterable(engine.read_text(token_ids, num_prefill))


def reference_rows(engine: ReadsText, token_ids: Sequence[int]) -> list[Tensor]:
    """``read`` of the reference, kept for several comparisons: 4 bytes * vocabulary per token."""
    return [row.clone() for row in read(engine, token_ids)]


def quality(reference: Iterable[Tensor], setting: Iterable[Tensor], token_ids: Sequence[int]) -> Quality:
    """Compare two readings of the same text, row by row; neither need fit in memory as a whole."""
    agreed, divergence = 0, 0.0
    surprise = reference_surprise = 0.0
    for index, (wanted, got) in enumerate(zip(reference, setting, strict=True)):
        log_p, log_q = (torch.log_softmax(row.double(), dim=-1) for row in (wanted, got))
        agreed += int(wanted.argmax() == got.argmax())
        divergence += float((log_p.exp() * (log_p - log_q)).nan_to_num(0.0).sum())
        if index + 1 < len(token_ids):
            reference_surprise -= float(log_p[token_ids[index + 1]])
            surprise -= float(log_q[token_ids[index + 1]])
    number = len(token_ids)
    assert index + 1 == number, (index + 1, number)
    return Quality(
        num_tokens=number,
        token_agreement=agreed / number,
        mean_kl=max(0.0, divergence / number),
        perplexity=math.exp(surprise / (number - 1)),
        reference_perplexity=math.exp(reference_surprise / (number - 1)),
    )
