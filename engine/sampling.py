"""The sampler: from one row of logits per request to one token per request.

Order of the steps (the order transformers uses): repetition, presence and frequency penalties, logit bias, temperature,
top-k, top-p over what top-k left, min-p. Each step sees what the step before it left. min-p therefore compares
probabilities *after* the temperature, and always keeps the most likely token. Of equally likely tokens the lower id comes
first.

A draw is an inverse-CDF draw with a uniform number that is a keyed hash of (seed, index of the draw): nothing else in the
batch, no prefill chunk and no preemption can move it. The idea of a counter-based generator is Salmon et al. 2011
("Parallel random numbers: as easy as 1, 2, 3"); BLAKE2b serves as the hash.

Log-probabilities are those of the model: natural log of the softmax of the raw logits, before penalties and temperature.

Rows are sampled with numpy on one core. A row is a few hundred kilobytes, so a parallel torch op would spend more on
waking its threads than on the row, and on a small machine those threads belong to the next step.
"""

from __future__ import annotations

import copy
import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.events import TokenLogprob
from engine.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

Row = NDArray[np.float32]  # [vocab]
Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]  # [vocab]

_NOT_A_NUMBER = "The model produced values that are not numbers (NaN); this reply cannot go on."
_ALL_MASKED = "Every token is masked; remove the logit bias that forbids them all."


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token. ``error`` is non-empty (and token_id -1) when this row could not be sampled."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str = ""


class SamplerState:
    """What the sampler remembers of one request.

    prompt_token_ids: read once, for the repetition penalty.
    vocab_size: ids the tokenizer knows; higher rows of the logits are padding and can never be chosen. None: all rows.
    seed: the seed in use, drawn from the system when ``params.seed`` is None.
    num_drawn: tokens committed so far, and so the index of the next draw.
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Iterable[int] = (), vocab_size: int | None = None
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.num_drawn = 0
        self._key = hashlib.blake2b(str(self.seed).encode(), digest_size=32).digest()  # Python integers have no end
        self._generated: dict[int, int] = {}
        self._seen = set(prompt_token_ids) if params.repetition_penalty != 1.0 else set()
        self._seen_mask: NDArray[np.bool_] | None = None
        self._counts: Row | None = None
        self.is_plain_greedy = params.is_greedy and params.logprobs is None and not self._shifts_logits

    @property
    def _shifts_logits(self) -> bool:
        params = self.params
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        return bool(penalised or params.logit_bias)

    def commit(self, token_id: int) -> None:
        """Record a token that became part of the reply. Rejected drafts never come here."""
        self.num_drawn += 1
        self._generated[token_id] = self._generated.get(token_id, 0) + 1
        if self._seen_mask is not None and token_id < self._seen_mask.size:
            self._seen_mask[token_id] = True
        if self._counts is not None and token_id < self._counts.size:
            self._counts[token_id] += 1

    def uniform(self, purpose: bytes = b"") -> float:
        """The number in [0, 1) that decides the next draw: a function of (seed, num_drawn) alone, 53 bits.

        purpose: names a second, independent number for the same draw (speculation tests a draft with one).
        """
        digest = hashlib.blake2b(self.num_drawn.to_bytes(8, "little") + purpose, key=self._key, digest_size=8).digest()
        return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def fork(self) -> SamplerState:
        """A copy that can commit tokens which may never become part of the reply."""
        other = copy.copy(self)
        other._generated = dict(self._generated)
        other._seen_mask = None if self._seen_mask is None else self._seen_mask.copy()
        other._counts = None if self._counts is None else self._counts.copy()
        return other

    def shifted(self, row: Row) -> Row:
        """``row`` [vocab] with penalties and bias; a new array when anything changes."""
        if not self._shifts_logits:
            return row
        params, row = self.params, row.copy()
        if params.repetition_penalty != 1.0:
            seen = self._mask_of_seen(row.size)
            values = row[seen]
            row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            counts = self._count_of_generated(row.size)
            row -= counts * np.float32(params.frequency_penalty)
            row -= (counts > 0) * np.float32(params.presence_penalty)
        for token_id, value in params.logit_bias.items():
            if 0 <= token_id < row.size:
                row[token_id] += value
        return row

    def _mask_of_seen(self, size: int) -> NDArray[np.bool_]:
        if self._seen_mask is None or self._seen_mask.size != size:
            self._seen_mask = np.zeros(size, dtype=np.bool_)
            self._seen_mask[[i for i in self._seen | self._generated.keys() if 0 <= i < size]] = True
        return self._seen_mask

    def _count_of_generated(self, size: int) -> Row:
        if self._counts is None or self._counts.size != size:
            self._counts = np.zeros(size, dtype=np.float32)
            for token_id, count in self._generated.items():
                if token_id < size:
                    self._counts[token_id] = count
        return self._counts


def sample(logits: Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
    """Choose one token per row.

    logits: fp32 [R, vocab], possibly with padding rows beyond ``vocab_size``. states: one per row, in order.
    A row that cannot be sampled (NaN, or every token masked) yields a Sampled with ``error``; the others are unharmed.
    """
    assert logits.ndim == 2, logits.shape
    assert logits.shape[0] == len(states), (logits.shape, len(states))
    rows: Row = logits.detach().cpu().numpy()
    return [sample_row(rows[i, : state.vocab_size], state) for i, state in enumerate(states)]


def sample_row(raw: Row, state: SamplerState) -> Sampled:
    """``sample`` for one row [vocab] without padding."""
    params = state.params
    row = state.shifted(raw)
    top_id = int(row.argmax())  # NaN counts as the largest, so one pass also finds it
    top = float(row[top_id])
    if math.isnan(top):
        return Sampled(-1, error=_NOT_A_NUMBER)
    if top == -math.inf:
        return Sampled(-1, error=_ALL_MASKED)
    token_id = top_id if params.is_greedy else _draw(row, top, state)
    return reported(raw, token_id, params)


def reported(raw: Row, token_id: int, params: SamplingParams) -> Sampled:
    """``token_id``, chosen over the raw logits ``raw`` [vocab], with the log-probabilities that were asked for."""
    if params.logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, _logprob_of(raw, token_id, params.logprobs))


def distribution(raw: Row, state: SamplerState) -> Probabilities | None:
    """The probabilities [vocab] that ``sample_row`` draws from, after every setting; None when it could not draw."""
    row = state.shifted(raw)
    top_id = int(row.argmax())
    top = float(row[top_id])
    if math.isnan(top) or top == -math.inf:
        return None
    probabilities = np.zeros(row.size, dtype=np.float64)
    if state.params.is_greedy:
        probabilities[top_id] = 1.0
        return probabilities
    weights, ids = _weights(row, top, state.params)
    probabilities[slice(None) if ids is None else ids] = weights
    probabilities /= probabilities.sum()
    return probabilities


def draw_from(probabilities: Probabilities, uniform: float) -> int:
    """The token that ``uniform``, a number in [0, 1), draws from ``probabilities`` [vocab] (any positive total)."""
    return _pick(probabilities, uniform)


def _draw(row: Row, top: float, state: SamplerState) -> int:
    """One draw from the filtered distribution of ``row`` [vocab] whose maximum is ``top``."""
    weights, ids = _weights(row, top, state.params)
    index = _pick(weights, state.uniform())
    return index if ids is None else int(ids[index])


def _weights(row: Row, top: float, params: SamplingParams) -> tuple[Row, Ids | None]:
    """What is left of ``row`` [vocab], whose maximum is ``top``, after temperature and filters: (weights, their ids).

    Weights are not normalized; ids None means that they are the tokens' own.
    """
    if top == math.inf:  # a bias meant as "always" leaves only the tokens that reach it
        weights = (row == math.inf).astype(np.float32)
    else:
        # The maximum goes first: a tiny temperature then gives exp(-large) = 0 and never inf - inf.
        weights = np.exp((row - np.float32(top)) / np.float32(max(params.temperature, 1e-30)))
    ids: Ids | None = None
    if 0 < params.top_k < row.size:
        weights, ids = _top_k(weights, params.top_k)
    if params.top_p < 1.0:
        weights, ids = _top_p(weights, ids, params.top_p)
    if params.min_p > 0:
        weights = np.where(weights >= params.min_p, weights, 0)  # the largest weight is 1
    return weights, ids


def _top_k(weights: Row, k: int) -> tuple[Row, Ids]:
    """The k largest, in the order of their ids: (weights, ids)."""
    threshold = np.partition(weights, weights.size - k)[weights.size - k]
    ids = _largest(weights, threshold, k)
    return weights[ids], ids


def _top_p(weights: Row, ids: Ids | None, top_p: float) -> tuple[Row, Ids]:
    """The smallest set of the likeliest that reaches ``top_p`` of the whole weight, in the order of ids: (weights, ids).

    Only candidates are sorted: all weights under (1 - top_p) * total / count together weigh less than
    (1 - top_p) * total, so the others already reach top_p. Values are sorted, not indices: numpy does that several
    times faster.
    """
    total = float(weights.sum(dtype=np.float64))
    falling = -np.sort(-weights[weights >= (1.0 - top_p) * total / weights.size])
    before = np.cumsum(falling, dtype=np.float64) - falling
    count = max(1, int(np.searchsorted(before, top_p * total, side="left")))
    kept = _largest(weights, falling[count - 1], count)
    return weights[kept], kept if ids is None else ids[kept]


def _largest(weights: Row, threshold: np.float32, count: int) -> Ids:
    """Ids of the ``count`` largest, given the smallest of them; of equals at the threshold the lower ids."""
    ids = np.flatnonzero(weights >= threshold)
    surplus = ids.size - count
    if surplus == 0:
        return ids
    equal = np.flatnonzero(weights[ids] == threshold)
    return np.delete(ids, equal[equal.size - surplus :])


def _pick(weights: Row | Probabilities, uniform: float) -> int:
    """The index whose share of the cumulative weight holds ``uniform``. Never one of weight zero."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding can put the target on the very total; the last token of positive weight owns that point.
    return index if index < weights.size else int(np.flatnonzero(weights)[-1])


def _logprob_of(raw: Row, token_id: int, num_top: int) -> TokenLogprob:
    peak = float(raw.max())
    if not math.isfinite(peak):  # the model itself masked everything or overflowed; only a bias made this draw possible
        return TokenLogprob(token_id, math.nan)
    total = peak + math.log(float(np.exp(raw - np.float32(peak)).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, ids = _top_k(raw, min(num_top, raw.size))
        order = np.argsort(-values, kind="stable")
        top = tuple((int(ids[i]), float(values[i]) - total) for i in order)
    return TokenLogprob(token_id, float(raw[token_id]) - total, top)
