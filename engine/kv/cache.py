"""The KV cache: pages of keys and values per layer, in the type and with the sharing that the switches ask for.

A layer offers three calls, in this order, and whoever runs a model need not know what lies behind them:

    write_target(slots)   where the operation that rotates keys may write them: the pages themselves, or a staging page
    written(slots)        what was staged is brought into its pages (encoded, expanded); key bounds are updated
    attend(ops, q, ...)   attention over the pages a span sees: in place, or decoded into plain pages first

Pages are allocated with zeros: a slot never written must not hold NaN (0 x NaN spreads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.kv.codec import ChannelScales, Codec, Parts, codec_for, rotate
from engine.kv.layout import NUM_SINKS, KvLayout
from engine.model.spec import ModelSpec
from engine.ops.interface import AttentionParams, Ops, Span


class KvCache:
    """All layers' pages. Part tensors are [num_pages, page_size, heads, size]; page 0 is never handed out, padding goes there.

    dtype: that the model wants keys and values in; coded ones are decoded to it.
    layout: how they are kept; by default as computed and shared by each group of query heads.
    scales: per layer, for layouts in fewer bits; without them all channels count as equally large.
    window: the user's window, tokens; None leaves each layer its own.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str = "cpu",
        layout: KvLayout | None = None,
        scales: Sequence[ChannelScales] | None = None,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype = dtype
        self._plain_layout = KvLayout.of(spec, {}, dtype.itemsize)
        self.layout = layout or self._plain_layout
        self.window: int | None = None
        self._reading = _Reading()
        codec = codec_for(self.layout.kv_dtype, spec.head_dim, dtype)
        heads = self.layout.num_heads
        shape = (spec.num_layers, 2, num_pages, page_size, heads)
        parts = [torch.zeros(*shape, size, dtype=kind, device=device) for size, kind in codec.parts]
        self._layers = [
            KvLayer(
                self,
                tuple(part[index, 0] for part in parts),
                tuple(part[index, 1] for part in parts),
                codec,
                spec.num_kv_heads,
                None if scales is None or self.layout.kv_dtype == "native" else scales[index],
            )
            for index in range(spec.num_layers)
        ]
        self.num_bytes = sum(part.nbytes for part in parts)

    @property
    def is_plain(self) -> bool:
        """Pages hold what was computed, once per KV head, and each layer sees what its own window says."""
        return self.layout == self._plain_layout and self.window is None

    def layer(self, index: int) -> KvLayer:
        return self._layers[index]

    def active_paths(self) -> dict[str, str]:
        """How the latest step reached keys and values, for the panel; empty when it read the pages as they are."""
        path = "; ".join(self._reading.paths)
        return {"kv": path} if path else {}

    def reading(self, spans: Sequence[Span]) -> _Reading:
        """What the layers of the step with these ``spans`` share."""
        if self._reading.spans is not spans:
            self._reading = _Reading(spans)
        return self._reading

    def narrowed(self, params: AttentionParams, spans: Sequence[Span]) -> AttentionParams:
        """``params`` with the user's window, if it is the narrower one and hides anything from these spans."""
        window = self.window
        if window is None or (params.window is not None and params.window <= window):
            return params
        if max(span.context for span in spans) <= window + NUM_SINKS:
            return params  # nothing between the sinks and the window yet
        return replace(params, window=window, sinks=NUM_SINKS)


class KvLayer:
    """One layer's pages. ``keys`` and ``values`` are what is stored of them, part by part (see codec)."""

    def __init__(
        self,
        cache: KvCache,
        keys: Parts,
        values: Parts,
        codec: Codec,
        num_kv_heads: int,
        scales: ChannelScales | None,
    ) -> None:
        self.keys = keys
        self.values = values
        self._cache = cache
        self._codec = codec
        self._num_kv_heads = num_kv_heads
        self._group = keys[0].shape[2] // num_kv_heads  # 1, or with sharing off the query heads of a KV head
        self._scales = None if scales is None else _per_stored_head(scales, self._group)
        self._is_coded = len(keys) > 1
        self._staged: tuple[Tensor, Tensor] | None = None

    # -- writing ------------------------------------------------------------------------------

    def write_target(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values [pages, P, K, D] and slots [N] for ``Ops.rope_and_write_kv``."""
        if not self._is_coded and self._group == 1:
            return self.keys[0], self.values[0], slots
        count, head_dim = slots.shape[0], self._head_dim
        shape = (1, count, self._num_kv_heads, head_dim)
        staged = (slots.new_empty(shape, dtype=self._cache.dtype), slots.new_empty(shape, dtype=self._cache.dtype))
        self._staged = staged
        return *staged, torch.arange(count, device=slots.device)

    def written(self, slots: Tensor) -> None:
        """Bring what was staged into its pages."""
        if self._staged is None:
            return
        k, v = (rows[0].repeat_interleave(self._group, dim=1) for rows in self._staged)  # [N, heads, D]
        self._staged = None
        if self._scales is not None:
            k, v = k / self._scales.keys, v / self._scales.values
        if self._codec.rotates_keys:
            k = rotate(k.float())
        for stored, rows in ((self.keys, self._codec.encode(k)), (self.values, self._codec.encode(v))):
            for part, row in zip(stored, rows, strict=True):
                part.view(-1, *part.shape[2:]).index_copy_(0, slots, row)

    # -- reading ------------------------------------------------------------------------------

    def attend(self, ops: Ops, q: Tensor, spans: Sequence[Span], params: AttentionParams) -> Tensor:
        """q [N, H, D] against the pages each span sees -> [N, H * D]."""
        reading = self._cache.reading(spans)
        params = self._cache.narrowed(params, spans)
        if not self._is_coded:
            return ops.paged_attention(q, self.keys[0], self.values[0], spans, params)
        pages, moved = reading.gathered(spans, params, self._cache.page_size)
        reading.paths.setdefault(f"{self._cache.layout.kv_dtype} pages decoded before attention")
        keys, values = self.decoded(pages)
        return self._unscaled(ops.paged_attention(self._as_stored(q), keys, values, moved, params))

    def decoded(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [len(pages), P, heads, D] of ``pages`` (int64), scaled and rotated as they are stored."""
        keys, values = (
            self._codec.decode(tuple(part.index_select(0, pages) for part in stored), self._cache.dtype)
            for stored in (self.keys, self.values)
        )
        return keys, values

    def _as_stored(self, q: Tensor) -> Tensor:
        """q scaled and rotated like the stored keys, so that q . k stays what it was."""
        dtype = q.dtype
        if self._scales is not None:
            q = (q.float().unflatten(1, (self._scales.keys.shape[0], -1)) * self._scales.keys[:, None]).flatten(1, 2)
        if self._codec.rotates_keys:
            q = rotate(q.float())
        return q.to(dtype)

    def _unscaled(self, attended: Tensor) -> Tensor:
        """attended [N, H * D] of scaled values, as it would be of the values themselves."""
        if self._scales is None:
            return attended
        scales = self._scales.values
        heads = attended.view(attended.shape[0], scales.shape[0], -1, scales.shape[1])
        return (heads * scales[:, None]).to(attended.dtype).flatten(1)

    @property
    def _head_dim(self) -> int:
        part = self.keys[0]
        return part.shape[3] * (2 if part.dtype is torch.uint8 else 1)


def _per_stored_head(scales: ChannelScales, group: int) -> ChannelScales:
    return ChannelScales(*(scale.repeat_interleave(group, dim=0) for scale in scales))


@dataclass(slots=True)
class _Reading:
    """What the layers of one step share: which pages are decoded, and the spans over those."""

    spans: Sequence[Span] = ()
    gathers: dict[tuple[int | None, int], tuple[Tensor, tuple[Span, ...]]] = field(default_factory=dict)
    paths: dict[str, None] = field(default_factory=dict)  # an ordered set

    def gathered(
        self, spans: Sequence[Span], params: AttentionParams, page_size: int
    ) -> tuple[Tensor, tuple[Span, ...]]:
        """The pages that ``spans`` see, int64, the zeroed page first, and the spans with their pages at new places."""
        key = (params.window, params.sinks)
        if key not in self.gathers:
            pages, moved = [0], []
            for span in spans:
                table = [0] * -(-span.context // page_size)
                for index in seen_pages(span, params, page_size):
                    table[index] = len(pages)
                    pages.append(span.pages[index])
                whole = range(table[0], table[0] + len(table))
                moved.append(replace(span, pages=whole if table == list(whole) else table))
            self.gathers[key] = torch.tensor(pages, dtype=torch.int64), tuple(moved)
        return self.gathers[key]


def seen_pages(span: Span, params: AttentionParams, page_size: int) -> list[int]:
    """Indices into ``span.pages`` of those that some row of the span sees: the sinks' and the window's."""
    last = -(-span.context // page_size)
    if params.window is None:
        return list(range(last))
    first = max(0, span.context - span.count - params.window + 1) // page_size
    return [*range(min(first, -(-params.sinks // page_size))), *range(first, last)]
