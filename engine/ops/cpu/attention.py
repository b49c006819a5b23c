"""Paged attention on torch's fused CPU kernel (FlashAttention, Dao 2022).

Pages that follow each other in the cache are one view of it and are not copied; scattered pages are gathered into a
buffer first. Several chats with short contexts are gathered and padded into one call: there the calls cost more than the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.interface import AttentionParams, Span

TOGETHER_CHATS = 3  # decoding chats from which one padded call is worth its gathering
TOGETHER_KEYS = 128  # and the longest context for which it is
_MAX_MASKS = 8


class _Reading(NamedTuple):
    """Where one span's keys lie: ``num_keys`` slots from slot ``first`` of the cache, or, when its pages are scattered,
    from slot ``first`` of the gathered ``pages`` (int64)."""

    num_keys: int
    first: int
    pages: Tensor | None


class _Together(NamedTuple):
    """Decoding chats as one padded call. slots: int64 [B * S], 0 (the zeroed page) where padded. mask: [B, 1, 1, S]."""

    num_chats: int
    num_keys: int
    slots: Tensor
    mask: Tensor


@dataclass(slots=True)
class _Step:
    """What the layers of one step share, by window."""

    spans: Sequence[Span] = ()
    is_decode: bool = False  # row i is the one row of span i
    readings: dict[int | None, list[_Reading]] = field(default_factory=dict)
    together: dict[tuple[int | None, torch.dtype], _Together | None] = field(default_factory=dict)


class PagedAttention:
    """Holds what the layers of one step share: where each span's keys lie, masks, the gather buffers.

    last_path: how the latest step's keys were reached, for the panel.
    """

    def __init__(self) -> None:
        self._step = _Step()
        self._masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = {}
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self.last_path = ""

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], params: AttentionParams
    ) -> Tensor:
        """See ``Ops.paged_attention``; params.softcap must be None, all layers of a step pass the same ``spans`` object."""
        assert params.softcap is None
        step, window, page_size = self._step_of(spans), params.window, keys.shape[1]
        if step.is_decode and len(spans) >= TOGETHER_CHATS:
            key = (window, q.dtype)
            if key not in step.together:
                step.together[key] = _together(spans, window, page_size, q.dtype)
            together = step.together[key]
            if together is not None:
                self.last_path = f"torch fused attention, {len(spans)} short chats gathered into one call"
                return _attend_together(q, keys, values, together, params.scale)
        readings = step.readings.get(window)
        if readings is None:
            readings = step.readings[window] = [_reading(span, window, page_size) for span in spans]
            self.last_path = _path(readings)
        if step.is_decode:
            rows = q.unsqueeze(2).split(1)
            parts = [self._decode(row, keys, values, r, params) for row, r in zip(rows, readings, strict=True)]
        else:
            parts = [
                self._chunk(q[span.start : span.start + span.count], keys, values, reading, params)
                for span, reading in zip(spans, readings, strict=True)
            ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(q.shape[0], -1)

    def _step_of(self, spans: Sequence[Span]) -> _Step:
        if spans is not self._step.spans:
            is_decode = all(span.count == 1 and span.start == row for row, span in enumerate(spans))
            if not is_decode:
                assert all(a.start + a.count == b.start for a, b in pairwise(spans))
            self._step = _Step(spans, is_decode)
        return self._step

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, reading: _Reading, params: AttentionParams) -> Tensor:
        """One row, q [1, H, 1, D], sees all keys read: no mask."""
        k = self._read(keys, reading, 0)
        v = self._read(values, reading, 1)
        return F.scaled_dot_product_attention(q, k, v, scale=params.scale, enable_gqa=True)

    def _chunk(self, q: Tensor, keys: Tensor, values: Tensor, reading: _Reading, params: AttentionParams) -> Tensor:
        """Rows of a prompt: q [count, H, D] -> [count, H, D]."""
        k = self._read(keys, reading, 0)
        v = self._read(values, reading, 1)
        count, num_keys, window = q.shape[0], reading.num_keys, params.window
        is_plain = num_keys == count and (window is None or window >= count)
        mask = None if is_plain else self._mask(count, num_keys, window, q.dtype)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0), k, v, mask, is_causal=is_plain, scale=params.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def _read(self, cache: Tensor, reading: _Reading, which: int) -> Tensor:
        """The span's part of ``cache`` [num_pages, P, K, D] as [1, K, num_keys, D], a view where possible."""
        num_heads, head_dim = cache.shape[2:]
        row = num_heads * head_dim
        if reading.pages is not None:
            cache = self._gathered(cache, reading.pages, which)
        assert cache.is_contiguous()
        offset = cache.storage_offset() + reading.first * row
        return cache.as_strided((1, num_heads, reading.num_keys, head_dim), (row, head_dim, row, 1), offset)

    def _gathered(self, cache: Tensor, pages: Tensor, which: int) -> Tensor:
        """Those pages of keys (0) or values (1) in a buffer that the next span reuses."""
        needed = pages.shape[0] * cache[0].numel()
        buffer = self._buffers.get((which, cache.dtype))
        if buffer is None or buffer.numel() < needed:
            buffer = self._buffers[(which, cache.dtype)] = cache.new_empty(2 * needed)
        gathered = buffer[:needed].view(pages.shape[0], *cache.shape[1:])
        return torch.index_select(cache, 0, pages, out=gathered)

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


def _first_seen(span: Span, window: int | None) -> int:
    """The first position some query of ``span`` may see."""
    return 0 if window is None else max(0, span.context - span.count - window + 1)


def _reading(span: Span, window: int | None, page_size: int) -> _Reading:
    """Only slots some query may see: others may never have been written, and 0 x NaN spreads."""
    seen = _first_seen(span, window)
    first_page = seen // page_size
    pages = list(span.pages[first_page : -(-span.context // page_size)])
    skipped = seen - first_page * page_size
    num_keys = span.context - seen
    if pages == list(range(pages[0], pages[0] + len(pages))):
        return _Reading(num_keys, pages[0] * page_size + skipped, None)
    return _Reading(num_keys, skipped, torch.tensor(pages, dtype=torch.int64))


def _path(readings: Sequence[_Reading]) -> str:
    scattered = sum(reading.pages is not None for reading in readings)
    how = f"pages of {scattered} of {len(readings)} chats gathered" if scattered else "pages read in place"
    return f"torch fused attention, {how}"


def _together(spans: Sequence[Span], window: int | None, page_size: int, dtype: torch.dtype) -> _Together | None:
    """None when some context is too long for it."""
    seen = [_first_seen(span, window) for span in spans]
    num_keys = max(span.context - first for span, first in zip(spans, seen, strict=True))
    if num_keys > TOGETHER_KEYS:
        return None
    slots = torch.zeros(len(spans), num_keys, dtype=torch.int64)
    mask = torch.full((len(spans), 1, 1, num_keys), -torch.inf, dtype=dtype)
    for index, (span, first) in enumerate(zip(spans, seen, strict=True)):
        positions = range(first, span.context)
        slots[index, : len(positions)] = torch.tensor(
            [span.pages[position // page_size] * page_size + position % page_size for position in positions]
        )
        mask[index, ..., : len(positions)] = 0
    return _Together(len(spans), num_keys, slots.flatten(), mask)


def _attend_together(q: Tensor, keys: Tensor, values: Tensor, together: _Together, scale: float) -> Tensor:
    """q [B, H, D] -> [B, H * D]."""
    num_chats, num_keys, slots, mask = together
    _, _, num_heads, head_dim = keys.shape
    shape = (num_chats, num_keys, num_heads, head_dim)
    k = keys.view(-1, num_heads, head_dim).index_select(0, slots).view(shape).transpose(1, 2)
    v = values.view(-1, num_heads, head_dim).index_select(0, slots).view(shape).transpose(1, 2)
    out = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, mask, scale=scale, enable_gqa=True)
    return out.view(num_chats, -1)
