"""What a step was worth: bytes and FLOPs by the ledger beside the clock's seconds, as the record that leaves the engine."""

from __future__ import annotations

import time
from collections.abc import Mapping

from engine.events import NO_COST, MachineFigures, Phase, PoolSnapshot, RequestProgress, StepCost, StepRecord
from engine.kv.layout import NUM_SINKS, KvLayout
from engine.kv.switches import sparse_pages, user_window
from engine.model.spec import ModelSpec
from engine.ops.interface import Model
from engine.options import Options
from engine.reply import Accepted
from engine.roofline.ledger import LedgerItem, LedgerModel, account, compute_seconds, memory_seconds
from engine.scheduler import Item, StepPlan


class Accountant:
    """Writes the records of one engine's steps.

    figures: what this machine was measured to do. Steps do not change them: one that moves its bytes faster found some of them
    in the processor's cache, which is for the reader to see, not a bandwidth of memory.
    model: what the ledger needs to know of the model; set it anew when weights, cache or switches change.
    """

    def __init__(self, figures: MachineFigures) -> None:
        self.figures = figures
        self.model: LedgerModel | None = None
        self._step_index = 0

    def record(
        self,
        plan: StepPlan,
        accepted: Mapping[int, Accepted],
        started: float,
        num_waiting: int,
        pool: PoolSnapshot,
        active_paths: Mapping[str, str],
        guessing: StepCost = NO_COST,
    ) -> StepRecord:
        """The record of the step that began at ``started`` (``time.perf_counter()``) and has just ended. guessing: what was
        spent on guesses for it."""
        assert self.model is not None
        items = plan.items
        cost = account(
            self.model,
            [
                LedgerItem(item.count, item.context, item.wants_logits, item.num_drafts, item.is_plain_decode)
                for item in items
            ],
        )
        cost += guessing
        num_prefill = sum(item.count for item in items if item.is_prefill)
        num_decode = sum(item.count for item in items if not item.is_prefill)
        ended = time.perf_counter()
        self._step_index += 1
        return StepRecord(
            index=self._step_index,
            ended_at=ended,
            phase=_phase(num_prefill, num_decode),
            step_seconds=ended - started,
            memory_seconds=memory_seconds(cost, self.figures),
            compute_seconds=compute_seconds(cost, self.figures, self.model.compute_dtype),
            cost=cost,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            num_new_tokens=sum(its.num_kept for its in accepted.values()),
            batch=len(items),
            waiting=num_waiting,
            pool=pool,
            requests=tuple(
                RequestProgress(item.request.request_id, item.count, _num_new(item, accepted), item.request.num_tokens)
                for item in items
            ),
            active_paths=active_paths,
            num_drafted=sum(its.num_tested for its in accepted.values()),
            num_accepted=sum(its.num_accepted for its in accepted.values()),
        )


def ledger_model(spec: ModelSpec, model: Model, layout: KvLayout, options: Options, page_size: int) -> LedgerModel:
    """What the ledger must know of ``model`` under ``options``, its keys and values kept in ``layout``."""
    window = user_window(options)
    sizes = model.weight_sizes
    return LedgerModel(
        spec=spec if window is None else spec.with_window(window, NUM_SINKS),
        block_bytes=sizes.block_bytes,
        head_bytes=sizes.head_bytes,
        embedding_row_bytes=sizes.embedding_row_bytes,
        activation_bytes=model.activation_dtype.itemsize,
        kv_layer_token_bytes=layout.layer_token_bytes,
        compute_dtype=model.product_dtype,
        fused=options.on("fused_ops"),
        fused_attention=options["attention"] == "fused",
        sparse_pages=sparse_pages(options),
        page_size=page_size,
        page_bound_bytes=layout.page_bound_bytes,
        block_passes=sizes.block_passes,
        head_passes=sizes.head_passes,
    )


def _num_new(item: Item, accepted: Mapping[int, Accepted]) -> int:
    its = accepted.get(item.request.request_id)
    return its.num_kept if its else 0


def _phase(num_prefill: int, num_decode: int) -> Phase:
    if num_prefill and num_decode:
        return Phase.MIXED
    return Phase.PREFILL if num_prefill else Phase.DECODE
