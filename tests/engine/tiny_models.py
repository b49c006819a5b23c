"""Tiny random transformers models of every family, their ModelSpec written by hand, and their weights under canonical names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from engine.model.spec import LayerSpec, ModelSpec, RopeSpec

VOCAB = 300
HIDDEN = 96
INTERMEDIATE = 160
LAYERS = 4
MAX_POSITION = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Family:
    """make_config gives a transformers config; spec is what we must understand it to be."""

    make_config: Callable[[], Any]
    spec: ModelSpec


def _spec(family: str, heads: int, kv_heads: int, head_dim: int, **changes: Any) -> ModelSpec:
    plain = RopeSpec(theta=10000.0, rotary_dim=head_dim)
    base: dict[str, Any] = {
        "name": "",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "layers": (LayerSpec(),) * LAYERS,
        "ropes": (plain,),
        "max_position": MAX_POSITION,
        "norm_eps": 1e-6,
        "eos_token_ids": (2,),
        "bos_token_id": 1,
    }
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    return ModelSpec(family=family, **{**base, **sizes, **changes})


def _config(name: str, heads: int, kv_heads: int, **changes: Any) -> Callable[[], Any]:
    settings = {**_SIZES, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **changes}
    return lambda: getattr(transformers, f"{name}Config")(**settings)


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_THETA = {"rope_type": "default", "rope_theta": 50000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_SHORT = tuple(1.0 + 0.1 * i for i in range(9))
_LONG = tuple(1.5 + 0.7 * i for i in range(9))
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": list(_SHORT),
    "long_factor": list(_LONG),
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 256,
}
_SLIDING_3_OF_4 = ["sliding_attention"] * 3 + ["full_attention"]


def _windows(*windows: int | None) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(window=window) for window in windows)


_GEMMA = {
    "activation": "gelu_tanh",
    "tied_head": True,
    "sandwich_norms": True,
    "embedding_scale": HIDDEN**0.5,
    "attention_scale": 24**-0.5,
}

FAMILIES: dict[str, Family] = {
    # six query heads over two KV heads: a group of three, not a power of two
    "llama": Family(_config("Llama", 6, 2, head_dim=16, rms_norm_eps=1e-6), _spec("llama", 6, 2, 16)),
    "llama_tied_biased": Family(
        _config("Llama", 4, 4, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-5),
        _spec("llama", 4, 4, 24, tied_head=True, qkv_bias=True, output_bias=True, mlp_bias=True, norm_eps=1e-5),
    ),
    "llama3": Family(
        _config("Llama", 4, 2, rms_norm_eps=1e-6, rope_parameters=_LLAMA3),
        _spec(
            "llama",
            4,
            2,
            24,
            ropes=(
                RopeSpec(500.0, 24, "llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64),
            ),
        ),
    ),
    "llama_linear": Family(
        _config(
            "Llama",
            4,
            2,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        ),
        _spec("llama", 4, 2, 24, ropes=(RopeSpec(10000.0, 24, "linear", 2.5),)),
    ),
    "mistral": Family(
        _config("Mistral", 4, 1, head_dim=24, sliding_window=20, rms_norm_eps=1e-6),
        _spec("mistral", 4, 1, 24, layers=_windows(20, 20, 20, 20)),
    ),
    "qwen2": Family(
        _config("Qwen2", 4, 2, rms_norm_eps=1e-6, rope_parameters=_YARN),
        _spec(
            "qwen2",
            4,
            2,
            24,
            qkv_bias=True,
            ropes=(RopeSpec(10000.0, 24, "yarn", 8.0, original_max_position=64, attention_factor=1.2079441541679836),),
        ),
    ),
    "qwen3": Family(
        _config("Qwen3", 4, 2, head_dim=32, rms_norm_eps=1e-6),
        _spec("qwen3", 4, 2, 32, qk_norm=True),
    ),
    "gemma2": Family(
        _config(
            "Gemma2",
            4,
            2,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=20,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=8.0,
            rms_norm_eps=1e-6,
        ),
        _spec(
            "gemma2",
            4,
            2,
            16,
            layers=_windows(20, None, 20, None),
            attention_softcap=5.0,
            logit_softcap=8.0,
            **_GEMMA,
        ),
    ),
    "gemma3": Family(
        _config(
            "Gemma3Text",
            4,
            1,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=20,
            layer_types=_SLIDING_3_OF_4,
            rms_norm_eps=1e-6,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        _spec(
            "gemma3",
            4,
            1,
            16,
            qk_norm=True,
            layers=(LayerSpec(20, 1), LayerSpec(20, 1), LayerSpec(20, 1), LayerSpec(None, 0)),
            ropes=(RopeSpec(100000.0, 16, "linear", 8.0), RopeSpec(10000.0, 16)),
            **_GEMMA,
        ),
    ),
    "phi3": Family(
        _config(
            "Phi3",
            4,
            2,
            rms_norm_eps=1e-6,
            original_max_position_embeddings=256,
            rope_parameters=_LONGROPE,
        ),
        _spec(
            "phi3",
            4,
            2,
            24,
            ropes=(
                RopeSpec(
                    10000.0,
                    18,
                    "longrope",
                    original_max_position=256,
                    attention_factor=1.0606601717798212,
                    short_factors=_SHORT,
                    long_factors=_LONG,
                ),
            ),
        ),
    ),
    "smollm3": Family(
        _config("SmolLM3", 4, 2, rms_norm_eps=1e-6, no_rope_layers=[1, 0, 1, 0], rope_parameters=_THETA),
        _spec(
            "smollm3",
            4,
            2,
            24,
            tied_head=True,
            ropes=(RopeSpec(50000.0, 24),),
            layers=(LayerSpec(), LayerSpec(rope=None), LayerSpec(), LayerSpec(rope=None)),
        ),
    ),
    "smollm3_every_fourth": Family(
        _config("SmolLM3", 4, 2, rms_norm_eps=1e-6, no_rope_layers=[1, 1, 1, 0], rope_parameters=_THETA),
        _spec(
            "smollm3",
            4,
            2,
            24,
            tied_head=True,
            ropes=(RopeSpec(50000.0, 24),),
            layers=(LayerSpec(), LayerSpec(), LayerSpec(), LayerSpec(rope=None)),
        ),
    ),
}


@functools.cache
def make_model(family: str, seed: int = 0) -> Any:
    """A (shared) transformers model in fp32 whose every weight, norm and bias is random and matters to the logits."""
    config = FAMILIES[family].make_config()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        for name, parameter in model.named_parameters():
            _randomize(name, parameter.data, is_gemma=family.startswith("gemma"))
    return model


def _randomize(name: str, data: Tensor, is_gemma: bool) -> None:
    if "norm" in name:
        data.normal_(0.0 if is_gemma else 1.0, 0.3)
    elif name.endswith("bias"):
        data.normal_(0.0, 0.3)
    elif "embed_tokens" in name:
        data.normal_(0.0, 0.5)
    else:
        data.normal_(0.0, data.shape[1] ** -0.5)


class StateDictSource:
    """The WeightSource interface over a transformers model's own tensors."""

    stored_format = "in memory"
    not_stored_packed = "They are plain numbers."

    def __init__(self, spec: ModelSpec, state: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self._tensors = dict(_canonical(spec, state))

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def read(self, name: str) -> Tensor:
        return self._tensors[name].clone()

    def read_stored(self, name: str, types: frozenset[int]) -> None:
        """They are plain numbers."""

    def stores_numbers(self, name: str) -> bool:
        return True


_PLAIN = {"attn_norm": "input_layernorm", "attn_out": "self_attn.o_proj", "mlp_out": "mlp.down_proj"}
_LLAMA_NORMS = {"mlp_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


def _canonical(spec: ModelSpec, state: Mapping[str, Tensor]) -> Any:
    norm_offset = 1.0 if spec.family.startswith("gemma") else 0.0
    yield "embed", state["model.embed_tokens.weight"]
    yield "final_norm", state["model.norm.weight"] + norm_offset
    if not spec.tied_head:
        yield "head", state["lm_head.weight"]
    names = {
        **_PLAIN,
        **(_SANDWICH_NORMS if spec.sandwich_norms else _LLAMA_NORMS),
        **(_QK_NORMS if spec.qk_norm else {}),
    }
    for index in range(spec.num_layers):
        theirs = f"model.layers.{index}"
        for ours, name in names.items():
            offset = norm_offset if "norm" in ours else 0.0
            yield f"layers.{index}.{ours}", state[f"{theirs}.{name}.weight"] + offset
            if f"{theirs}.{name}.bias" in state:
                yield f"layers.{index}.{ours}_bias", state[f"{theirs}.{name}.bias"]
        for ours, parts in (
            ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            yield from _fused(f"layers.{index}.{ours}", theirs, parts, state)


def _fused(ours: str, theirs: str, parts: tuple[str, ...], state: Mapping[str, Tensor]) -> Any:
    already = {"qkv": f"{theirs}.self_attn.qkv_proj.weight", "gate_up": f"{theirs}.mlp.gate_up_proj.weight"}
    name = already[ours.rpartition(".")[2]]
    if name in state:  # Phi-3 stores them fused
        yield ours, state[name]
        return
    yield ours, torch.cat([state[f"{theirs}.{part}.weight"] for part in parts])
    biases = [f"{theirs}.{part}.bias" for part in parts]
    if biases[0] in state:
        yield f"{ours}_bias", torch.cat([state[name] for name in biases])
