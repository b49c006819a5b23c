"""Attention and the operations between the products, in C: torch tensors in, torch tensors out.

All activations are contiguous fp32; the cache is fp32, bf16 or fp16. Shapes as in ``ops/interface.py``.
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

from engine.ops.cpu import native
from engine.ops.interface import AttentionParams, Span

KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum rl_float_type
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}  # enum rl_activation
LARGEST_HEAD_DIM = 1024


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
        ("keys", c_void_p),
        ("values", c_void_p),
        ("q", c_void_p),
        ("rows", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("half", c_int64),
        ("kv_type", c_int64),
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
        ("keys", c_void_p),
        ("values", c_void_p),
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
        ("kv_type", c_int64),
        ("window", c_int64),
        ("sink_tokens", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
    )


def attention_path() -> str:
    return f"C kernel ({native.isa()})"


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
    _check(qkv, cos, sin, q_norm, k_norm)
    assert keys.is_contiguous() and values.is_contiguous() and slots.is_contiguous()
    num_kv_heads, head_dim = keys.shape[2:]
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
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        q=q.data_ptr(),
        rows=num_rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        half=0 if cos is None else cos.shape[1],
        kv_type=KV_TYPES[keys.dtype],
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

    rows: address of int64 [S, 4]: first row, count, context, where the span's pages begin in ``pages`` (of int64 too).
    """

    def __init__(self, spans: Sequence[Span], page_size: int) -> None:
        self.spans = spans  # held, so that its id stays its own
        used = [span.pages[: -(-span.context // page_size)] for span in spans]
        self._rows = array("q")
        first_page = 0
        for span, pages in zip(spans, used, strict=True):
            self._rows.extend((span.start, span.count, span.context, first_page))
            first_page += len(pages)
        self._pages = array("q", chain.from_iterable(used))
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
        _check(q, sink_scores)
        assert keys.is_contiguous() and values.is_contiguous()
        num_rows, num_heads, head_dim = q.shape
        out = q.new_empty(num_rows, num_heads * head_dim)
        page_size = keys.shape[1]
        table = self.table(spans, page_size)
        args = AttentionArgs(
            q=q.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            out=out.data_ptr(),
            spans=table.rows,
            pages=table.pages,
            sink_scores=_pointer(sink_scores),
            num_spans=len(spans),
            num_heads=num_heads,
            num_kv_heads=keys.shape[2],
            head_dim=head_dim,
            page_size=page_size,
            kv_type=KV_TYPES[keys.dtype],
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
