"""What makes guesses: the interface of n-gram matching, draft models and layer skipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from engine.events import StepCost
from engine.sampling import SamplerState
from engine.scheduler import Request
from engine.speculation.verify import Proposal


class Wanted(NamedTuple):
    """A decoding request and how many guesses it should get at most. ``state`` must not be changed: fork it."""

    request: Request
    state: SamplerState
    most: int


class Proposer(Protocol):
    name: str  # for the panel: "n-gram"

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Proposal]:
        """Request id -> at most ``most`` guesses; requests it has none for are left out."""
        ...

    def take_cost(self) -> StepCost:
        """Bytes and operations that guessing took since the last call."""
        ...

    def forget(self, request_id: int) -> None:
        """The request has ended; unknown ids are fine."""
        ...
