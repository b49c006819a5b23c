"""Lossless speculation: test guessed tokens so that the text has exactly the distribution it has without guesses.

One forward pass over the last token and k guesses gives k + 1 rows of logits: row i says what may follow the text and
the first i guesses. With p the target's distribution of a row (after every sampler setting) and q the distribution the
guess d was drawn from (Leviathan et al. 2023, Chen et al. 2023):

    accept d with probability min(1, p[d] / q[d]);
    when it is rejected, draw the token from max(p - q, 0), normalized, and throw the later guesses away;
    when all are accepted, the last row gives one more token, drawn from p.

A guess made without chance (a copied n-gram, a greedy draft) is drawn from a one-hot q. Then the rule says: accept with
probability p[d], else draw from p without d. Drawing from p and comparing with d is the same law, and it uses the very
number that draws this token without speculation: a seed gives the same text with such guesses and without. For a greedy
request p is one-hot, and the rule is: accept what the target would have chosen.

How many guesses are made may depend on the text so far, never on the guesses themselves: leaving out a guess because of
what it is would change its q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.sampling import Probabilities, Row, Sampled, SamplerState, distribution, draw_from, reported, sample_row


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses at a request's next tokens. q: what each was drawn from, [vocab]; None: chosen without chance."""

    token_ids: tuple[int, ...] = ()
    q: tuple[Probabilities, ...] | None = None


NO_PROPOSAL = Proposal()


class Verified(NamedTuple):
    """New tokens of one request: the guesses found right, then one more. The last may carry an error instead.

    num_tested: guesses that were compared, so not those behind a rejected one. num_accepted: of these, found right.
    """

    sampled: list[Sampled]
    num_tested: int
    num_accepted: int


def verify(rows: NDArray[np.float32], proposal: Proposal, state: SamplerState) -> Verified:
    """rows: raw logits [k + 1, vocab] of the last token and the first k guesses. Commits the new tokens to ``state``."""
    sampled: list[Sampled] = []
    num_tested = num_accepted = 0
    for index, row in enumerate(rows):
        is_test = index < len(rows) - 1
        draft = proposal.token_ids[index] if is_test else -1
        if is_test and proposal.q is not None:
            got = _accept_or_replace(row, draft, proposal.q[index], state)
        else:
            got = sample_row(row, state)
        if got.error:
            sampled += [] if sampled else [got]  # what was accepted stands; the next step meets the error first
            break
        state.commit(got.token_id)
        sampled.append(got)
        num_tested += is_test
        if got.token_id != draft:
            break
        num_accepted += 1
    return Verified(sampled, num_tested, num_accepted)


def _accept_or_replace(row: Row, draft: int, q: Probabilities, state: SamplerState) -> Sampled:
    """The guess ``draft``, drawn from ``q``, or what replaces it."""
    p = distribution(row, state)
    if p is None:
        return sample_row(row, state)  # which says why
    token_id = draft
    if state.uniform(b"accept") * q[draft] >= p[draft]:
        residual = np.maximum(p - q, 0.0)
        # Rejected, so p[draft] < q[draft] and the residual is positive elsewhere, but for rounding where p equals q.
        token_id = draw_from(residual if residual.sum() > 0 else p, state.uniform())
    return reported(row, token_id, state.params)
