"""Values that leave the engine. Frozen, torch-free, safe to hand to another thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from engine.presets import Found


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-text token or a stop string
    LENGTH = "length"  # max_tokens reached
    CONTEXT = "context"  # the model's window is full
    ABORT = "abort"  # the user stopped it
    ERROR = "error"


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # prefill chunks and decode tokens shared one step


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of the chosen token and of the most likely ones (token id, value)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Text that one step added to a reply. ``text`` may be empty while a character is incomplete."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """What one request cost. Seconds are wall time on the engine thread.

    first_token_seconds runs from submit to the first generated token of any kind; None when none came.
    decode_seconds runs from the first generated token to the last.
    """

    prompt_tokens: int
    cached_tokens: int = 0  # prompt tokens found in the prefix index
    new_tokens: int = 0
    recomputed_tokens: int = 0  # computed again after a preemption
    first_token_seconds: float | None = None
    decode_seconds: float = 0.0
    num_drafted: int = 0  # guessed tokens that were compared with the model's choice
    num_accepted: int = 0  # of these, found right
    dropped_messages: int = 0  # the conversation's oldest, left out because the window was full

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate: tokens after the first over the seconds they took; None when unmeasurable."""
        if self.new_tokens < 2 or self.decode_seconds <= 0:
            return None
        return (self.new_tokens - 1) / self.decode_seconds

    @property
    def acceptance(self) -> float | None:
        """Share of the compared guesses that were right; None without guesses."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. For ERROR, ``message`` says what was wrong and what to do."""

    request_id: int
    reason: FinishReason
    usage: RequestUsage
    message: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of ``Engine.generate`` for one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: RequestUsage
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Pages of the KV pool after a step. used + cached + free == total; shared is part of used; so is stranded.

    stranded counts pages that are reserved but hold no token yet (paging off).
    """

    total: int
    used: int
    shared: int
    cached: int
    free: int
    stranded: int
    page_size: int  # tokens per page
    page_bytes: int  # bytes per page, K and V, all layers


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes moved and floating-point operations of one step, counted by the ledger from its StepPlan; what a draft model
    did to guess for it is included."""

    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int
    activation_bytes: int
    logit_bytes: int
    linear_flops: int
    attention_flops: int

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes + self.logit_bytes

    @property
    def total_flops(self) -> int:
        return self.linear_flops + self.attention_flops

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte."""
        return self.total_flops / self.total_bytes if self.total_bytes else 0.0


NO_COST = StepCost(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """One request's part in a step: tokens it computed, tokens it gained, its context after the step."""

    request_id: int
    num_computed: int
    num_new: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step, counted and measured.

    step_seconds is the clock; memory_seconds = bytes / measured bandwidth; compute_seconds = FLOPs / measured throughput.
    """

    index: int
    ended_at: float  # time.perf_counter() at the end of the step
    phase: Phase
    step_seconds: float
    memory_seconds: float
    compute_seconds: float
    cost: StepCost
    num_prefill_tokens: int
    num_decode_tokens: int
    num_new_tokens: int  # generated tokens accepted in this step, all requests
    batch: int  # requests that took part
    waiting: int  # requests not yet admitted
    pool: PoolSnapshot
    requests: tuple[RequestProgress, ...]
    active_paths: Mapping[str, str]  # op -> the path that really ran, e.g. {"linear": "int4: torch packed, bf16"}
    num_drafted: int = 0  # guessed tokens that were compared with the model's choice, all requests
    num_accepted: int = 0  # of these, found right

    @property
    def overhead_seconds(self) -> float:
        return max(0.0, self.step_seconds - max(self.memory_seconds, self.compute_seconds))


@dataclass(frozen=True, slots=True)
class PageMap:
    """Who holds each page, for drawing. ``owners[page]``: 0 free, -1 cached (indexed, unowned), -2 page 0 (padding),
    -3 shared by several requests (``sharers[page]`` names them), otherwise the owning request id.
    ``stranded`` lists reserved pages that hold nothing."""

    owners: tuple[int, ...]
    stranded: frozenset[int] = frozenset()
    sharers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """What this machine was measured to do, once. bytes/s and FLOP/s; ``measured_at`` is an ISO date."""

    device: str  # "cpu" or "cuda:0"
    name: str  # e.g. "Intel Xeon, 2 threads"
    threads: int
    read_bytes_per_second: float
    flops_per_second: Mapping[str, float]  # dtype name ("fp32", "bf16", "int8") -> FLOP/s (or OP/s)
    launch_seconds: float  # cost of one small op call
    measured_at: str

    def ridge_point(self, dtype: str) -> float:
        """FLOPs per byte at which compute time equals memory time."""
        return self.flops_per_second[dtype] / self.read_bytes_per_second


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that a loaded model takes, bytes. Expected before loading, counted after it (engine/memory.py)."""

    weight_bytes: int = 0  # as packed
    copy_bytes: int = 0  # of weights, unpacked: what large batches are multiplied with where the C kernels are missing
    kv_bytes: int = 0  # all pages, used or not, and what sparse attention keeps of them
    draft_bytes: int = 0  # weights and pages of what guesses
    table_bytes: int = 0  # the tokenizer's, the rotation's, and of a library that the weights need; estimated
    scratch_bytes: int = 0  # that the largest step will touch, estimated

    @property
    def total_bytes(self) -> int:
        return (
            self.weight_bytes
            + self.copy_bytes
            + self.kv_bytes
            + self.draft_bytes
            + self.table_bytes
            + self.scratch_bytes
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the window and the command line may know of a loaded model."""

    name: str
    source: str  # path or id as asked for
    family: str
    num_parameters: int
    weight_bytes: int  # as held in memory now
    kv_bytes_per_token: int
    context_length: int  # the largest conversation that fits: min(the model's window, the pool)
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    stored_format: str  # e.g. "GGUF Q4_1", "safetensors bfloat16"
    device: str
    dtype: str  # what products multiply, e.g. "int8": a key of MachineFigures.flops_per_second
    is_fallback: bool  # runs through transformers
    load_seconds: float
    has_chat_template: bool
    active_paths: Mapping[str, str]
    machine: MachineFigures
    memory: MemoryUse = field(default_factory=MemoryUse)


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """The model that guesses for the one loaded. note: why it cannot pay, e.g. since it is the model itself; empty when it may."""

    source: str  # path or id as asked for
    name: str
    num_parameters: int
    weight_bytes: int  # as held in memory now
    note: str = ""


@dataclass(frozen=True, slots=True)
class ModelLoading:
    stage: str  # plain words: "Reading weights"
    fraction: float  # 0 to 1


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    info: ModelInfo
    options: Mapping[str, str]  # the values in force
    unavailable: Mapping[str, Mapping[str, str]]  # option key -> choice -> reason
    draft: DraftInfo | None = None


@dataclass(frozen=True, slots=True)
class DraftChanged:
    """Another draft model guesses, or none does. Switches that hang on it are in ``options`` and ``unavailable``."""

    draft: DraftInfo | None
    options: Mapping[str, str]
    unavailable: Mapping[str, Mapping[str, str]]
    info: ModelInfo | None = None  # fresh: a draft model takes memory


@dataclass(frozen=True, slots=True)
class DraftRefused:
    """``source`` does not guess; what did before, if anything, stays."""

    source: str
    message: str


@dataclass(frozen=True, slots=True)
class DraftJudged:
    """The answer to JudgeDraft, for the model ``target`` (its ModelInfo.source) alone. reason: why ``source`` cannot guess;
    note: why it can but will not pay. Both empty when it may."""

    source: str
    target: str
    reason: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class BestFound:
    """The search for the fastest setting has ended; ``found`` is in force."""

    found: Found


@dataclass(frozen=True, slots=True)
class BestRefused:
    """There was no search, or it was ended early; the switches are as they were."""

    message: str


@dataclass(frozen=True, slots=True)
class ModelLoadFailed:
    """The model asked for could not be loaded; the one loaded before, if any, is gone unless ``kept``."""

    source: str
    message: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class OptionsApplied:
    """Switches took effect between two steps. ``info`` is fresh when weights were reloaded."""

    options: Mapping[str, str]
    changed: tuple[str, ...]
    seconds: float
    preempted: int  # running requests that will be recomputed
    info: ModelInfo | None = None


@dataclass(frozen=True, slots=True)
class OptionsRefused:
    changes: Mapping[str, str]
    message: str


@dataclass(frozen=True, slots=True)
class ContextMeasured:
    """The answer to MeasureContext: tokens of the rendered template for these messages."""

    query_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineError:
    """Something failed that belongs to no single request. The engine is still usable."""

    message: str
    detail: str = ""


Event = (
    TokenDelta
    | Finished
    | StepRecord
    | PageMap
    | ModelLoading
    | ModelLoaded
    | ModelLoadFailed
    | OptionsApplied
    | OptionsRefused
    | DraftChanged
    | DraftRefused
    | DraftJudged
    | BestFound
    | BestRefused
    | ContextMeasured
    | EngineError
)
