"""Attention and the operations between the products, in C: torch tensors in, torch tensors out.

All activations are contiguous fp32; the cache is fp32, bf16, fp16 or codes of them (engine/kv/codec.py). Shapes as in
``ops/interface.py``.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from engine.kv.codec import ChannelScales, codec_for
from engine.ops.cpu import native
from engine.ops.interface import AttentionParams, Span

# enum rl_kv_type, by what the first part of a key is kept in; with each goes one type of value (see _kv_type)
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}  # enum rl_activation
LARGEST_HEAD_DIM = 1024
ALL_HEADS = -1  # as the KV head of a span


class NormArgs(ctypes.Structure):
    """rl_norm of pointwise.h."""

    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("size", c_int64),
        ("eps", c_float),
    )


def _kv_type(keys: Sequence[Tensor], values: Sequence[Tensor]) -> int:
    """enum rl_kv_type. ValueError for a pair of keys and values that no kernel reads: it would take them for another."""
    kept = keys[0].dtype
    if kept in KV_TYPES:
        name = {torch.int8: "int8", torch.uint8: "int4"}.get(kept, "native")
        known = codec_for(name, 2 * values[0].shape[-1] if name == "int4" else keys[0].shape[-1], kept)
        if _parts(keys) == known.keys.parts and _parts(values) == known.values.parts:
            return KV_TYPES[kept]
    raise ValueError(f"No kernel reads keys kept as {_parts(keys)} with values kept as {_parts(values)}.")


def _parts(tensors: Sequence[Tensor]) -> tuple[tuple[int, torch.dtype], ...]:
    """As ``Codec.parts``."""
    return tuple((tensor.shape[-1], tensor.dtype) for tensor in tensors)


class KvArgs(ctypes.Structure):
    """rl_kv of attention.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_numbers", c_void_p),
        ("value_numbers", c_void_p),
        ("key_sizes", c_void_p),
        ("value_sizes", c_void_p),
        ("type", c_int64),
    )

    @staticmethod
    def of(keys: Sequence[Tensor], values: Sequence[Tensor], sizes: ChannelScales | None = None) -> KvArgs:
        """keys, values: the parts of a layer's cache. sizes: of coded ones, per stored head; the caller holds them all."""
        assert all(part.is_contiguous() for part in (*keys, *values))
        args = KvArgs(keys=keys[0].data_ptr(), values=values[0].data_ptr(), type=_kv_type(keys, values))
        if len(keys) > 1:
            args.key_numbers, args.value_numbers = keys[1].data_ptr(), values[1].data_ptr()
        if sizes is not None:
            _check(*sizes)
            assert sizes.keys.shape[0] == keys[0].shape[2], (sizes.keys.shape, keys[0].shape)
            args.key_sizes, args.value_sizes = sizes.keys.data_ptr(), sizes.values.data_ptr()
        return args


class RopeArgs(ctypes.Structure):
    """rl_rope of pointwise.h."""

    _fields_ = (
        ("qkv", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("kv", KvArgs),
        ("q", c_void_p),
        ("k", c_void_p),
        ("rows", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("half", c_int64),
        ("copies", c_int64),
        ("eps", c_float),
    )


class GateArgs(ctypes.Structure):
    """rl_gate of pointwise.h."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("size", c_int64),
        ("activation", c_int64),
    )


class AttentionArgs(ctypes.Structure):
    """rl_attention of attention.h."""

    _fields_ = (
        ("q", c_void_p),
        ("kv", KvArgs),
        ("out", c_void_p),
        ("spans", c_void_p),
        ("pages", c_void_p),
        ("sink_scores", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("num_spans", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("page_size", c_int64),
        ("window", c_int64),
        ("sink_tokens", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
    )


def attention_path(kept_in: torch.dtype = torch.float32) -> str:
    """What attention runs, for the panel. kept_in: the first part of a key."""
    codes = {torch.int8: ", int8 codes read as they are", torch.uint8: ", int4 codes read as they are"}
    return f"C kernel ({native.isa()}{codes.get(kept_in, '')})"


@cache
def _entry(name: str) -> Any:
    return native.function(name, c_void_p)


def _call(name: str, args: ctypes.Structure) -> int:
    result = int(_entry(name)(ctypes.addressof(args)))
    assert result >= 0, f"{name} refused its arguments"
    return result


def _check(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        assert tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] -> the same shape."""
    _check(x, weight)
    out = torch.empty_like(x)
    size = weight.shape[0]
    _call(
        "rl_rms_norm",
        NormArgs(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps),
    )
    return out


def rope_and_write_kv(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """See ``Ops.rope_and_write_kv``; q is fp32 [N, H, D]."""
    num_kv_heads, head_dim = keys.shape[2:]
    kv = KvArgs.of((keys,), (values,))
    return rope_and_keep_kv(qkv, cos, sin, q_norm, k_norm, eps, kv, num_kv_heads, head_dim, slots)


def rope_and_keep_kv(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv: KvArgs,
    num_kv_heads: int,
    head_dim: int,
    slots: Tensor,
    copies: int = 1,
) -> Tensor:
    """The same into any cache, ``copies`` times per KV head."""
    _check(qkv, cos, sin, q_norm, k_norm)
    assert slots.is_contiguous()
    num_rows = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = qkv.new_empty(num_rows, num_heads, head_dim)
    args = RopeArgs(
        qkv=qkv.data_ptr(),
        cos=_pointer(cos),
        sin=_pointer(sin),
        q_norm=_pointer(q_norm),
        k_norm=_pointer(k_norm),
        slots=slots.data_ptr(),
        kv=kv,
        q=q.data_ptr(),
        rows=num_rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        half=0 if cos is None else cos.shape[1],
        copies=copies,
        eps=eps,
    )
    _call("rl_rope_and_write_kv", args)
    return q


def gated_mlp_activation(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [N, 2 * intermediate] -> activation(gate) * up. ValueError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"There is no activation {activation!r}; this model cannot run on the own decoder.")
    _check(gate_up)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    _call("rl_gated_activation", GateArgs(gate_up.data_ptr(), out.data_ptr(), num_rows, size, ACTIVATIONS[activation]))
    return out


class SpanTable:
    """One step's spans as attention.c reads them; all layers share it.

    rows: address of int64 [S, 6]: first row, count, context, where the span's pages begin in ``pages`` (of int64 too),
    its KV head, whether it decodes. num_pages: in ``pages``.
    """

    def __init__(self, spans: Sequence[Span], page_size: int) -> None:
        self.spans = spans  # held, so that its id stays its own
        used = [span.pages[: -(-span.context // page_size)] for span in spans]
        self._rows = array("q")
        first_page = 0
        for span, pages in zip(spans, used, strict=True):
            self._rows.extend((span.start, span.count, span.context, first_page, ALL_HEADS, span.is_decode))
            first_page += len(pages)
        self._pages = array("q", chain.from_iterable(used))
        self.num_pages = first_page
        self.rows = self._rows.buffer_info()[0]
        self.pages = self._pages.buffer_info()[0]


class PagedAttention:
    """Attention with what the layers of a step share: the span table and the workspace."""

    def __init__(self) -> None:
        self._table: SpanTable | None = None
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def table(self, spans: Sequence[Span], page_size: int) -> SpanTable:
        """All layers of a step pass the same ``spans`` object."""
        if self._table is None or self._table.spans is not spans:
            self._table = SpanTable(spans, page_size)
        return self._table

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        spans: Sequence[Span],
        params: AttentionParams,
        sink_scores: Tensor | None = None,
        sink_tokens: int = 0,
    ) -> Tensor:
        """See ``Ops.paged_attention``.

        sink_scores: fp32 [H], a score per head that takes its share and gives nothing. sink_tokens: the text's first
        tokens, at most 128, that a row sees although they lie before its window.
        """
        kv = KvArgs.of((keys,), (values,))
        return self.attend(q, kv, keys.shape[1], keys.shape[2], spans, params, sink_scores, sink_tokens)

    def attend(
        self,
        q: Tensor,
        kv: KvArgs,
        page_size: int,
        num_kv_heads: int,
        spans: Sequence[Span],
        params: AttentionParams,
        sink_scores: Tensor | None = None,
        sink_tokens: int = 0,
    ) -> Tensor:
        """The same with any cache."""
        _check(q, sink_scores)
        num_rows, num_heads, head_dim = q.shape
        out = q.new_empty(num_rows, num_heads * head_dim)
        table = self.table(spans, page_size)
        args = AttentionArgs(
            q=q.data_ptr(),
            kv=kv,
            out=out.data_ptr(),
            spans=table.rows,
            pages=table.pages,
            sink_scores=_pointer(sink_scores),
            num_spans=len(spans),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            window=params.window or 0,
            sink_tokens=sink_tokens,
            scale=params.scale,
            softcap=params.softcap or 0.0,
        )
        needed = _call("rl_attention_workspace", args)
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(2 * needed, dtype=torch.uint8)
        args.workspace, args.workspace_bytes = self._workspace.data_ptr(), self._workspace.numel()
        _call("rl_paged_attention", args)
        return out
