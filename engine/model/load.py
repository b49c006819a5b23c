"""From a file to a running model: stream the weights tensor by tensor, pack each, keep nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from engine.model.decoder import Decoder, DecoderWeights, LayerWeights
from engine.model.spec import ModelSpec
from engine.ops.cpu import CpuOps, native
from engine.ops.interface import Model, Ops, Packed
from engine.weights.balance import Half, balance_attention, balance_mlp
from engine.weights.quantize import INT4_GROUPS
from engine.weights.source import TokenizerFiles, UnsupportedArchitecture, WeightSource, open_source
from engine.weights.stored import TYPES_OF_SCHEME, StoredRows

if TYPE_CHECKING:
    from engine.text import TextCodec

Progress = Callable[[str, float], None]  # what is being done, and the share done, 0 to 1
Cancelled = Callable[[], bool]
Balance = Callable[[ModelSpec, str, Half], Half]
Stored = tuple[StoredRows, ...]  # one matrix, one stretch of rows below the other


class LoadCancelled(Exception):  # noqa: N818  (not an error: what the user asked for)
    """The user cancelled while the model was loading; everything read so far is dropped."""


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run and the codec of its texts. load_seconds: from opening the file to the last tensor packed."""

    spec: ModelSpec
    model: Model
    text: TextCodec
    name: str
    stored_format: str
    is_fallback: bool
    load_seconds: float
    not_stored_packed: str = ""  # why ``weights=as_stored`` cannot hold this file; empty when it can


def never_cancelled() -> bool:
    return False


class _Reader:
    """Reads canonical tensors one by one, counting what is done; raises LoadCancelled between two tensors."""

    def __init__(
        self, source: WeightSource, ops: Ops, progress: Progress, cancelled: Cancelled, keeps_activations: bool
    ) -> None:
        self._source = source
        self._names = source.names()
        self._ops = ops
        self._progress = progress
        self._cancelled = cancelled
        self._keeps_activations = keeps_activations
        self._num_read = 0

    def tensor(self, name: str) -> Tensor:
        if self._cancelled():
            raise LoadCancelled(name)
        tensor = self._source.read(name)
        self._count()
        return tensor

    def _count(self) -> None:
        self._num_read += 1
        self._progress("Reading weights", min(1.0, self._num_read / len(self._names)))

    def vector(self, name: str) -> Tensor:
        """A norm's multipliers or a bias, fp32; a copy, since a view would keep its whole file mapped."""
        return self.tensor(name).float().clone()

    def vector_if(self, wanted: bool, name: str) -> Tensor | None:
        return self.vector(name) if wanted else None

    def stored(self, scheme: str, *names: str) -> list[Stored] | None:
        """The blocks of matrices as the file has them; None unless all are of types that ``scheme`` takes as they are."""
        types = TYPES_OF_SCHEME.get(scheme)
        if types is None or not self._ops.can_keep_stored:
            return None
        found = []
        for name in names:
            if self._cancelled():
                raise LoadCancelled(name)
            stored = self._source.read_stored(name, types)
            if stored is None:
                return None
            found.append(stored)
        for _ in names:
            self._count()
        return found

    def matrix(self, name: str, scheme: str, bias: Tensor | None = None, sensitive: bool = False) -> Packed:
        """Packed with ``scheme``: from the file's own blocks where these need no rounding for it, else from numbers."""
        stored = self.stored(scheme, name)
        if stored is not None:
            return self.keep(stored[0], bias, scheme, sensitive)
        if scheme == "as_stored":  # beside matrices that are kept there may be some of other forms
            scheme = "none" if self._source.stores_numbers(name) else "int8"
        return self.pack(self.tensor(name), bias, scheme, sensitive)

    def keep(self, stored: Stored, bias: Tensor | None, scheme: str, sensitive: bool = False) -> Packed:
        return self._ops.pack_stored(stored, bias, scheme, sensitive or self._keeps_activations)

    def pack(self, weight: Tensor, bias: Tensor | None, scheme: str, sensitive: bool = False) -> Packed:
        return self._ops.pack(weight, bias, scheme, sensitive or self._keeps_activations)


def read_weights(
    source: WeightSource,
    ops: Ops,
    scheme: str,
    progress: Progress,
    cancelled: Cancelled = never_cancelled,
    sensitive: str = "on",
    activations: str = "none",
) -> DecoderWeights:
    """All weights of ``source``, packed by ``ops`` with ``scheme``; ``sensitive`` as in ``sensitive_scheme``,
    ``activations`` the option.

    At most the two matrices of half a layer are unpacked at a time, or the largest, the head, while nothing else is held yet.
    Raises LoadCancelled between two tensors.
    """
    spec = source.spec
    reader = _Reader(source, ops, progress, cancelled, activations == "none")
    of_tables = sensitive_scheme(scheme, sensitive)
    head = reader.matrix("embed" if spec.tied_head else "head", of_tables)
    if activations == "int8":
        head = ops.for_logits(head)
    embed = head if spec.tied_head else reader.matrix("embed", of_tables)
    layers = tuple(
        _read_layer(
            reader,
            spec,
            f"layers.{index}",
            sensitive_scheme(scheme, sensitive, index, spec.num_layers),
            # Measured on the starter: with their activations in 16 bits the divergence from full precision is half of what it
            # is without, for a fifteenth more of the products.
            sensitive != "off" and index in (0, spec.num_layers - 1),
        )
        for index in range(spec.num_layers)
    )
    return DecoderWeights(embed, layers, reader.vector("final_norm"), head)


def sensitive_scheme(scheme: str, sensitive: str, layer: int | None = None, num_layers: int = 0) -> str:
    """What a matrix is packed with where the model is packed with ``scheme``: 4 bits become 8 where rounding hurts most.

    layer: of ``num_layers``; None for head and embedding. sensitive: the ``sensitive_layers`` option. "on": head and
    embedding are kept, since every token's choice hangs on the head's rounding (files quantized to 4 bits keep it at 8 bits too) and a
    step reads few rows of an embedding; "more": the first and the last layer too; "off": nothing is.
    """
    keepers = ("on", "more") if layer is None else ("more",)
    is_kept = sensitive in keepers and (layer is None or layer in (0, num_layers - 1))
    if scheme == "llm_int8" and layer is None:  # the same bits, but read as they are instead of unpacked at each call
        return "int8"
    return "int8" if is_kept and (scheme in INT4_GROUPS or scheme == "nf4") else scheme


def _read_layer(reader: _Reader, spec: ModelSpec, prefix: str, scheme: str, is_sensitive: bool) -> LayerWeights:
    """is_sensitive: activations keep 16 bits in all of its products."""

    def vector_if(wanted: bool, name: str) -> Tensor | None:
        return reader.vector_if(wanted, f"{prefix}.{name}")

    # Measured on the starter: of all activations rounded to 8 bits, QKV's and the head's cost the most accuracy;
    # QKV is a sixth of the products.
    names = _HalfNames(f"{prefix}.attn_norm", f"{prefix}.qkv", f"{prefix}.attn_out")
    biases = vector_if(spec.qkv_bias, "qkv_bias"), vector_if(spec.output_bias, "attn_out_bias")
    attn_norm, qkv, attn_out = _read_half(reader, spec, scheme, names, biases, balance_attention, (True, is_sensitive))
    names = _HalfNames(f"{prefix}.mlp_norm", f"{prefix}.gate_up", f"{prefix}.mlp_out")
    biases = vector_if(spec.mlp_bias, "gate_up_bias"), vector_if(spec.mlp_bias, "mlp_out_bias")
    sensitive = is_sensitive, is_sensitive
    mlp_norm, gate_up, mlp_out = _read_half(reader, spec, scheme, names, biases, balance_mlp, sensitive)
    return LayerWeights(
        attn_norm=attn_norm,
        qkv=qkv,
        q_norm=vector_if(spec.qk_norm, "q_norm"),
        k_norm=vector_if(spec.qk_norm, "k_norm"),
        attn_out=attn_out,
        post_attn_norm=vector_if(spec.sandwich_norms, "post_attn_norm"),
        mlp_norm=mlp_norm,
        gate_up=gate_up,
        mlp_out=mlp_out,
        post_mlp_norm=vector_if(spec.sandwich_norms, "post_mlp_norm"),
    )


class _HalfNames(NamedTuple):
    norm: str
    first: str
    second: str


def _read_half(
    reader: _Reader,
    spec: ModelSpec,
    scheme: str,
    names: _HalfNames,
    biases: tuple[Tensor | None, Tensor | None],
    balance: Balance,
    sensitive: tuple[bool, bool],
) -> tuple[Tensor, Packed, Packed]:
    """A norm and the two matrices behind it, packed; balanced where packing rounds them. sensitive: which of the two are."""
    norm = reader.vector(names.norm)
    if scheme in ("none", "as_stored"):
        first = reader.matrix(names.first, scheme, biases[0], sensitive[0])
        return norm, first, reader.matrix(names.second, scheme, biases[1], sensitive[1])
    stored = reader.stored(scheme, names.first, names.second)
    if stored is not None:
        first = reader.keep(stored[0], biases[0], scheme, sensitive[0])
        return norm, first, reader.keep(stored[1], biases[1], scheme, sensitive[1])
    half = Half(norm, reader.tensor(names.first).float(), biases[0], reader.tensor(names.second).float())
    half = balance(spec, scheme, half)
    first = reader.pack(half.first, half.bias, scheme, sensitive[0])
    return half.norm, first, reader.pack(half.second, biases[1], scheme, sensitive[1])


def build_decoder(
    source: WeightSource,
    ops: Mapping[bool, Ops],
    scheme: str,
    fused: bool = True,
    progress: Progress = lambda text, share: None,
    cancelled: Cancelled = never_cancelled,
    max_context: int | None = None,
    sensitive: str = "on",
    activations: str = "none",
) -> Decoder:
    """A Decoder over ``source``; ``max_context`` as for Decoder, the last two as for ``read_weights``. Raises LoadCancelled."""
    weights = read_weights(source, ops[fused], scheme, progress, cancelled, sensitive, activations)
    return Decoder(source.spec, weights, ops, scheme, fused, max_context)


def backends(weights: str | None) -> dict[bool, Ops]:
    """The fused and the plain backend of this machine; both read the same packed weights. weights: None where torch has them.

    Products of NF4 and LLM.int8 are bitsandbytes' on torch, those of a fallback torch's own. Its threads and those of the C
    kernels, each waiting a moment for more work, would take the cores from each other at every call, so beside such products
    everything runs on torch.
    """
    use_native = False if weights in (None, "nf4", "llm_int8") else None
    return {fused: CpuOps(fused, use_native) for fused in (True, False)}


def load_model(
    path: Path,
    weights: str,
    fused: bool,
    progress: Progress,
    cancelled: Cancelled = never_cancelled,
    max_context: int | None = None,
    sensitive: str = "on",
    activations: str = "none",
) -> LoadedModel:
    """Load a GGUF file or a safetensors folder.

    weights: the ``weights`` option. max_context: see Decoder.
    sensitive, activations: the options ``sensitive_layers`` and ``activations``.
    Raises ValueError in plain words for a file that cannot be used, LoadCancelled when ``cancelled()`` became true.
    """
    from engine.text import TextCodec

    started = time.perf_counter()
    progress("Opening", 0.0)
    try:
        source = open_source(path)
    except UnsupportedArchitecture:
        folder = _fallback_folder(path)
        if folder is None:
            raise
        return _load_fallback(folder, fused, progress, started)
    if weights == "as_stored":
        _require_stored(path.name, source, native.reason_unavailable())
    text = TextCodec.open(source.tokenizer_files, source.eos_token_ids, source.spec.vocab_size)
    model = build_decoder(
        source, backends(weights), weights, fused, progress, cancelled, max_context, sensitive, activations
    )
    seconds = time.perf_counter() - started
    # The window the loaded rotary tables serve, so that nobody above asks for more.
    spec = replace(model.spec, max_position=model.max_context)
    name, kept = spec.name or path.stem, source.not_stored_packed
    return LoadedModel(spec, model, text, name, source.stored_format, False, seconds, kept)


def name_of(path: Path) -> str:
    """What the model at ``path`` is called once it is loaded, read without loading it. ValueError as ``load_model``."""
    try:
        return open_source(path).spec.name or path.stem
    except UnsupportedArchitecture:
        folder = _fallback_folder(path)
        if folder is None:
            raise
        return folder.name


def _fallback_folder(path: Path) -> Path | None:
    """The folder that transformers may load what the decoder lacks from. None for a GGUF file: there is no way out."""
    is_gguf = path.is_file() and ".safetensors" not in path.name
    if is_gguf:  # transformers' own GGUF reader loses rotary settings and score caps
        return None
    return path if path.is_dir() else path.parent


def _require_stored(name: str, source: WeightSource, no_kernels: str | None) -> None:
    """ValueError when the weights cannot be kept as they are stored."""
    if source.not_stored_packed:
        raise ValueError(
            f"{name} cannot be kept as it is stored. {source.not_stored_packed} Choose another form of weights, such as weights=int4."
        )
    if no_kernels is not None:
        raise ValueError(
            f"Stored blocks need the C kernels to be multiplied as they are ({no_kernels}). Choose weights=int4 instead."
        )


def _load_fallback(folder: Path, fused: bool, progress: Progress, started: float) -> LoadedModel:
    """A folder of an architecture that the decoder lacks, through transformers. ValueError when that is no way either."""
    from engine.model.fallback import load_fallback
    from engine.text import TextCodec

    spec, model = load_fallback(folder, backends(None), fused, progress)
    text = TextCodec.open(TokenizerFiles("hf", folder), spec.eos_token_ids, spec.vocab_size)
    seconds = time.perf_counter() - started
    return LoadedModel(spec, model, text, spec.name or folder.name, "safetensors", True, seconds)
