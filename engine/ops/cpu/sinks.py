"""Attention over a window with sinks (StreamingLLM, Xiao 2023) on torch's fused kernel: the seen keys are gathered first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.interface import AttentionParams, Span
from engine.ops.reference import hidden_keys, seen_positions


@dataclass(slots=True)
class _Step:
    """Per window: each span's slots, int64 [S], and its additive mask [count, S] (None: all is seen)."""

    spans: Sequence[Span] = ()
    readings: dict[tuple[int | None, int], list[tuple[Tensor, Tensor | None]]] = field(default_factory=dict)


class SinkAttention:
    """Holds what the layers of one step share; all of them pass the same ``spans`` object."""

    path = "torch fused attention, sinks and window gathered"

    def __init__(self) -> None:
        self._step = _Step()

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], params: AttentionParams
    ) -> Tensor:
        """See ``Ops.paged_attention``; params.softcap must be None."""
        assert params.softcap is None
        if spans is not self._step.spans:
            self._step = _Step(spans)
        key = (params.window, params.sinks)
        if key not in self._step.readings:
            self._step.readings[key] = [_reading(span, params, keys.shape[1], q.dtype) for span in spans]
        out = torch.empty_like(q)
        k_rows, v_rows = keys.flatten(0, 1), values.flatten(0, 1)
        for span, (slots, mask) in zip(spans, self._step.readings[key], strict=True):
            rows = slice(span.start, span.start + span.count)
            k, v = (x.index_select(0, slots).transpose(0, 1).unsqueeze(0) for x in (k_rows, v_rows))
            one = q[rows].transpose(0, 1).unsqueeze(0)  # [1, H, count, D]
            attended = F.scaled_dot_product_attention(one, k, v, mask, scale=params.scale, enable_gqa=True)
            out[rows] = attended[0].transpose(0, 1)
        return out.flatten(1)


def _reading(span: Span, params: AttentionParams, page_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    positions = seen_positions(span, params)
    slots = torch.tensor(span.pages)[positions // page_size] * page_size + positions % page_size
    if span.count == 1:
        return slots, None
    hidden = hidden_keys(span, positions, params)
    return slots, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
