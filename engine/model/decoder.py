"""One parametric decoder for every family that a ModelSpec describes: Llama, SmolLM, Mistral, Qwen, Gemma, Phi-3.

The families differ in data (which norms, biases, windows, rotary tables, scales), never in code paths of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kv.codec import ChannelScales
from engine.model.rope import RopeTable
from engine.model.spec import LayerSpec, ModelSpec
from engine.ops.interface import AttentionParams, KvLayer, KvTensors, Ops, Packed, StepBatch, WeightSizes

Rotation = tuple[Tensor, Tensor] | tuple[None, None]  # cos, sin of this step's rows, or a layer without rotation


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's matrices as packed, and its norms as fp32 vectors (None where the family has none)."""

    attn_norm: Tensor
    qkv: Packed
    q_norm: Tensor | None
    k_norm: Tensor | None
    attn_out: Packed
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Packed
    mlp_out: Packed
    post_mlp_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything a Decoder reads. ``embed`` and ``head`` are one object when the head is tied."""

    embed: Packed
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Packed

    def matrices(self) -> Iterator[tuple[str, Packed]]:
        """Canonical name and matrix; a tied head comes once, as "head"."""
        if self.embed is not self.head:
            yield "embed", self.embed
        for index, layer in enumerate(self.layers):
            yield f"layers.{index}.qkv", layer.qkv
            yield f"layers.{index}.attn_out", layer.attn_out
            yield f"layers.{index}.gate_up", layer.gate_up
            yield f"layers.{index}.mlp_out", layer.mlp_out
        yield "head", self.head

    def norms(self) -> Iterator[Tensor]:
        yield self.final_norm
        for layer in self.layers:
            vectors = (
                layer.attn_norm,
                layer.q_norm,
                layer.k_norm,
                layer.post_attn_norm,
                layer.mlp_norm,
                layer.post_mlp_norm,
            )
            yield from (vector for vector in vectors if vector is not None)

    def num_bytes(self) -> int:
        """Bytes held, a table used twice counted once."""
        return sum(packed.num_bytes for _, packed in self.matrices()) + sum(norm.nbytes for norm in self.norms())

    def sizes(self) -> WeightSizes:
        tables = self.head.num_bytes + (0 if self.embed is self.head else self.embed.num_bytes)
        row_bytes = self.embed.num_bytes // self.embed.out_features
        of_layers = [packed for name, packed in self.matrices() if name.startswith("layers.")]
        num_weights = sum(packed.out_features * packed.in_features for packed in of_layers)
        multiplied = sum(packed.out_features * packed.in_features * packed.num_passes for packed in of_layers)
        passes = multiplied / num_weights
        return WeightSizes(self.num_bytes() - tables, self.head.num_bytes, row_bytes, passes, self.head.num_passes)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with all that ``forward`` would otherwise look up or make at each step."""

    weights: LayerWeights
    attention: AttentionParams
    rope: int | None


class Decoder:
    """The ``Model`` protocol over packed weights and one of two interchangeable backends.

    ops: key True is the fused backend, False the plain one; both read the same ``Packed`` matrices.
    max_context: longest context that will be asked for, tokens. It matters for longrope alone (Phi-3): its long factors
    are used when ``max_context`` exceeds the originally trained window, else the short ones. Keys in the cache are already
    rotated, so the choice holds for the life of the model: transformers switches when a text crosses that window and
    then recomputes the whole text; texts on either side of it agree with transformers when the choice fits them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ops: Mapping[bool, Ops],
        scheme: str,
        fused: bool = True,
        max_context: int | None = None,
    ) -> None:
        self.spec = spec
        self.max_context = max_context or native_context(spec)
        self.activation_dtype = ops[fused].activation_dtype(scheme)
        self.product_dtype = ops[fused].product_dtype(scheme)
        self.kv_dtype = ops[fused].kv_dtype(scheme)
        self._weights = weights
        self._all_ops = ops
        self._compile(spec, weights, fused)
        self._tables = [RopeTable(rope, self.max_context) for rope in spec.ropes]
        self._layers = [
            _Layer(layer_weights, _attention_params(spec, layer), layer.rope)
            for layer_weights, layer in zip(weights.layers, spec.layers, strict=True)
        ]
        self.weight_sizes = weights.sizes()
        self.weight_bytes = weights.num_bytes()
        self._weight_path = _distinct_paths(weights)

    def with_layers(self, indices: Sequence[int]) -> Decoder:
        """A decoder of only these layers, in this order, on the same weights; its cache has as many layers."""
        spec = replace(self.spec, layers=tuple(self.spec.layers[index] for index in indices))
        weights = replace(self._weights, layers=tuple(self._weights.layers[index] for index in indices))
        other = copy.copy(self)
        other.spec, other._weights = spec, weights
        other._layers = [self._layers[index] for index in indices]
        other._compile(spec, weights, *self._fused)
        other.weight_sizes, other.weight_bytes = weights.sizes(), weights.num_bytes()
        return other

    def set_fused(self, fused: bool, fused_attention: bool | None = None) -> None:
        self._fused = (fused, fused if fused_attention is None else fused_attention)
        self._ops, self._layers_at_once = self._backends[self._fused]
        self._ran_at_once = self._layers_at_once  # what runs unless the cache asks for the single operations

    def _compile(
        self, spec: ModelSpec, weights: DecoderWeights, fused: bool, fused_attention: bool | None = None
    ) -> None:
        choices = {
            (is_fused, attention): ops.with_attention(attention)
            for is_fused, ops in self._all_ops.items()
            for attention in (True, False)
        }
        self._backends = {choice: (ops, ops.compile_layers(spec, weights)) for choice, ops in choices.items()}
        self.set_fused(fused, fused_attention)

    @property
    def copy_bytes(self) -> int:
        """Of weights that batches keep unpacked, beside ``weight_bytes``."""
        return sum(packed.copy_bytes for _, packed in self._weights.matrices())

    @property
    def table_bytes(self) -> int:
        """Of the rotary tables, which grow with the longest context asked for."""
        return sum(table.num_bytes for table in self._tables)

    def kv_scales(self) -> list[ChannelScales]:
        """How large each key and value channel is, read off the weights that make it (one layer unpacked at a time)."""
        return [_channel_scales(self.spec, layer, self._ops) for layer in self._layers]

    def active_paths(self) -> dict[str, str]:
        """How the weights are packed, and what the latest step really ran."""
        ran = {operation: path for operation, path in self._ops.active_paths().items() if path}
        at_once = {} if self._ran_at_once is None else self._ran_at_once.active_paths()
        return {"weights": self._weight_path, **ran, **at_once}

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KvTensors) -> Tensor:
        """Run ``batch``, writing its keys and values to ``cache``; fp32 logits [R, vocab] of ``batch.logit_rows``."""
        ops, spec, weights = self._ops, self.spec, self._weights
        # The residual stream stays fp32 whatever the activations are: bf16 would round the sum anew at each of its
        # additions, and those roundings, not the weights', would decide between close candidates.
        x = ops.embed(weights.embed, batch.token_ids, spec.embedding_scale, torch.float32)
        cache.begin_step()
        self._ran_at_once = self._layers_at_once if cache.runs_at_once else None
        context = max(span.context for span in batch.spans)
        if self._ran_at_once is None:
            # This step's cosines and sines, gathered once per table and shared by its layers.
            x = self._run_layers(x, batch, [table.rows(batch.positions, context) for table in self._tables], cache)
        else:
            x = self._ran_at_once.run(x, batch, [table.covering(context) for table in self._tables], cache)
        if x.shape[0] == 0:
            return torch.empty(0, spec.vocab_size, dtype=torch.float32, device=x.device)
        return ops.head(x, weights.head, spec.logit_softcap)

    def _run_layers(self, x: Tensor, batch: StepBatch, rotations: Sequence[Rotation], cache: KvTensors) -> Tensor:
        """All layers and the final norm, operation by operation: x [N, hidden] -> [R, hidden] of ``batch.logit_rows``."""
        for index in range(len(self._layers) - 1):
            layer = self._layers[index]
            attended = self._attend(layer, x, batch, rotations, cache.layer(index))
            x = self._finish_layer(layer.weights, x, attended)
        last = self._layers[-1]
        attended = self._attend(last, x, batch, rotations, cache.layer(len(self._layers) - 1))
        # From here on a row no longer sees the others: only those whose logits are wanted go on.
        rows = batch.logit_rows
        if rows.shape[0] == 0:
            return x[:0]
        x = self._finish_layer(last.weights, x.index_select(0, rows), attended.index_select(0, rows))
        return self._ops.rms_norm(x, self._weights.final_norm, self.spec.norm_eps)

    def _attend(
        self,
        layer: _Layer,
        x: Tensor,
        batch: StepBatch,
        rotations: Sequence[Rotation],
        kv: KvLayer,
    ) -> Tensor:
        """Norm, QKV, rotation, cache write and attention: x [N, hidden] -> [N, H * D]."""
        ops, weights, eps = self._ops, layer.weights, self.spec.norm_eps
        qkv = ops.linear(ops.rms_norm(x, weights.attn_norm, eps).to(self.activation_dtype), weights.qkv)
        cos, sin = (None, None) if layer.rope is None else rotations[layer.rope]
        keys, values, slots = kv.write_target(batch.slots)
        q = ops.rope_and_write_kv(qkv, cos, sin, weights.q_norm, weights.k_norm, eps, keys, values, slots)
        kv.written(batch.slots)
        return kv.attend(ops, q, batch.spans, layer.attention)

    def _finish_layer(self, weights: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """Attention output, MLP and both residual additions: x [N, hidden], attended [N, H * D] -> [N, hidden]."""
        ops, eps = self._ops, self.spec.norm_eps
        x = self._add_product(x, attended, weights.attn_out, weights.post_attn_norm)
        normed = ops.rms_norm(x, weights.mlp_norm, eps).to(self.activation_dtype)
        gate_up = ops.linear(normed, weights.gate_up)
        activated = ops.gated_mlp_activation(gate_up, self.spec.activation)
        return self._add_product(x, activated, weights.mlp_out, weights.post_mlp_norm)

    def _add_product(self, residual: Tensor, x: Tensor, packed: Packed, post_norm: Tensor | None) -> Tensor:
        """residual (fp32) + x @ packed, the product normalized first where the family has sandwich norms."""
        ops = self._ops
        if post_norm is None:
            return ops.linear(x, packed, residual)
        return residual + ops.rms_norm(ops.linear(x, packed), post_norm, self.spec.norm_eps)


def _channel_scales(spec: ModelSpec, layer: _Layer, ops: Ops) -> ChannelScales:
    """Root mean square of each channel for normalized inputs of independent elements, the bias included.

    Rotation mixes channels in pairs, so both get their common size.
    """
    weights = layer.weights
    rows = ops.unpack(weights.qkv)[spec.q_size :] * weights.attn_norm
    squares = rows.square().sum(1)
    if weights.qkv.bias is not None:
        squares = squares + weights.qkv.bias[spec.q_size :].float().square()
    keys, values = squares.view(2, spec.num_kv_heads, spec.head_dim)
    if weights.k_norm is not None:
        keys = weights.k_norm.float().square().expand_as(keys)
    if layer.rope is not None:
        half = spec.ropes[layer.rope].rotary_dim // 2
        pair = (keys[:, :half] + keys[:, half : 2 * half]) / 2
        keys = torch.cat((pair, pair, keys[:, 2 * half :]), dim=1)
    return ChannelScales(_relative(keys.sqrt()), _relative(values.sqrt()))


def _relative(sizes: Tensor) -> Tensor:
    """Sizes over their head's mean; a channel that is never used counts as a thousandth of it."""
    return (sizes / sizes.mean(-1, keepdim=True).clamp_min(1e-6)).clamp_min(1e-3)


def _distinct_paths(weights: DecoderWeights) -> str:
    """The products the matrices were packed for, each once."""
    return "; ".join(dict.fromkeys(packed.path for _, packed in weights.matrices()))


def _attention_params(spec: ModelSpec, layer: LayerSpec) -> AttentionParams:
    return AttentionParams(spec.query_scale, layer.window, spec.attention_softcap)


def native_context(spec: ModelSpec) -> int:
    """Longest context without a context extension that must be chosen at load, tokens.

    The model's own window, but for longrope the originally trained one: its short factors serve only that far.
    """
    originals = [rope.original_max_position for rope in spec.ropes if rope.kind == "longrope"]
    return min([spec.max_position, *originals])
