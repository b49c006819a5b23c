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

from engine.kv.codec import ChannelScales, KvCodec, Parts, codec_for, rotate
from engine.kv.layout import DENSE_LAYERS, NUM_SINKS, KvLayout
from engine.kv.sparse import PageBounds
from engine.model.spec import ModelSpec
from engine.ops.interface import AttentionParams, Ops, Span
from engine.ops.reference import hidden_keys, soft_cap

COMPILED_SPARSE_PAGES = range(2, 67)  # that CompiledLayers can choose per KV head (MOST_RANKED of sparse_isa.c)


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
        self.layout = layout or KvLayout.of(spec, {}, dtype.itemsize)
        self._window: int | None = None
        self.sparse_pages: int | None = None  # that a decoding token reads per KV head, at most; None: all it sees
        self._reading = _Reading()
        self._has_windows = any(layer.window is not None for layer in spec.layers)
        self.revision = 0
        codec = codec_for(self.layout.kv_dtype, spec.head_dim, dtype)
        heads = self.layout.num_heads
        shape = (spec.num_layers, num_pages, page_size, heads)
        keys, values = (
            [torch.zeros(*shape, size, dtype=kind, device=device) for size, kind in each.parts] for each in codec
        )
        self._layers = [
            KvLayer(
                self,
                tuple(part[index] for part in keys),
                tuple(part[index] for part in values),
                codec,
                spec,
                None if scales is None or self.layout.kv_dtype == "native" else scales[index],
            )
            for index in range(spec.num_layers)
        ]
        self._num_part_bytes = sum(part.nbytes for part in keys + values)

    @property
    def num_bytes(self) -> int:
        """All tensors held: keys, values and the bounds of keys."""
        bounds = (bound.nbytes for layer in self._layers for bound in layer.bounds or ())
        return self._num_part_bytes + sum(bounds)

    @property
    def page_bytes(self) -> int:
        """What one page takes of them."""
        return self.layout.page_bytes(self.page_size, with_bounds=self.sparse_pages is not None)

    @property
    def window(self) -> int | None:
        return self._window

    @window.setter
    def window(self, tokens: int | None) -> None:
        self._window = tokens
        self.revision += 1

    @property
    def runs_at_once(self) -> bool:
        """Nothing happens between writing and reading that a backend's ``CompiledLayers`` does not know.

        It does not choose pages within a window.
        """
        if self.sparse_pages is None:
            return True
        return not self._has_windows and self.window is None and self.sparse_pages in COMPILED_SPARSE_PAGES

    def begin_step(self) -> None:
        """Another step's layers follow: nothing that those of the last one shared holds any more."""
        self._reading = _Reading()

    def sight(self, window: int | None) -> tuple[int, int]:
        """What a layer with this window of its own (None: all) sees under the user's: tokens (0: all) and first tokens."""
        if self.window is None or (window is not None and window <= self.window):
            return window or 0, 0
        return self.window, NUM_SINKS

    def set_sparse(self, num_pages: int | None, written: Sequence[int] = ()) -> None:
        """Let decoding tokens read ``num_pages`` pages (None: all). written: pages that hold keys now."""
        if num_pages is None or self.sparse_pages is None:
            for layer in self._layers[DENSE_LAYERS:]:
                layer.set_sparse(num_pages is not None, torch.tensor(written, dtype=torch.int64))
            self.revision += 1
        self.sparse_pages = num_pages

    def layer(self, index: int) -> KvLayer:
        return self._layers[index]

    def active_paths(self) -> dict[str, str]:
        """How the latest step reached keys and values, for the panel; empty when it read the pages as they are."""
        path = "; ".join(self._reading.paths)
        return {"kv": path} if path else {}

    def note_choosing(self, spans: Sequence[Span]) -> None:
        """Layers that run at once let those of ``spans`` choose their pages that decode and see more than they may read."""
        count = self.sparse_pages
        if count is not None:
            self._reading.note_choosing(count, sum(s.is_decode and s.context > count * self.page_size for s in spans))

    @property
    def current_reading(self) -> _Reading:
        return self._reading

    def reading(self, spans: Sequence[Span]) -> _Reading:
        """What the layers of the step with these ``spans`` share."""
        if self._reading.spans is not spans:
            self._reading = _Reading(spans)
        return self._reading

    def narrowed(self, params: AttentionParams, spans: Sequence[Span]) -> AttentionParams:
        """``params`` with the user's window, if it is the narrower one and hides anything from these spans."""
        window, sinks = self.sight(params.window)
        if sinks == 0 or max(span.context for span in spans) <= window + NUM_SINKS:
            return params  # nothing between the sinks and the window yet
        return replace(params, window=window, sinks=sinks)


class KvLayer:
    """One layer's pages. ``keys`` and ``values`` are what is stored of them, part by part (see codec)."""

    def __init__(
        self,
        cache: KvCache,
        keys: Parts,
        values: Parts,
        codec: KvCodec,
        spec: ModelSpec,
        scales: ChannelScales | None,
    ) -> None:
        self.keys = keys
        self.values = values
        self._cache = cache
        self._codec = codec
        self._num_kv_heads = spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._group = keys[0].shape[2] // spec.num_kv_heads  # 1, or with sharing off the query heads of a KV head
        self.sizes = None if scales is None else _per_stored_head(scales, self._group)
        self._is_coded = len(keys) > 1
        self._staged: tuple[Tensor, Tensor] | None = None
        self._bounds: PageBounds | None = None

    def set_sparse(self, on: bool, written: Tensor) -> None:
        """Keep bounds of the keys of each page, those of pages ``written`` before (int64) too; or keep them no more."""
        if not on:
            self._bounds = None
            return
        part = self.keys[0]
        self._bounds = PageBounds(part.shape[0], part.shape[2], self._head_dim)
        for pages in written.split(256):  # decoded a few at a time: memory
            keys = self.decoded(pages)[0]
            keys = rotate(keys.float()) if self._codec.keys.rotates else keys
            self._bounds.read_pages(pages, keys if self.sizes is None else keys * self.sizes.keys)

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        return None if self._bounds is None else (self._bounds.least, self._bounds.largest)

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
            if self._bounds is not None:
                written = self.keys[0].flatten(0, 1).index_select(0, slots)
                self._bounds.add(slots, written, self._cache.page_size)
            return
        k, v = (rows[0].repeat_interleave(self._group, dim=1) for rows in self._staged)  # [N, heads, D]
        self._staged = None
        if self._bounds is not None:
            self._bounds.add(slots, k, self._cache.page_size)
        if self.sizes is not None:
            k, v = k / self.sizes.keys, v / self.sizes.values
        for stored, codec, rows in ((self.keys, self._codec.keys, k), (self.values, self._codec.values, v)):
            for part, row in zip(stored, codec.encode(rotate(rows.float()) if codec.rotates else rows), strict=True):
                part.view(-1, *part.shape[2:]).index_copy_(0, slots, row)

    # -- reading ------------------------------------------------------------------------------

    def attend(self, ops: Ops, q: Tensor, spans: Sequence[Span], params: AttentionParams) -> Tensor:
        """q [N, H, D] against the pages each span sees -> [N, H * D]."""
        reading = self._cache.reading(spans)
        params = self._cache.narrowed(params, spans)
        if self._bounds is not None and self._cache.sparse_pages is not None:
            division = reading.divided(params, self._cache.page_size, self._cache.sparse_pages)
            if division.choosing:
                return self._attend_divided(ops, q, division, params)
        return self._attend_all(ops, q, spans, params)

    def _attend_divided(self, ops: Ops, q: Tensor, division: _Division, params: AttentionParams) -> Tensor:
        """Some spans choose their pages, the others read all they see."""
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if division.others:
            out[division.rows] = self._attend_all(ops, q[division.rows], division.others, params).to(q.dtype)
        for choosing in division.choosing:
            out[choosing.span.start] = self._attend_chosen(q[choosing.span.start], choosing, params).to(q.dtype)
        return out

    def _attend_chosen(self, q: Tensor, choosing: _Choosing, params: AttentionParams) -> Tensor:
        """One row, q [H, D], against the pages its bounds name, in plain torch -> [H * D]."""
        bounds, count, page_size = self._bounds, self._cache.sparse_pages, self._cache.page_size
        assert bounds is not None
        assert count is not None
        chosen = bounds.choose(q, choosing.pages, count)  # [heads, count]
        heads = torch.arange(chosen.shape[0])[:, None]
        pages = choosing.pages[chosen]
        k, v = (
            codec.decode(tuple(part[pages, :, heads] for part in stored), torch.float32).flatten(1, 2)
            for codec, stored in zip(self._codec, (self.keys, self.values), strict=True)
        )  # [heads, count * P, D]
        position = (choosing.indices[chosen][:, :, None] * page_size + torch.arange(page_size)).flatten(1)
        query = self._as_stored(q[None])[0].float().view(chosen.shape[0], -1, q.shape[-1])
        scores = soft_cap(query @ k.transpose(1, 2) * params.scale, params.softcap)
        hidden = hidden_keys(choosing.span, position, params)
        shares = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        return self._as_computed((shares @ v).view(1, -1))[0]

    def _attend_all(self, ops: Ops, q: Tensor, spans: Sequence[Span], params: AttentionParams) -> Tensor:
        """Every span reads all pages it sees."""
        reading = self._cache.current_reading
        if not self._is_coded:
            return ops.paged_attention(q, self.keys[0], self.values[0], spans, params)
        pages, moved = reading.gathered(spans, params, self._cache.page_size)
        uneven = "" if self.sizes is not None else ", channels not evened out (their sizes are not known)"
        reading.paths.setdefault(f"{self._cache.layout.kv_dtype} pages decoded before attention{uneven}")
        keys, values = self.decoded(pages)
        return self._as_computed(ops.paged_attention(self._as_stored(q), keys, values, moved, params))

    def decoded(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [len(pages), P, heads, D] of ``pages`` (int64), scaled and rotated as they are stored."""
        keys, values = (
            codec.decode(tuple(part.index_select(0, pages) for part in stored), self._cache.dtype)
            for codec, stored in zip(self._codec, (self.keys, self.values), strict=True)
        )
        return keys, values

    def _as_stored(self, q: Tensor) -> Tensor:
        """q scaled and rotated like the stored keys, so that q . k stays what it was."""
        dtype = q.dtype
        if self.sizes is not None:
            q = (q.float().unflatten(1, (self.sizes.keys.shape[0], -1)) * self.sizes.keys[:, None]).flatten(1, 2)
        if self._codec.keys.rotates:
            q = rotate(q.float())
        return q.to(dtype)

    def _as_computed(self, attended: Tensor) -> Tensor:
        """attended [N, H * D] of stored values, as it would be of the values themselves."""
        if self.sizes is None and not self._codec.values.rotates:
            return attended
        heads = attended.view(attended.shape[0], self.keys[0].shape[2], -1, self._head_dim)
        if self._codec.values.rotates:
            heads = rotate(heads.float())
        if self.sizes is not None:
            heads = heads * self.sizes.values[:, None]
        return heads.to(attended.dtype).flatten(1)


def _per_stored_head(scales: ChannelScales, group: int) -> ChannelScales:
    return ChannelScales(*(scale.repeat_interleave(group, dim=0) for scale in scales))


@dataclass(frozen=True, slots=True)
class _Choosing:
    """A decoding span and what it chooses from: indices into its table, int64 [n], and the pages there, int64 [n]."""

    span: Span
    indices: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True)
class _Division:
    """A step's spans: those that choose their pages, and the ``others`` with their ``rows`` (int64) put together."""

    choosing: tuple[_Choosing, ...]
    others: tuple[Span, ...]
    rows: Tensor


@dataclass(slots=True)
class _Reading:
    """What the layers of one step share: which pages are decoded or chosen from, and the spans over those."""

    spans: Sequence[Span] = ()
    gathers: dict[tuple[int | None, int, bool], tuple[Tensor, tuple[Span, ...]]] = field(default_factory=dict)
    divisions: dict[tuple[int | None, int], _Division] = field(default_factory=dict)
    paths: dict[str, None] = field(default_factory=dict)  # an ordered set

    def gathered(
        self, spans: Sequence[Span], params: AttentionParams, page_size: int
    ) -> tuple[Tensor, tuple[Span, ...]]:
        """The pages that ``spans`` see, int64, the zeroed page first, and the spans with their pages at new places."""
        key = (params.window, params.sinks, spans is self.spans)
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

    def note_choosing(self, count: int, num_chats: int) -> None:
        if num_chats:
            self.paths.setdefault(f"{count} pages per KV head chosen by key bounds in {num_chats} chats")

    def divided(self, params: AttentionParams, page_size: int, count: int) -> _Division:
        """Decoding spans that see more than ``count`` pages choose; the others do not."""
        key = (params.window, params.sinks)
        if key not in self.divisions:
            choosing: list[_Choosing] = []
            others: list[Span] = []
            rows: list[int] = []
            for span in self.spans:
                seen = seen_pages(span, params, page_size)
                if span.is_decode and len(seen) > count:
                    pages = [span.pages[index] for index in seen]
                    choosing.append(_Choosing(span, torch.tensor(seen), torch.tensor(pages)))
                else:
                    others.append(replace(span, start=len(rows)))
                    rows += range(span.start, span.start + span.count)
            self.divisions[key] = _Division(tuple(choosing), tuple(others), torch.tensor(rows, dtype=torch.int64))
            self.note_choosing(count, len(choosing))
        return self.divisions[key]


def seen_pages(span: Span, params: AttentionParams, page_size: int) -> list[int]:
    """Indices into ``span.pages`` of those that some row of the span sees: the sinks' and the window's."""
    last = -(-span.context // page_size)
    if params.window is None:
        return list(range(last))
    first = max(0, span.context - span.count - params.window + 1) // page_size
    return [*range(min(first, -(-params.sinks // page_size))), *range(first, last)]
