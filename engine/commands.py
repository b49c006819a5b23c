"""Values that enter the engine service. Frozen, torch-free, safe to hand to another thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


# A conversation (rendered with the model's chat template), plain text, or token ids.
Prompt = tuple[Message, ...] | str | tuple[int, ...]
# What happens to a conversation that is longer than the window: refused, or its oldest turns are left out.
Overflow = Literal["stop", "drop_oldest"]


@dataclass(frozen=True, slots=True)
class LoadModel:
    source: str  # "starter", a GGUF file, a safetensors folder, a library name
    settings: Mapping[str, str] = field(default_factory=dict)  # option key -> choice; the rest are defaults
    draft: str = ""  # a smaller model that guesses for it; one that cannot is refused and the load goes on without


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """End the load that runs; the model loaded before stays. Without one it does nothing."""


@dataclass(frozen=True, slots=True)
class Submit:
    request_id: int  # chosen by the caller, unique in the service's life
    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    overflow: Overflow = "stop"  # plain text and token ids are always refused when too long


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: int


@dataclass(frozen=True, slots=True)
class SetOptions:
    changes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SetDraft:
    """Load ``source`` as the model that guesses for the one loaded, in place of any before; "" lets it go."""

    source: str


@dataclass(frozen=True, slots=True)
class JudgeDraft:
    """Could ``source`` guess for the model that is loaded? No weights are read."""

    source: str


@dataclass(frozen=True, slots=True)
class FindBest:
    """Search for the fastest setting of the switches here, for some seconds, and apply it. Refused while a reply runs;
    a message, a flip or CancelLoad ends it with the switches as they were."""


@dataclass(frozen=True, slots=True)
class MeasureContext:
    query_id: int
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class WatchPages:
    """Turn PageMap events on (at most ``per_second``) or off (0)."""

    per_second: float


Command = (
    LoadModel
    | CancelLoad
    | Submit
    | Abort
    | SetOptions
    | SetDraft
    | JudgeDraft
    | FindBest
    | MeasureContext
    | WatchPages
)
