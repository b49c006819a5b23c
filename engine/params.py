"""Sampling parameters: a frozen value that a request carries. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a reply ends.

    temperature: 0 picks the most likely token (greedy); otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 keeps all; beyond the vocabulary keeps all.
    top_p: keep the smallest set of tokens whose probability reaches top_p; at least one token stays.
    min_p: drop tokens less likely than min_p times the most likely one.
    repetition_penalty: divide (positive) or multiply (negative) logits of tokens seen in prompt or reply (CTRL, Keskar 2019).
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the reply.
    seed: None draws a fresh seed; the same seed gives the same text whatever the batch or the prefill chunks.
    logit_bias: token id -> value added to its logit.
    stop: strings that end the reply and are not part of it.
    max_tokens: None means until the context window is full.
    logprobs: how many of the most likely tokens to report beside the chosen one; None reports nothing.
    ignore_eos: go on after an end-of-text token (benchmarks).

    Raises ValueError with the remedy when a value is out of range.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more"),
            (self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more"),
            (0 <= self.top_p <= 1, "top_p", self.top_p, "between 0 and 1"),
            (0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1"),
            (
                self.repetition_penalty > 0,
                "repetition_penalty",
                self.repetition_penalty,
                "more than 0; 1 changes nothing",
            ),
            (self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 or more"),
            (self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", self.logprobs, "between 0 and 20"),
            (all(self.stop), "stop", self.stop, "made of non-empty strings"),
        )
        for fine, name, value, remedy in checks:
            if not fine:
                raise ValueError(f"{name} is {value!r}; it must be {remedy}.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0
