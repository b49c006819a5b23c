"""Speculator: joins what makes guesses with what decides how many; the engine asks it before and after each step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from engine.events import StepCost
from engine.reply import Accepted
from engine.sampling import SamplerState
from engine.scheduler import Item, Request, StepPlan
from engine.speculation.controller import Controller, Outcome
from engine.speculation.proposer import Proposer, Wanted
from engine.speculation.verify import NO_PROPOSAL, Proposal

log = logging.getLogger(__name__)


class Speculator:
    """Sets ``Request.drafts`` before a step is planned and learns from the step that ran."""

    def __init__(self, proposer: Proposer, controller: Controller) -> None:
        self.proposer = proposer
        self.controller = controller
        self._proposals: Mapping[int, Proposal] = {}
        self._failure = ""

    def prepare(self, running: Sequence[Request], states: Mapping[int, SamplerState], context_length: int) -> None:
        """Guess for the decoding ones of ``running``. A proposer that fails ends guessing, not the chats."""
        self._proposals = {}
        decoding = [request for request in running if request.is_decoding]
        for request in running:
            request.drafts = []
        if self._failure:
            return
        wanted: list[Wanted] = []
        for request in decoding:
            limit = min(request.max_tokens - request.num_generated, context_length - request.num_tokens) - 1
            count = min(limit, self.controller.length_for(request.request_id, len(decoding)))
            if count > 0:
                wanted.append(Wanted(request, states[request.request_id], count))
        if not wanted:
            return
        try:
            self._proposals = self.proposer.propose(wanted)
        except Exception as error:  # out of memory in a draft model, say
            log.exception("guessing by %s failed", self.proposer.name)
            self._failure = f"off: guessing failed ({error})"
            return
        for request, _, _ in wanted:
            request.drafts = list(self._proposals.get(request.request_id, NO_PROPOSAL).token_ids)

    def proposal_for(self, item: Item) -> Proposal:
        return self._proposals.get(item.request.request_id, NO_PROPOSAL)

    def take_cost(self) -> StepCost:
        return self.proposer.take_cost()

    def observe(self, plan: StepPlan, accepted: Mapping[int, Accepted], seconds: float) -> None:
        """``plan`` ran in ``seconds``, guessing included. Steps with prefill say nothing about decoding."""
        if any(item.is_prefill for item in plan.items):
            return
        numbers = [item.request.request_id for item in plan.items]
        tests = [(accepted[n].num_tested, accepted[n].num_accepted) if n in accepted else (0, 0) for n in numbers]
        self.controller.observe(
            [
                Outcome(item.request.request_id, item.num_drafts, *tested)
                for item, tested in zip(plan.items, tests, strict=True)
            ],
            seconds,
        )

    def forget(self, request_id: int) -> None:
        self.proposer.forget(request_id)
        self.controller.forget(request_id)

    def describe(self) -> str:
        """For the panel, beside the paths of the ops."""
        return f"{self.proposer.name}, {self._failure or self.controller.summary()}"
