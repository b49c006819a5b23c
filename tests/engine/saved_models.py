"""Tiny random models of every family, built by transformers, for tests that compare with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.4 * i for i in range(8)],
}
_GEMMA3_LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

# name -> (transformers model class prefix, fields beside COMMON)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 32, "num_attention_heads": 6, "hidden_size": 96}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3-flags": ("SmolLM3", {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3", {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 32}),
    "gemma3-linear": ("Gemma3", {"head_dim": 32, "sliding_window": 8, "rope_parameters": _GEMMA3_LINEAR}),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 8}),
    "phi3-longrope": ("Phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}),
}


def make(variant: str, seed: int = 0, **changes: Any) -> Any:
    """A random fp32 causal language model of transformers, in eval mode. Norms and biases are random too."""
    import transformers

    prefix, fields = VARIANTS[variant]
    config_name = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    config = getattr(transformers, config_name)(**{**COMMON, **fields, **changes})
    config._attn_implementation = "eager"  # sdpa ignores Gemma 2's softcap
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif "embed" not in name:
                weight.mul_(3)  # livelier than transformers' initial 0.02, so that a wrong rotation shows
    return model


def save(variant: str, folder: Path, seed: int = 0, shard_bytes: int | None = None, **changes: Any) -> Any:
    """``make`` and save to ``folder`` as safetensors (in shards of at most ``shard_bytes``)."""
    model = make(variant, seed, **changes)
    model.save_pretrained(folder, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    return model
