"""ModelSpec from a Hugging Face config.json. Imports no torch and no transformers.

Families share almost everything; what differs stands in ``FAMILIES``. Defaults of missing fields are transformers',
because older files (Gemma 3's above all) leave out what equals them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.model.fields import MAX_LAYERS, Fields, UnsupportedArchitecture
from engine.model.rope_from_config import rope_for
from engine.model.spec import LayerSpec, ModelSpec, RopeSpec

Activation = Literal["silu", "gelu_tanh", "gelu"]
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_tanh": "gelu_tanh",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """How one family differs. qkv_bias, out_bias: None means "as attention_bias says".

    defaults: transformers' values for fields a file may leave out.
    """

    name: str
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    has_mlp_bias: bool = False  # the file may ask for one
    qk_norm: bool = False
    is_gemma: bool = False
    theta: float = 10000.0
    windows: Literal["none", "all", "upper", "pattern"] = "none"
    window_period: int = 0
    tied: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


# For these, null switches the thing off; it is not the same as left out.
_NULL_MEANS_NONE = (
    "attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "head_dim", "bos_token_id", "eos_token_id",
)  # fmt: skip
_TWO_AFTER_ONE = {"bos_token_id": 1, "eos_token_id": 2}
_GEMMA = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_GEMMA2 = Family(
    "gemma2", is_gemma=True, windows="pattern", window_period=2, tied=True,
    defaults=_GEMMA
    | {"vocab_size": 256000, "max_position_embeddings": 8192}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)  # fmt: skip
_GEMMA3 = Family(
    "gemma3", qk_norm=True, is_gemma=True, theta=1e6, windows="pattern", window_period=6, tied=True,
    defaults=_GEMMA | {"vocab_size": 262208, "max_position_embeddings": 131072},
)  # fmt: skip
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", has_mlp_bias=True, defaults=_TWO_AFTER_ONE),
    "mistral": Family(
        "mistral", qkv_bias=False, out_bias=False, windows="all",
        defaults=_TWO_AFTER_ONE
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family("qwen2", qkv_bias=True, out_bias=False, windows="upper", defaults=_QWEN),
    "qwen3": Family("qwen3", qk_norm=True, windows="upper", defaults=_QWEN | {"head_dim": 128}),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Family(
        "phi3", qkv_bias=False, out_bias=False, windows="all",
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000},
    ),
    "smollm3": Family(
        "smollm3", has_mlp_bias=True, theta=2e6, windows="pattern", tied=True,
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768,
            "bos_token_id": 128000, "eos_token_id": 128001,
        },
    ),
}  # fmt: skip

READABLE_QUANTIZATIONS = ("gptq", "awq", "bitsandbytes")  # engine/weights/prequantized.py


def spec_from_config(
    config: Mapping[str, Any], name: str, generation_config: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelSpec:
    """The spec of a model by its config.json (and generation_config.json, for end-of-text tokens).

    ValueError names the field that is missing or wrong; UnsupportedArchitecture a model the decoder lacks.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} holds no object. Download it again.")
    outer = Fields(config, where)
    family = _family(outer)
    fields = _text_fields(outer, family, where)
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedArchitecture(f"{where} describes an encoder (use_bidirectional_attention).")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", kv_heads, f"a divisor of the {heads} query heads")
    hidden = fields.count("hidden_size")
    head_dim = fields.count("head_dim", max(1, hidden // heads))
    ropes = _ropes(fields, family, head_dim)
    attention_bias = fields.flag("attention_bias", False)
    bos = fields.token_ids("bos_token_id") or outer.token_ids("bos_token_id")
    return ModelSpec(
        family=family.name,
        name=name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=_layers(fields, family),
        ropes=ropes,
        max_position=_max_position(fields, ropes[0]),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, family),
        tied_head=outer.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", family.tied)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=family.has_mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        sandwich_norms=family.is_gemma,
        embedding_scale=math.sqrt(hidden) if family.is_gemma else 1.0,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5 if family.is_gemma else 0.0,
        attention_softcap=fields.optional_number("attn_logit_softcapping") if family.is_gemma else None,
        logit_softcap=fields.optional_number("final_logit_softcapping") if family.is_gemma else None,
        eos_token_ids=_eos(outer, fields, generation_config or {}),
        bos_token_id=bos[0] if bos else None,
    )


def _family(outer: Fields) -> Family:
    kind = outer.text("model_type")
    architectures = outer.raw("architectures")
    is_writer = not isinstance(architectures, list) or any(
        isinstance(a, str) and a.endswith(("ForCausalLM", "ForConditionalGeneration")) for a in architectures
    )
    if not is_writer:
        raise ValueError(
            f"{outer.where} describes a {architectures[0] if architectures else 'model'}, which does not write text. "
            "Choose a model made for chat or text generation."
        )
    if kind not in FAMILIES:
        raise UnsupportedArchitecture(
            f"{outer.where} describes a model of the kind {kind!r}, which Ridgeline's decoder does not have."
        )
    method = outer.mapping("quantization_config").values.get("quant_method")
    if outer.has("quantization_config") and method not in READABLE_QUANTIZATIONS:
        raise UnsupportedArchitecture(
            f"{outer.where} describes weights quantized with {method or 'an unnamed method'}, which the decoder cannot read from "
            f"safetensors; it reads {', '.join(READABLE_QUANTIZATIONS)}. Get the original weights, or a GGUF file."
        )
    return FAMILIES[kind]


def _text_fields(outer: Fields, family: Family, where: str) -> Fields:
    """The fields of the language model (nested for Gemma 3 with a vision tower), over the family's defaults."""
    nested = outer.mapping("text_config")
    values = nested.values if nested.values else outer.values
    given = {key: value for key, value in values.items() if value is not None}
    merged = {**family.defaults, **given}
    for key in _NULL_MEANS_NONE:
        if key in values and values[key] is None:
            merged.pop(key, None)
    return Fields(merged, nested.where if nested.values else where)


def _ropes(fields: Fields, family: Family, head_dim: int) -> tuple[RopeSpec, ...]:
    """One table, or Gemma 3's two: global layers first, then the sliding ones."""
    main = rope_for(fields, head_dim, fields.number("rope_theta", family.theta))
    if family is not _GEMMA3:
        return (main,)
    local_theta = fields.number("rope_local_base_freq", 10000.0)
    if fields.mapping("rope_parameters").has("sliding_attention"):
        return (main, rope_for(fields, head_dim, local_theta, "sliding_attention"))
    return (main, RopeSpec(local_theta, head_dim))  # the old shape's scaling speaks of the global layers only


def _layers(fields: Fields, family: Family) -> tuple[LayerSpec, ...]:
    num_layers = fields.count("num_hidden_layers", at_most=MAX_LAYERS)
    window = fields.optional_count("sliding_window")
    if family.windows == "upper" or family.name == "smollm3":
        window = window if fields.flag("use_sliding_window", False) else None
    has_rope = _rope_flags(fields, num_layers) if family.name == "smollm3" else (True,) * num_layers
    sliding = _sliding(fields, family, num_layers, has_rope) if window else (False,) * num_layers
    local_rope = 1 if family is _GEMMA3 else 0
    return tuple(
        LayerSpec(window if slides else None, None if not rotates else local_rope if slides else 0)
        for slides, rotates in zip(sliding, has_rope, strict=True)
    )


def _sliding(fields: Fields, family: Family, num_layers: int, has_rope: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers see only the window. ``layer_types`` says so in newer files; the family's rule in older ones."""
    types = fields.raw("layer_types")
    if types is not None and family.windows != "all":
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) < num_layers or any(t not in known for t in types):
            raise fields.wrong("layer_types", types, f"{num_layers} times one of {', '.join(known)}")
        return tuple(kind == "sliding_attention" for kind in types[:num_layers])
    if family.windows == "all":
        return (True,) * num_layers
    if family.windows == "upper":
        first = fields.raw("max_window_layers")
        first = 28 if first is None else first if first == 0 else fields.count("max_window_layers")
        return tuple(i >= first for i in range(num_layers))
    if family.name == "smollm3":
        return tuple(not rotates for rotates in has_rope)
    period = fields.count("sliding_window_pattern", family.window_period)
    return tuple((i + 1) % period != 0 for i in range(num_layers))


def _rope_flags(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """SmolLM3: 1 in ``no_rope_layers`` means that the layer does rotate, despite the name."""
    flags = fields.raw("no_rope_layers")
    if flags is None:
        interval = fields.count("no_rope_layer_interval", 4)
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.wrong("no_rope_layers", flags, f"a list of {num_layers} zeros and ones")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _max_position(fields: Fields, rope: RopeSpec) -> int:
    """The model's window. With YaRN the field often still names the window before it was extended."""
    stated = fields.count("max_position_embeddings", rope.original_max_position or 2048)
    return max(stated, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else stated


def _activation(fields: Fields, family: Family) -> Activation:
    key = "hidden_activation" if family.is_gemma else "hidden_act"
    name = fields.text(key, "gelu_pytorch_tanh" if family.is_gemma else "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedArchitecture(f"{fields.where} asks for the activation {name!r}, which the decoder lacks.")
    return _ACTIVATIONS[name]


def _eos(outer: Fields, fields: Fields, generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a text, by the configuration and the generation configuration."""
    generation = Fields(generation_config, "generation_config.json")
    places = (outer.token_ids("eos_token_id"), fields.token_ids("eos_token_id"), generation.token_ids("eos_token_id"))
    return tuple(sorted({token for place in places for token in place}))
