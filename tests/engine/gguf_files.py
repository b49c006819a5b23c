"""Writing GGUF files from tiny transformers models, as the ggml project's converter would; for tests only.

Independent of engine/: it states once more, from the writing side, what the reading side must undo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "smollm3": "smollm3",
}
_INTERLEAVED = ("llama", "smollm3")  # the converter's LlamaModel and its heir
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    model: Any,
    type_name: str = "F32",
    fill_metadata: Callable[[gguf.GGUFWriter], None] | None = None,
    replace: Mapping[str, tuple[NDArray[np.uint8], GgmlType]] | None = None,
    extra: Mapping[str, tuple[NDArray[np.uint8], GgmlType]] | None = None,
) -> Path:
    """Write ``model`` (a causal LM of transformers) to ``path`` with its matrices as ``type_name``.

    type_name: a type that gguf.quants can quantize: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Rows must divide
    by its block. fill_metadata: adds or overwrites keys (a tokenizer, say) before the file is written.
    replace: GGUF tensor name -> blocks [rows, row_bytes] and their type, written in place of the model's tensor.
    extra: the same, beside the model's tensors.
    Models that GGUF cannot express (windows of Mistral or Qwen2, other SmolLM3 layers) are an AssertionError.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    _add_sizes(writer, config)
    _add_attention(writer, config, arch)
    rope_tensors = _add_rope(writer, config, arch)
    writer.add_file_type(_file_type(type_name))
    if fill_metadata is not None:
        fill_metadata(writer)
    for name, values in rope_tensors.items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    for name, (blocks, kind) in (extra or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    state = model.state_dict()
    for name, weight in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored_name = _gguf_name(name, arch)
        if replace is not None and stored_name in replace:
            blocks, kind = replace[stored_name]
            writer.add_tensor(stored_name, blocks, raw_dtype=kind)
            continue
        values = _converted(name, weight.detach().float().numpy(), config, arch)
        _add_tensor(writer, stored_name, values, type_name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantize_and_back(values: NDArray[np.float32], type_name: str) -> NDArray[np.float32]:
    """What is left of ``values`` [rows, columns] after ``type_name``."""
    kind = GgmlType[type_name]
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)


def _file_type(type_name: str) -> int:
    name = "ALL_F32" if type_name == "F32" else f"MOSTLY_{type_name}"
    return int(gguf.LlamaFileType[name])


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    writer.add_eos_token_id(eos[0])
    writer.add_bos_token_id(config.bos_token_id)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_attention(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if _head_dim(config) != config.hidden_size // config.num_attention_heads or arch.startswith("gemma"):
        writer.add_key_length(_head_dim(config))
        writer.add_value_length(_head_dim(config))
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or []
    if arch == "phi3":
        writer.add_sliding_window(window or 0)
    elif arch.startswith("gemma"):
        writer.add_sliding_window(window)
        slides = [kind == "sliding_attention" for kind in types]
        period = 2 if arch == "gemma2" else 6
        if slides != [(i + 1) % period != 0 for i in range(len(slides))]:
            writer.add_sliding_window_pattern(slides)
        if config.query_pre_attn_scalar != _head_dim(config):
            writer.add_float32(f"{arch}.attention.scale", config.query_pre_attn_scalar**-0.5)
    else:
        assert "sliding_attention" not in types, "GGUF has no windows for this family"
        assert config.model_type != "mistral" or window is None, "GGUF has no windows for this family"
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_rope(writer: gguf.GGUFWriter, config: Any, arch: str) -> dict[str, list[float]]:
    """Write the rotation's keys; return the tensors that go with it."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    rotary_dim = int(_head_dim(config) * (rope.get("partial_rotary_factor") or 1.0))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotary_dim)
    if arch == "smollm3":
        flags = [int((i + 1) % 4 != 0) for i in range(config.num_hidden_layers)]
        assert config.no_rope_layers[: len(flags)] == flags, "GGUF fixes which SmolLM3 layers rotate"
    kind = rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "llama3":
        return {"rope_freqs.weight": _llama3_divisors(rope, rotary_dim)}
    elif kind == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
        return {"rope_factors_long.weight": rope["long_factor"], "rope_factors_short.weight": rope["short_factor"]}
    else:
        assert kind == "default", kind
    return {}


def _llama3_divisors(rope: Mapping[str, Any], rotary_dim: int) -> list[float]:
    """Llama 3's smoothing as one divisor per frequency, which is how GGUF stores it."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    divisors = []
    for dimension in range(0, rotary_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (dimension / rotary_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _gguf_name(name: str, arch: str) -> str:
    tops = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, suffix = name.rpartition(".")
    if stem in tops:
        return f"{tops[stem]}.{suffix}"
    index, _, inner = stem.removeprefix("model.layers.").partition(".")
    names = {**_LAYER_NAMES, **(_GEMMA_NAMES if arch.startswith("gemma") else {})}
    return f"blk.{index}.{names[inner]}.{suffix}"


def _converted(name: str, values: NDArray[np.float32], config: Any, arch: str) -> NDArray[np.float32]:
    """Interleave q and k, add Gemma's 1 to its norms."""
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    is_q, is_k = ".q_proj." in name, ".k_proj." in name
    if arch in _INTERLEAVED and (is_q or is_k):
        heads = config.num_attention_heads if is_q else config.num_key_value_heads
        split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return split.swapaxes(1, 2).reshape(values.shape)
    return values


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], type_name: str) -> None:
    values = np.ascontiguousarray(values, dtype=np.float32)
    if values.ndim == 1 or type_name == "F32":
        writer.add_tensor(name, values)
    elif type_name == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        kind = GgmlType[type_name]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
