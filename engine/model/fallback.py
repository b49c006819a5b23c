"""Any other causal model that transformers knows, in the same pages.

transformers lets a program name the attention a model runs (AttentionInterface). Ours writes each layer's keys and
values to the step's pages and attends to them, so scheduling, prefix sharing and the ledger are those of the
parametric decoder; the rest of the model (products, norms, activations) is transformers' own, in fp32, and slower.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.model.spec import LayerSpec, ModelSpec
from engine.ops.interface import AttentionParams, KvTensors, Ops, StepBatch, WeightSizes

ATTENTION_NAME = "ridgeline_paged"


class _Step(threading.local):
    """The step that runs on this thread: transformers calls our attention without a way to hand it along."""

    batch: StepBatch | None = None
    cache: KvTensors | None = None
    ops: Ops | None = None


_step = _Step()


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    batch, cache, ops = _step.batch, _step.cache, _step.ops
    assert batch is not None
    assert cache is not None
    assert ops is not None
    if extra.get("s_aux") is not None:
        raise ValueError("This model's attention has sinks, which Ridgeline does not run yet. Choose another model.")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    kv = cache.layer(int(module.layer_idx))  # type: ignore[arg-type]
    keys, values, slots = kv.write_target(batch.slots)
    keys.view(-1, *keys.shape[2:]).index_copy_(0, slots, k.to(keys.dtype))
    values.view(-1, *values.shape[2:]).index_copy_(0, slots, v.to(values.dtype))
    kv.written(batch.slots)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    attended = kv.attend(ops, q.contiguous(), batch.spans, AttentionParams(scale, sliding_window, softcap))
    return attended.view(1, *q.shape), None


class FallbackModel:
    """The ``Model`` protocol over a transformers model. ``set_fused`` changes the attention only."""

    activation_dtype = torch.float32
    product_dtype = "fp32"
    kv_dtype = torch.float32

    def __init__(self, model: Any, ops: Mapping[bool, Ops], fused: bool) -> None:
        self._model = model
        self._ops_of = ops
        self._ops = ops[fused]
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.weight_bytes = _bytes(model)
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        tables = head.nbytes + (0 if head.data_ptr() == table.data_ptr() else table.nbytes)
        self.weight_sizes = WeightSizes(self.weight_bytes - tables, head.nbytes, table[0].nbytes)

    def set_fused(self, fused: bool, fused_attention: bool | None = None) -> None:
        self._ops = self._ops_of[fused].with_attention(fused if fused_attention is None else fused_attention)

    def kv_scales(self) -> None:
        """Not known: transformers' modules do not say which weights make the keys."""

    def active_paths(self) -> Mapping[str, str]:
        name = type(self._model).__name__
        return {"weights": f"fp32: transformers {name}", "operations": "transformers", **self._ops.active_paths()}

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KvTensors) -> Tensor:
        """Run ``batch`` against ``cache``; fp32 logits [R, vocab] of ``batch.logit_rows``."""
        _step.batch, _step.cache, _step.ops = batch, cache, self._ops
        try:
            rows = batch.logit_rows
            keep = {"logits_to_keep": rows} if self._takes_rows and len(rows) else {}
            out = self._model(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **keep
            )
            return (out.logits[0] if keep else out.logits[0].index_select(0, rows)).float()
        finally:
            _step.batch = _step.cache = _step.ops = None


def load_fallback(
    folder: Path, ops: Mapping[bool, Ops], fused: bool, progress: Callable[[str, float], None]
) -> tuple[ModelSpec, FallbackModel]:
    """Load a safetensors folder through transformers, fp32, without running any code that lies in the folder.

    Raises ValueError for a model that transformers does not know or whose attention cannot be paged.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # progress is ours to show; its bars write to stderr
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    progress("Loading through transformers", 0.0)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        spec = spec_of(config.get_text_config(), folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        raise ValueError(
            f"transformers cannot load {folder.name}: {_first_line(error)} Choose another model."
        ) from error
    model.eval()
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{folder.name} is a {type(model).__name__}, whose attention transformers does not let us page. Choose another model."
        )
    progress("Loading through transformers", 1.0)
    return spec, FallbackModel(model, ops, fused)


def spec_of(config: Any, folder: Path) -> ModelSpec:
    """The shape that pages and ledger need, from any transformers text config. ValueError when it has no such shape."""
    if getattr(config, "attention_chunk_size", None) or getattr(config, "kv_lora_rank", None):
        raise ValueError("its attention (chunked or latent) does not fit into pages of keys and values.")
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    kv_heads = int(
        getattr(config, "num_key_value_heads", None) or (1 if getattr(config, "multi_query", False) else heads)
    )
    return ModelSpec(
        family=str(config.model_type),
        name=folder.name,
        vocab_size=int(config.vocab_size),
        hidden_size=hidden,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        layers=(LayerSpec(rope=None),) * int(config.num_hidden_layers),
        ropes=(),
        max_position=int(getattr(config, "max_position_embeddings", None) or 2048),
        norm_eps=float(getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_eps", None) or 1e-5),
        tied_head=bool(getattr(config, "tie_word_embeddings", False)),
        eos_token_ids=eos_of(config, folder),
    )


def eos_of(config: Any, folder: Path) -> tuple[int, ...]:
    """End-of-text tokens of config and generation config together."""
    found: set[int] = set()
    generation = folder / "generation_config.json"
    extra = json.loads(generation.read_text("utf-8")).get("eos_token_id") if generation.is_file() else None
    for value in (getattr(config, "eos_token_id", None), extra):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))


def _bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())  # parameters() names a tied table once


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
