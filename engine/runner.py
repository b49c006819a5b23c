"""From a StepPlan to the tensors a model runs on."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from engine.ops.interface import Span, StepBatch
from engine.scheduler import Item, StepPlan


def build_batch(plan: StepPlan, page_size: int) -> StepBatch:
    """Pack the plan's rows without padding, in the plan's order, with the cache slot each row writes."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    logit_rows: list[int] = []
    for item in plan.items:
        table = item.request.block_table()
        spans.append(Span(len(token_ids), item.count, item.context, table, item.is_plain_decode))
        token_ids += item.token_ids()
        positions += range(item.start, item.context)
        slots += _slots(item, page_size)
        logit_rows += range(len(token_ids) - item.num_logit_rows, len(token_ids))
    return StepBatch(_ids(token_ids), _ids(positions), _ids(slots), tuple(spans), _ids(logit_rows))


def _slots(item: Item, page_size: int) -> list[int]:
    pages = item.request.pages
    return [pages[p // page_size] * page_size + p % page_size for p in range(item.start, item.context)]


def _ids(values: list[int]) -> Tensor:
    # A third of what torch.tensor takes, four times in every step.
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)
