"""The ledger: bytes moved and floating-point operations of one step, counted on paper from its plan.

A pure function of the model's shape, its packed sizes and what the step computes. Rules:

    weights      every block weight is read once per step, whatever the batch; the head once when any logits are wanted;
                 of the embedding one row per token, nothing extra when it is the head's own table (read already)
    KV read      per layer the keys and values a request's rows see, once per head that is stored (GQA: the group shares
                 the read), in the type they are stored in, scales included; a window bounds them; sparse attention reads
                 some pages and every page's bounds
    KV written   one key and one value per row, layer and KV head
    activations  what each operation reads and writes between the blocks' products
    logits       written by the head, read by the sampler, fp32
    FLOPs        2 per weight and row, once for each pass of the product; 2 per element for scores and 2 for the weighted sum of values

memory_seconds = bytes / measured bandwidth; compute_seconds = FLOPs / measured throughput (engine/roofline/machine.py).
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.events import MachineFigures, StepCost
from engine.kv.layout import DENSE_LAYERS
from engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LedgerModel:
    """Sizes of a model as it lies in memory now.

    block_bytes: packed matrices, biases and norms of all layers, and the final norm.
    head_bytes: the packed head. embedding_row_bytes: one token's row of the table it is looked up in.
    activation_bytes: per element. kv_layer_token_bytes: one token's keys and values in one layer, as stored. compute_dtype: key into MachineFigures.flops_per_second.
    fused: norms keep their intermediate values on chip. fused_attention: so do the scores.
    sparse_pages: pages of ``page_size`` tokens that a decoding row reads per layer at most; page_bound_bytes: what it reads
    of every page, per layer, to choose them.
    block_passes, head_passes: how often a row is multiplied with a weight (twice where activations keep 16 bits as two halves).
    """

    spec: ModelSpec
    block_bytes: int
    head_bytes: int
    embedding_row_bytes: int
    activation_bytes: int
    kv_layer_token_bytes: int
    compute_dtype: str
    fused: bool = True
    fused_attention: bool = True
    sparse_pages: int | None = None
    page_size: int = 1
    page_bound_bytes: int = 0
    block_passes: float = 1.0
    head_passes: float = 1.0
    # (tokens seen at most: the window and its sinks, number of layers that see so many), counted once: steps are many.
    windows: tuple[tuple[int | None, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(_windows(self.spec)))


@dataclass(frozen=True, slots=True)
class LedgerItem:
    """A request's rows in a step: ``count`` tokens, the last of which sees ``context`` tokens, itself included.

    num_drafts: rows that verify guesses; when logits are wanted, they give logits too.
    is_decode: one row that continues a reply: it chooses its pages where attention is sparse.
    """

    count: int
    context: int
    wants_logits: bool
    num_drafts: int = 0
    is_decode: bool = False

    @property
    def num_logit_rows(self) -> int:
        return self.num_drafts + 1 if self.wants_logits else 0


def account(model: LedgerModel, items: Sequence[LedgerItem]) -> StepCost:
    """Bytes and FLOPs of a step that computes ``items`` together."""
    spec = model.spec
    num_rows = sum(item.count for item in items)
    num_logits = sum(item.num_logit_rows for item in items)
    skipped = [_skipped(model, item) for item in items]
    pairs = [_visible_pairs(model, item) - its.num_tokens for item, its in zip(items, skipped, strict=True)]
    kv_tokens = sum(_kv_tokens_read(model, item) - its.num_tokens for item, its in zip(items, skipped, strict=True))
    bound_bytes = sum(its.num_bounds for its in skipped) * model.page_bound_bytes
    kv_token_bytes = model.kv_layer_token_bytes
    return StepCost(
        weight_bytes=_weight_bytes(model, num_rows, num_logits),
        kv_read_bytes=kv_tokens * kv_token_bytes + bound_bytes,
        kv_write_bytes=num_rows * spec.num_layers * kv_token_bytes,
        activation_bytes=_activation_bytes(model, num_rows, sum(pairs)),
        logit_bytes=2 * 4 * num_logits * spec.vocab_size,
        linear_flops=_linear_flops(model, num_rows, num_logits),
        attention_flops=4 * spec.q_size * sum(pairs),
    )


def _linear_flops(model: LedgerModel, num_rows: int, num_logits: int) -> int:
    spec = model.spec
    of_layers = num_rows * spec.num_layers * spec.layer_linear_weights * model.block_passes
    return round(2 * (of_layers + num_logits * _head_weights(spec) * model.head_passes))


def memory_seconds(cost: StepCost, machine: MachineFigures) -> float:
    return cost.total_bytes / machine.read_bytes_per_second


def compute_seconds(cost: StepCost, machine: MachineFigures, compute_dtype: str) -> float:
    return cost.total_flops / machine.flops_per_second[compute_dtype]


def _head_weights(spec: ModelSpec) -> int:
    return spec.vocab_size * spec.hidden_size


def _weight_bytes(model: LedgerModel, num_rows: int, num_logits: int) -> int:
    if num_rows == 0:
        return 0
    head = model.head_bytes if num_logits else 0
    table_was_read = bool(num_logits) and model.spec.tied_head
    return model.block_bytes + head + (0 if table_was_read else num_rows * model.embedding_row_bytes)


def _visible_pairs(model: LedgerModel, item: LedgerItem) -> int:
    """(query row, key) pairs over all layers: row at position p sees min(p + 1, window) keys."""
    return sum(_pairs(item, window) * layers for window, layers in model.windows)


def _kv_tokens_read(model: LedgerModel, item: LedgerItem) -> int:
    """Keys (and as many values) read over all layers."""
    return sum(
        min(item.context, (window or item.context) + item.count - 1) * layers for window, layers in model.windows
    )


class _Skipped(NamedTuple):
    """What sparse attention leaves out, over all layers: tokens not read, and the pages whose bounds were read instead."""

    num_tokens: int
    num_bounds: int


def _skipped(model: LedgerModel, item: LedgerItem) -> _Skipped:
    tokens = bounds = 0
    if model.sparse_pages is None or not item.is_decode:
        return _Skipped(0, 0)
    for layer in model.spec.layers[DENSE_LAYERS:]:
        seen = item.context if layer.window is None else min(item.context, layer.window + layer.sinks)
        pages = -(-seen // model.page_size)
        if pages > model.sparse_pages:
            tokens += seen - model.sparse_pages * model.page_size
            bounds += pages
    return _Skipped(tokens, bounds)


def _pairs(item: LedgerItem, window: int | None) -> int:
    first, last = item.context - item.count + 1, item.context  # keys seen without a window
    if window is None or last <= window:
        return (first + last) * item.count // 2
    rows_below = max(0, window - first + 1)
    return (first + window) * rows_below // 2 + (item.count - rows_below) * window


def _windows(spec: ModelSpec) -> Iterable[tuple[int | None, int]]:
    """(tokens seen at most: the window and its sinks, number of layers that see so many)."""
    counts: dict[int | None, int] = {}
    for layer in spec.layers:
        seen = None if layer.window is None else layer.window + layer.sinks
        counts[seen] = counts.get(seen, 0) + 1
    return counts.items()


def _activation_bytes(model: LedgerModel, num_rows: int, num_pairs: int) -> int:
    """Reads and writes between the products: norm, QKV, rotation, attention, output, norm, gate/up, activation, down."""
    spec = model.spec
    hidden, inner = spec.hidden_size, spec.intermediate_size
    qkv = spec.q_size + 2 * spec.kv_size
    norms = (4 if spec.sandwich_norms else 2) * 2 * hidden
    attention = (hidden + qkv) + (qkv + spec.q_size) + 2 * spec.q_size + (spec.q_size + 2 * hidden)
    mlp = (hidden + 2 * inner) + 3 * inner + (inner + 2 * hidden)
    fused = num_rows * spec.num_layers * (norms + attention + mlp) * model.activation_bytes
    norm_steps = num_rows * spec.num_layers * 3 * norms * 4  # square, mean, scale and multiply each pass over fp32 rows
    scores = num_pairs * spec.num_heads * 4 * 4  # scores written, softmax reads and writes, the sum reads: fp32
    return fused + (0 if model.fused else norm_steps) + (0 if model.fused_attention else scores)
