"""All layers of a step as one C call: the pointers of a model's matrices are gathered once, a step's own at each step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.model.spec import LayerSpec, ModelSpec
from engine.ops.cpu import native
from engine.ops.cpu.native.kernels import ACTIVATIONS, LARGEST_HEAD_DIM, KvArgs, SpanTable, attention_path
from engine.ops.cpu.native.linear import NativePacked
from engine.ops.interface import KvTensors, Packed, StepBatch

if TYPE_CHECKING:
    from engine.model.decoder import DecoderWeights, LayerWeights


class Matrix(ctypes.Structure):
    """rl_matrix of layers.h."""

    _fields_ = (
        ("kind", c_int64),
        ("weights", c_void_p),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("bias", c_void_p),
    )


class Layer(ctypes.Structure):
    """rl_layer of layers.h."""

    _fields_ = (
        ("attn_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("post_attn_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("qkv", Matrix),
        ("attn_out", Matrix),
        ("gate_up", Matrix),
        ("mlp_out", Matrix),
        ("least", c_void_p),
        ("largest", c_void_p),
        ("kv", KvArgs),
        ("window", c_int64),
        ("sink_tokens", c_int64),
        ("rotation", c_int64),
    )


class DecoderArgs(ctypes.Structure):
    """rl_decoder of layers.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("final_norm", c_void_p),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("activation", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("softcap", c_float),
    )


class RotationArgs(ctypes.Structure):
    """rl_rotation of layers.h."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("half", c_int64))


class StepArgs(ctypes.Structure):
    """rl_step of layers.h."""

    _fields_ = (
        ("x", c_void_p),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("spans", c_void_p),
        ("pages", c_void_p),
        ("rotations", c_void_p),
        ("wanted", c_void_p),
        ("out", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("rows", c_int64),
        ("num_spans", c_int64),
        ("num_wanted", c_int64),
        ("page_size", c_int64),
        ("num_pages", c_int64),
        ("sparse_pages", c_int64),
        ("copies", c_int64),
    )


@cache
def _entry(name: str) -> Any:
    return native.function(name, c_void_p, c_void_p)


class NativeLayers:
    """A decoder's layers and final norm. The weights must stay as they are while this lives; it holds them."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        self._weights = weights
        self._spec = spec
        self._layers = (Layer * spec.num_layers)(
            *(_layer(layer, its) for layer, its in zip(spec.layers, weights.layers, strict=True))
        )
        self._decoder = DecoderArgs(
            layers=ctypes.addressof(self._layers),
            final_norm=weights.final_norm.data_ptr(),
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            activation=ACTIVATIONS[spec.activation],
            eps=spec.norm_eps,
            scale=spec.query_scale,
            softcap=spec.attention_softcap or 0.0,
        )
        paths = dict.fromkeys(matrix.path for layer in weights.layers for matrix in _matrices(layer))
        self._products_path = "; ".join(paths)
        self._hidden = spec.hidden_size
        self._rotations = (RotationArgs * max(1, len(spec.ropes)))()
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._copies = 1
        self._attention_path = attention_path()
        self._cache: weakref.ref[KvTensors] | None = None
        self._revision = 0

    @staticmethod
    def can_run(spec: ModelSpec, weights: DecoderWeights) -> bool:
        """Whether all matrices are packed for the C products and all sizes are within their limits."""
        matrices = (matrix for layer in weights.layers for matrix in _matrices(layer))
        return (
            all(isinstance(matrix, NativePacked) for matrix in matrices)
            and spec.activation in ACTIVATIONS
            and spec.head_dim <= LARGEST_HEAD_DIM
        )

    def active_paths(self) -> dict[str, str]:
        return {"products": self._products_path, "attention": self._attention_path, "layers": "all in one C call"}

    def run(self, x: Tensor, batch: StepBatch, rotations: Sequence[Tensor], kv: KvTensors) -> Tensor:
        """x: fp32 [N, hidden], overwritten. rotations: cosines and sines, fp32 [2, positions, half] each. Writes the step's
        keys and values; returns the normed rows of ``batch.logit_rows``, fp32 [R, hidden]."""
        assert x.dtype == torch.float32 and x.is_contiguous()
        assert batch.slots.is_contiguous() and batch.positions.is_contiguous() and batch.logit_rows.is_contiguous()
        self._bind_cache(kv)
        for args, table in zip(self._rotations, rotations, strict=False):
            _, num_positions, half = table.shape
            args.cos, args.half = table.data_ptr(), half
            args.sin = args.cos + num_positions * half * table.itemsize
        kv.note_choosing(batch.spans)
        spans = SpanTable(batch.spans, kv.page_size)
        out = torch.empty(batch.logit_rows.shape[0], self._hidden)
        step = StepArgs(
            x=x.data_ptr(),
            slots=batch.slots.data_ptr(),
            positions=batch.positions.data_ptr(),
            spans=spans.rows,
            pages=spans.pages,
            rotations=ctypes.addressof(self._rotations),
            wanted=batch.logit_rows.data_ptr(),
            out=out.data_ptr(),
            rows=x.shape[0],
            num_spans=len(batch.spans),
            num_wanted=out.shape[0],
            page_size=kv.page_size,
            num_pages=spans.num_pages,
            sparse_pages=kv.sparse_pages or 0,
            copies=self._copies,
        )
        needed = self._call("rl_layers_workspace", step)
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed + needed // 2, dtype=torch.uint8)
        step.workspace, step.workspace_bytes = self._workspace.data_ptr(), self._workspace.numel()
        self._call("rl_run_layers", step)
        return out

    def _call(self, name: str, step: StepArgs) -> int:
        result = int(_entry(name)(ctypes.addressof(self._decoder), ctypes.addressof(step)))
        if result < 0:
            raise MemoryError(f"The C kernels found no memory for a step of {step.rows:,} rows.")
        return result

    def _bind_cache(self, kv: KvTensors) -> None:
        if self._cache is not None and self._cache() is kv and self._revision == kv.revision:
            return
        for index, (layer, spec) in enumerate(zip(self._layers, self._spec.layers, strict=True)):
            its = kv.layer(index)
            layer.kv = KvArgs.of(its.keys, its.values, its.sizes)
            layer.window, layer.sink_tokens = kv.sight(spec.window)
            self._attention_path = attention_path(its.keys[0].dtype)
            self._copies = its.keys[0].shape[2] // self._spec.num_kv_heads
            least, largest = its.bounds or (None, None)
            layer.least, layer.largest = _address(least), _address(largest)
        self._cache, self._revision = weakref.ref(kv), kv.revision


def _matrices(layer: LayerWeights) -> tuple[Packed, ...]:
    return layer.qkv, layer.attn_out, layer.gate_up, layer.mlp_out


def _layer(spec: LayerSpec, weights: LayerWeights) -> Layer:
    return Layer(
        attn_norm=_address(weights.attn_norm),
        q_norm=_address(weights.q_norm),
        k_norm=_address(weights.k_norm),
        post_attn_norm=_address(weights.post_attn_norm),
        mlp_norm=_address(weights.mlp_norm),
        post_mlp_norm=_address(weights.post_mlp_norm),
        qkv=_matrix(weights.qkv),
        attn_out=_matrix(weights.attn_out),
        gate_up=_matrix(weights.gate_up),
        mlp_out=_matrix(weights.mlp_out),
        rotation=-1 if spec.rope is None else spec.rope,
    )


def _matrix(packed: Packed) -> Matrix:
    assert isinstance(packed, NativePacked)
    return Matrix(packed.product_kind, packed.weights, packed.out_features, packed.in_features, packed.bias_address)


def _address(vector: Tensor | None) -> int | None:
    if vector is None:
        return None
    assert vector.dtype == torch.float32 and vector.is_contiguous()
    return vector.data_ptr()
