"""The few, fat operations a decoder is made of. Every backend offers the same signatures.

Shapes: N rows (tokens of all requests of a step, packed), H query heads, K KV heads, D head_dim, P page_size.
``reference`` is the truth in plain torch; ``cpu`` is fast; both take the same packed weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor, dtype

from engine.kv.codec import ChannelScales

if TYPE_CHECKING:
    from engine.model.decoder import DecoderWeights
    from engine.model.spec import ModelSpec
    from engine.weights.stored import StoredRows


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight matrix [out_features, in_features] as one backend keeps it.

    scheme: "none", "int8", an int4 one of engine/weights/quantize.py, "nf4", "llm_int8", or "as_stored". data: the backend's tensors. bias: [out_features] or None.
    num_bytes: bytes read when every weight is read once (data and bias).
    path: the product that really runs, for the panel, e.g. "int4: torch packed product, bf16 activations".
    num_passes: how often a row is multiplied: twice where its activations keep 16 bits as two halves of 8.
    """

    scheme: str
    out_features: int
    in_features: int
    data: tuple[Tensor, ...]
    bias: Tensor | None
    num_bytes: int
    path: str

    @property
    def num_passes(self) -> int:
        return 1

    @property
    def copy_bytes(self) -> int:
        """Of the matrix once more, unpacked, where a backend has made that to multiply batches with."""
        return 0


@dataclass(frozen=True, slots=True)
class Span:
    """One request's rows in a step.

    Rows [start, start + count) of the packed batch are its tokens at positions
    [context - count, context); its KV lies in ``pages`` (page i holds positions [i*P, (i+1)*P)),
    the positions of this step included. A page that no layer sees any more may be given as 0.
    is_decode: the one row continues a reply (and is not the end of a prompt).
    """

    start: int
    count: int
    context: int
    pages: Sequence[int]
    is_decode: bool = False


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the model runs in one step, all requests packed without padding.

    token_ids, positions, slots: int64 [N]; slot = page * page_size + offset, where a row's K and V are written.
    spans: one per request. logit_rows: int64 [R], the rows whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[Span, ...]
    logit_rows: Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """One layer's attention: softmax scale, window (tokens seen, itself included; None = all), score softcap.

    sinks: the text's first tokens that a row sees although they lie before its window.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: int = 0


class Ops(Protocol):
    """A backend. Methods are pure but for ``rope_and_write_kv``, which writes the cache."""

    name: str  # "reference" or "cpu"

    @property
    def can_keep_stored(self) -> bool:
        """Whether there are products for GGUF's blocks."""
        ...

    def with_attention(self, fused: bool) -> Ops:
        """The same operations and buffers with fused or with plain attention; of a backend that has but one, itself."""
        ...

    def active_paths(self) -> Mapping[str, str]:
        """Operation -> the path its latest call took, for the panel; empty where there is but one."""
        ...

    def activation_dtype(self, scheme: str) -> dtype:
        """The dtype hidden states have when weights are packed with ``scheme``."""
        ...

    def product_dtype(self, scheme: str) -> str:
        """What products with such weights multiply: a key of ``MachineFigures.flops_per_second``."""
        ...

    def kv_dtype(self, scheme: str) -> dtype:
        """The dtype keys and values are kept in beside weights packed with ``scheme``."""
        ...

    def compile_layers(self, spec: ModelSpec, weights: DecoderWeights) -> CompiledLayers | None:
        """All layers of a decoder as one call; None where this backend, or these weights, have but the single operations."""
        ...

    def pack(self, weight: Tensor, bias: Tensor | None, scheme: str, sensitive: bool = False) -> Packed:
        """Quantize and lay out ``weight`` [out, in] (any float dtype).

        sensitive: much hangs on this matrix's products; a backend that rounds activations to 8 bits keeps 16 for it.
        """
        ...

    def for_logits(self, packed: Packed) -> Packed:
        """The same matrix as a head whose activations are rounded to 8 bits: a backend may keep 16 for likely tokens alone."""
        ...

    def pack_stored(
        self, stored: Sequence[StoredRows], bias: Tensor | None, scheme: str, sensitive: bool = False
    ) -> Packed:
        """Lay out a matrix at the bits and values its file stores it with. scheme: "as_stored", or the one that it is exactly.

        Only where ``can_keep_stored``.
        """
        ...

    def unpack(self, packed: Packed) -> Tensor:
        """The weights that ``packed`` stands for, fp32 [out, in]."""
        ...

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
        """x [N, in] -> [N, out] = x @ weight.T + bias (+ residual [N, out])."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [N, hidden] (or [N, heads, D]) -> same shape, normalized over the last dimension (Zhang 2019)."""
        ...

    def rope_and_write_kv(
        self,
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
        """Split qkv [N, (H + 2K) * D], norm q and k per head if asked, rotate them (cos, sin: fp32 [N, rotary_dim / 2];
        None leaves them), write k and v to the cache (keys, values: [num_pages, P, K, D]) at ``slots``; return q [N, H, D]."""
        ...

    def paged_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], params: AttentionParams
    ) -> Tensor:
        """q [N, H, D] against each span's own pages, causal -> [N, H * D]. Query head h reads KV head h // (H // K)."""
        ...

    def gated_mlp_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [N, 2 * intermediate] (gate first) -> activation(gate) * up, [N, intermediate]."""
        ...

    def embed(self, packed: Packed, token_ids: Tensor, scale: float, out_dtype: dtype) -> Tensor:
        """Rows of the embedding (or tied head) for token_ids [N] -> [N, hidden], times ``scale``."""
        ...

    def head(self, x: Tensor, packed: Packed, softcap: float | None) -> Tensor:
        """x [R, hidden] -> fp32 logits [R, vocab], soft-capped if asked."""
        ...


class KvLayer(Protocol):
    """One layer's keys and values, whatever type they are kept in (engine/kv/cache.py says how).

    keys, values: the tensors that hold them, [num_pages, page_size, heads, ...]; one each where they are kept as computed.
    sizes: what channels were divided by before they were coded, fp32 [heads, head_dim] each; None: nothing.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    sizes: ChannelScales | None

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """Least and largest key of each page, fp32 [num_pages, heads, head_dim] each, where rows choose their pages."""
        ...

    def write_target(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values [pages, P, K, D] and slots [N] to write this step's rows to, in the activations' dtype."""
        ...

    def written(self, slots: Tensor) -> None:
        """They were written: keep them at ``slots`` of the cache."""
        ...

    def attend(self, ops: Ops, q: Tensor, spans: Sequence[Span], params: AttentionParams) -> Tensor:
        """q [N, H, D] against each span's own pages, causal -> [N, H * D]."""
        ...


class KvTensors(Protocol):
    """What a model needs of the KV cache: its layers, and how the latest step reached them (for the panel)."""

    page_size: int
    sparse_pages: int | None  # that a decoding row reads per KV head of a layer with bounds, at most
    revision: int  # another number when a layer's tensors or sights have changed

    @property
    def runs_at_once(self) -> bool:
        """Keys and values can be written and read by ``CompiledLayers``: nothing has to be done between the operations."""
        ...

    def begin_step(self) -> None:
        """Another step's layers follow."""
        ...

    def note_choosing(self, spans: Sequence[Span]) -> None:
        """Compiled layers let those of ``spans`` choose their pages that have more than they may read."""
        ...

    def sight(self, window: int | None) -> tuple[int, int]:
        """What a layer with this window of its own (None: all) sees under the user's: tokens (0: all) and first tokens."""
        ...

    def layer(self, index: int) -> KvLayer: ...

    def active_paths(self) -> Mapping[str, str]: ...


class CompiledLayers(Protocol):
    """A decoder's layers and final norm as one call, with the results of the single operations."""

    def run(self, x: Tensor, batch: StepBatch, rotations: Sequence[Tensor], kv: KvTensors) -> Tensor:
        """x: the embeddings, fp32 [N, hidden], overwritten. rotations: per table cosines and sines for positions from 0 on,
        fp32 [2, positions, rotary_dim / 2]. Writes the step's keys and values; returns the normed rows of
        ``batch.logit_rows``, fp32 [R, hidden]."""
        ...

    def active_paths(self) -> Mapping[str, str]: ...


class WeightSizes(NamedTuple):
    """Bytes as packed, for the ledger: all layers (with norms, biases and the final norm), the head,
    and one token's row of the table that embeddings are looked up in. Passes: how often a row is multiplied with them
    (``Packed.num_passes``), for the layers on average."""

    block_bytes: int
    head_bytes: int
    embedding_row_bytes: int
    block_passes: float = 1.0
    head_passes: float = 1.0


class Model(Protocol):
    """A loaded model: the parametric decoder or the transformers fallback.

    ``forward`` runs ``batch`` against ``cache`` and returns fp32 logits [R, vocab] for ``batch.logit_rows``.
    ``kv_dtype`` is what it wants keys and values kept in. ``set_fused`` flips the switches ``fused_ops`` and
    ``attention`` between two steps; without the second, attention goes with the rest.
    """

    weight_bytes: int  # all that is held, a table used twice counted once
    weight_sizes: WeightSizes
    activation_dtype: dtype
    product_dtype: str  # what its products multiply, e.g. "int8": a key of ``MachineFigures.flops_per_second``
    kv_dtype: dtype

    def forward(self, batch: StepBatch, cache: KvTensors) -> Tensor: ...

    def set_fused(self, fused: bool, fused_attention: bool | None = None) -> None: ...

    def kv_scales(self) -> Sequence[ChannelScales] | None:
        """How large each layer's key and value channels are, for caches in few bits; None when that is not known."""
        ...

    def active_paths(self) -> Mapping[str, str]: ...
