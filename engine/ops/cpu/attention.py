"""Paged attention on torch's fused CPU kernel (FlashAttention, Dao 2022), one call per request.

Pages that follow each other in the cache are one view of it and are not copied; scattered pages are gathered into a
buffer first. The query heads that share a KV head become query rows of one head, so each key and value is read once per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.interface import AttentionParams, Span

_MAX_MASKS = 8


class _Reading(NamedTuple):
    """Where one span's keys lie. ``first``: cache slot of position ``seen``, when the pages are consecutive; otherwise
    ``pages`` (int64) are gathered and the keys start ``skipped`` slots into them. Positions [seen, context) are read."""

    seen: int
    first: int
    pages: Tensor | None
    skipped: int


class PagedAttention:
    """Holds what the layers of one step share: where each span's keys lie, masks, the gather buffers.

    last_path: how the latest step's keys were reached, for the panel.
    """

    def __init__(self) -> None:
        self._spans: Sequence[Span] | None = None
        self._readings: dict[int | None, list[_Reading]] = {}
        self._masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = {}
        self._buffers: list[Tensor] = []
        self.last_path = ""

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], params: AttentionParams
    ) -> Tensor:
        """See ``Ops.paged_attention``; params.softcap must be None."""
        assert params.softcap is None
        num_rows, num_heads, head_dim = q.shape
        readings = self._readings_of(spans, params.window, keys.shape[1])
        if len(spans) == 1:
            return self._span(q, keys, values, spans[0], readings[0], params).reshape(num_rows, -1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for span, reading in zip(spans, readings, strict=True):
            rows = slice(span.start, span.start + span.count)
            out[rows] = self._span(q[rows], keys, values, span, reading, params)
        return out.view(num_rows, num_heads * head_dim)

    def _span(
        self, q: Tensor, keys: Tensor, values: Tensor, span: Span, reading: _Reading, params: AttentionParams
    ) -> Tensor:
        """q [count, H, D] -> [count, H, D]."""
        num_keys = span.context - reading.seen
        k = self._read(keys, reading, num_keys, 0)  # [K, S, D]
        v = self._read(values, reading, num_keys, 1)
        num_kv_heads, _, head_dim = k.shape
        if span.count == 1:
            # One query sees all keys read: no mask, and the group's heads can be the query rows.
            grouped = q.reshape(1, num_kv_heads, -1, head_dim)
            out = F.scaled_dot_product_attention(grouped, k.unsqueeze(0), v.unsqueeze(0), scale=params.scale)
            return out.reshape(1, -1, head_dim)
        # [K, group, count, D]: the KV head is the batch, its keys are shared by the group without a copy.
        grouped = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        group = grouped.shape[1]
        shared_k = k.unsqueeze(1).expand(-1, group, -1, -1)
        shared_v = v.unsqueeze(1).expand(-1, group, -1, -1)
        is_plain = num_keys == span.count and (params.window is None or params.window >= num_keys)
        mask = None if is_plain else self._mask(span.count, num_keys, params.window, q.dtype)
        out = F.scaled_dot_product_attention(
            grouped, shared_k, shared_v, attn_mask=mask, is_causal=is_plain, scale=params.scale
        )
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _readings_of(self, spans: Sequence[Span], window: int | None, page_size: int) -> list[_Reading]:
        """Worked out once per step and window: all layers are called with the same ``spans`` object."""
        if spans is not self._spans:
            self._spans = spans
            self._readings = {}
        readings = self._readings.get(window)
        if readings is None:
            readings = [_reading(span, window, page_size) for span in spans]
            self._readings[window] = readings
            scattered = sum(reading.pages is not None for reading in readings)
            self.last_path = "torch fused attention, " + (
                f"pages of {scattered} of {len(spans)} chats gathered" if scattered else "pages read in place"
            )
        return readings

    def _read(self, cache: Tensor, reading: _Reading, num_keys: int, which: int) -> Tensor:
        """The span's part of ``cache`` [num_pages, P, K, D] as [K, num_keys, D], a view where possible."""
        if reading.pages is None:
            return cache.flatten(0, 1)[reading.first : reading.first + num_keys].transpose(0, 1)
        gathered = self._buffer(which, cache, reading.pages.shape[0])
        torch.index_select(cache, 0, reading.pages, out=gathered)
        return gathered.flatten(0, 1)[reading.skipped : reading.skipped + num_keys].transpose(0, 1)

    def _buffer(self, which: int, cache: Tensor, num_pages: int) -> Tensor:
        """[num_pages, P, K, D] for keys (0) or values (1), reused by the next span."""
        shape = (num_pages, *cache.shape[1:])
        while len(self._buffers) <= which:
            self._buffers.append(cache.new_empty(0))
        needed = num_pages * cache[0].numel()
        if self._buffers[which].dtype != cache.dtype or self._buffers[which].numel() < needed:
            self._buffers[which] = cache.new_empty(max(needed, 2 * self._buffers[which].numel()))
        return self._buffers[which][:needed].view(shape)

    def _mask(self, count: int, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [count, num_keys]: query i is the key at num_keys - count + i and sees ``window`` keys up to itself."""
        key = (count, num_keys, window, dtype)
        mask = self._masks.get(key)
        if mask is None:
            query = torch.arange(num_keys - count, num_keys).unsqueeze(1)
            position = torch.arange(num_keys).unsqueeze(0)
            hidden = position > query
            if window is not None:
                hidden |= position <= query - window
            mask = torch.zeros(count, num_keys, dtype=dtype).masked_fill_(hidden, -torch.inf)
            if len(self._masks) >= _MAX_MASKS:
                self._masks.pop(next(iter(self._masks)))
            self._masks[key] = mask
        return mask


def _reading(span: Span, window: int | None, page_size: int) -> _Reading:
    """Only slots some query may see: others may never have been written, and 0 x NaN spreads."""
    seen = 0 if window is None else max(0, span.context - span.count - window + 1)
    first_page = seen // page_size
    pages = list(span.pages[first_page : -(-span.context // page_size)])
    skipped = seen - first_page * page_size
    if all(page == pages[0] + index for index, page in enumerate(pages)):
        return _Reading(seen, pages[0] * page_size + skipped, None, skipped)
    return _Reading(seen, -1, torch.tensor(pages, dtype=torch.int64), skipped)
