"""Guesses by a smaller model with the same vocabulary, run a few tokens ahead of the target.

The draft model keeps keys and values of its own, in pages of its own. Like the scheduler's requests its copies of the texts
chase the target's: before guessing, ``num_computed`` is lowered to what still agrees with the text (rejected guesses), and
what is missing is computed. That also closes the hole which a fully accepted guess leaves: the last guess was drawn but
never run through the draft, so it is simply one more token behind.

A greedy request gets the draft's likeliest tokens; a sampled one gets draws from the draft's distribution under the
request's own settings, penalties for earlier guesses included, and the distributions go to the verifier as q.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.accounting import ledger_model
from engine.events import NO_COST, StepCost
from engine.kv.cache import KvCache
from engine.kv.pool import PagePool
from engine.model.spec import ModelSpec
from engine.ops.interface import Model
from engine.options import Options
from engine.roofline.ledger import LedgerItem, account
from engine.runner import build_batch
from engine.sampling import Probabilities, Row, SamplerState, distribution, draw_from, sample_row
from engine.scheduler import Item, Request, StepPlan
from engine.speculation.proposer import Wanted
from engine.speculation.verify import Proposal

CATCH_UP_TOKENS = 512  # that one step may compute before guessing; a longer text is caught up with over several steps


@dataclass(slots=True)
class _Run:
    """One request's guesses in the making. follower: the draft's own copy of the text, guesses included."""

    follower: Request
    state: SamplerState  # forked: it has committed the guesses
    most: int
    token_ids: list[int] = field(default_factory=list)
    q: list[Probabilities] = field(default_factory=list)

    @property
    def proposal(self) -> Proposal:
        return Proposal(tuple(self.token_ids), None if self.state.params.is_greedy else tuple(self.q))

    def draw(self, row: Row) -> bool:
        """Guess one token from the draft's logits ``row`` [vocab]; False when it cannot or has enough."""
        if self.state.params.is_greedy:
            sampled = sample_row(row, self.state)
            if sampled.error:
                return False
            token_id = sampled.token_id
        else:
            q = distribution(row, self.state)
            if q is None:
                return False
            token_id = draw_from(q, self.state.uniform(b"draft"))
            self.q.append(q)
        self.state.commit(token_id)
        self.token_ids.append(token_id)
        self.follower.tokens.append(token_id)
        return len(self.token_ids) < self.most


class DraftProposer:
    """vocab_size: tokens that may be guessed, the target's; rows of the draft's head beyond it are padding.

    options: as far as they change what running ``model`` costs.
    num_pages: of the draft's own cache; a request that finds no page is not guessed for.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        spec: ModelSpec,
        vocab_size: int,
        num_pages: int,
        page_size: int,
        options: Options | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self.spec = spec
        self._vocab_size = vocab_size
        self._cache = KvCache(spec, num_pages, page_size, model.kv_dtype)
        self._ledger_model = ledger_model(spec, model, self._cache.layout, options or Options(), page_size)
        self._cost = NO_COST
        self._pool = PagePool(num_pages, page_size)
        self._followers: dict[int, Request] = {}
        self._agreed: dict[int, int] = {}  # tokens of a follower known to be the text's, not guesses

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Proposal]:
        runs, items = self._catch_up(wanted)
        going = runs
        while items:
            rows = self._forward(items)
            going = [run for run, row in zip(going, rows, strict=True) if run.draw(row)]
            items = [Item.next_of(run.follower, 1) for run in going]
        return {run.follower.request_id: run.proposal for run in runs if run.token_ids}

    def take_cost(self) -> StepCost:
        cost, self._cost = self._cost, NO_COST
        return cost

    def forget(self, request_id: int) -> None:
        follower = self._followers.pop(request_id, None)
        self._agreed.pop(request_id, None)
        if follower:
            self._pool.release(follower.pages)

    def check_integrity(self) -> None:
        self._pool.check_integrity(follower.pages for follower in self._followers.values())

    # -- following the text -------------------------------------------------------------------

    def _catch_up(self, wanted: Sequence[Wanted]) -> tuple[list[_Run], list[Item]]:
        """What the followers miss of their texts: (those whose last token is among it, so that they can guess; all)."""
        here = {each.request.request_id for each in wanted}
        runs: list[_Run] = []
        items: list[Item] = []
        budget = CATCH_UP_TOKENS
        for request, state, most in wanted:
            follower = self._follow(request)
            if not self._has_room(follower, most, here):
                continue
            item = Item.next_of(follower, min(follower.num_behind, budget))
            if item.count:
                items.append(item)
                budget -= item.count
            if item.wants_logits:
                runs.append(_Run(follower, state.fork(), most))
        return runs, items

    def _follow(self, request: Request) -> Request:
        """The request's follower, holding its text and what is still true of what was computed."""
        number = request.request_id
        follower = self._followers.setdefault(number, Request(number, [], 0, 0))
        agreed = self._agreed.get(number, 0)
        most = min(follower.num_computed, request.num_tokens - 1)
        while agreed < most and follower.tokens[agreed] == request.tokens[agreed]:
            agreed += 1
        follower.num_computed = self._agreed[number] = min(agreed, most)
        follower.tokens[agreed:] = request.tokens[agreed:]
        return follower

    def _has_room(self, follower: Request, most: int, here: set[int]) -> bool:
        """Pages for the text and its guesses. Followers of chats that do not decode now make room."""
        num_tokens = follower.num_tokens + most
        if num_tokens > self.spec.max_position or max(follower.tokens) >= self.spec.vocab_size:
            return False
        missing = max(0, -(-num_tokens // self._pool.page_size) - len(follower.pages))
        fresh = self._pool.allocate(missing, after=follower.pages[-1] if follower.pages else None)
        if fresh is None:
            for number in [number for number in self._followers if number not in here]:
                self.forget(number)
            fresh = self._pool.allocate(missing)
        if fresh is None:
            return False
        follower.pages.extend(fresh)
        return True

    # -- running the draft --------------------------------------------------------------------

    def _forward(self, items: list[Item]) -> Iterator[Row]:
        """Run ``items``; the rows that were asked for, over the target's vocabulary."""
        with torch.inference_mode():
            batch = build_batch(StepPlan(tuple(items)), self._pool.page_size)
            logits: Row = self._model.forward(batch, self._cache).cpu().numpy()
        counted = [LedgerItem(item.count, item.context, item.wants_logits) for item in items]
        self._cost += account(self._ledger_model, counted)
        for item in items:
            item.request.num_computed = item.context
        return (self._fitted(row) for row in logits)

    def _fitted(self, row: Row) -> Row:
        if row.size >= self._vocab_size:
            return row[: self._vocab_size]
        return np.pad(row, (0, self._vocab_size - row.size), constant_values=-np.inf)
