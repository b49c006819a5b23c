"""ModelSpec from the metadata of a GGUF file. Imports no torch.

Keys are under the architecture's name ("llama.block_count"). What GGUF leaves to the program is stated here: the
patterns of sliding layers (Gemma 2: every second, Gemma 3: five of six), Gemma 3's local rotation base, SmolLM3's
every fourth layer without rotation, and the query scale of the largest Gemmas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.model.fields import MAX_COUNT, MAX_LAYERS, Fields, UnsupportedArchitecture
from engine.model.spec import LayerSpec, ModelSpec, RopeSpec

ReadVector = Callable[[str], tuple[float, ...]]

FAMILIES = frozenset({"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3"})
# Tokens that end an assistant's turn, by their spelling: many files name only the end of text.
END_OF_TURN = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
)
_QUANTIZATION = re.compile(r"[-._](I?Q\d\w*|TQ\d\w*|MXFP4\w*|B?F16|F32)$", re.IGNORECASE)
_NAMELESS = re.compile(r"(ggml-)?model|sha256-.*|", re.IGNORECASE)
_CONTROL_TYPES = (3, 4)  # control and user-defined tokens, as opposed to plain pieces of text


def permutes_q_and_k(metadata: Mapping[str, Any]) -> bool:
    """Whether q and k rows are interleaved: the converter does so for Llama (Mistral included) and SmolLM3 only."""
    return metadata.get("general.architecture") in ("llama", "smollm3")


def eos_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Every token that ends a text: the ids the file names, and control tokens known to end a turn."""
    fields = Fields(metadata, "the GGUF metadata")
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = {token for key in keys for token in fields.token_ids(f"tokenizer.ggml.{key}")}
    tokens = metadata.get("tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list) and len(kinds) == len(tokens):
        found |= {i for i, kind in enumerate(kinds) if kind in _CONTROL_TYPES and tokens[i] in END_OF_TURN}
    return frozenset(found)


def spec_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], read_vector: ReadVector, file_stem: str
) -> ModelSpec:
    """The spec of a GGUF model.

    tensors: name -> shape, outermost first. read_vector: reads a small tensor (rope_freqs) as numbers.
    ValueError names the key that is missing or wrong; UnsupportedArchitecture a family the decoder lacks.
    """
    family = _family(metadata, file_stem)
    fields = _Keys(metadata, family, file_stem)
    hidden = fields.count("embedding_length")
    heads = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", hidden // heads)
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported("keys and values of different sizes")
    num_layers = fields.count("block_count", at_most=MAX_LAYERS)
    rope = _rope(fields, tensors, read_vector, head_dim)
    ropes: tuple[RopeSpec, ...] = (rope,)
    if family == "gemma3":
        local = Fields(metadata, file_stem).number(f"{family}.rope.freq_base_swa", 10000.0)
        ropes = (rope, RopeSpec(theta=local, rotary_dim=rope.rotary_dim))
    is_gemma = family.startswith("gemma")
    bos = Fields(metadata, file_stem).token_ids("tokenizer.ggml.bos_token_id")
    return ModelSpec(
        family=family,
        name=_name(metadata, file_stem),
        vocab_size=_vocab_size(tensors, file_stem),
        hidden_size=hidden,
        intermediate_size=fields.count("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=fields.divisor_of(heads, "attention.head_count_kv"),
        head_dim=head_dim,
        layers=_layers(family, fields, num_layers),
        ropes=ropes,
        max_position=fields.count("context_length", 2048),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        activation="gelu_tanh" if is_gemma else "silu",
        tied_head="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sandwich_norms=is_gemma,
        embedding_scale=math.sqrt(hidden) if is_gemma else 1.0,
        attention_scale=_attention_scale(family, fields, hidden, heads, num_layers),
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        eos_token_ids=tuple(sorted(eos_token_ids(metadata))),
        bos_token_id=bos[0] if bos else None,
    )


class _Keys(Fields):
    """Metadata under "{architecture}."; a list with one value per layer counts as that value if all agree."""

    def __init__(self, metadata: Mapping[str, Any], family: str, file_stem: str) -> None:
        prefix = f"{family}."
        super().__init__(
            {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)},
            f"{file_stem} (GGUF metadata, {family})",
        )

    def count(self, key: str, default: int | None = None, at_most: int = MAX_COUNT) -> int:
        value = self.values.get(key)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise self.unsupported(f"a different {key} in each layer")
            return Fields({key: value[0]}, self.where).count(key, at_most=at_most)
        return super().count(key, default, at_most)

    def divisor_of(self, heads: int, key: str) -> int:
        value = self.count(key, heads)
        if heads % value:
            raise self.wrong(key, value, f"a divisor of the {heads} query heads")
        return value

    def unsupported(self, what: str) -> ValueError:
        return UnsupportedArchitecture(
            f"{self.where} has {what}, which Ridgeline's decoder cannot run. Choose another."
        )


def _family(metadata: Mapping[str, Any], file_stem: str) -> str:
    family = Fields(metadata, file_stem).text("general.architecture")
    if family not in FAMILIES:
        raise UnsupportedArchitecture(
            f"{file_stem} is a model of the kind {family!r}. From GGUF Ridgeline runs {', '.join(sorted(FAMILIES))}; "
            "for other kinds get the safetensors version, which can run through transformers."
        )
    if metadata.get(f"{family}.expert_count"):
        raise UnsupportedArchitecture(
            f"{file_stem} is a mixture of experts, which Ridgeline cannot run from GGUF. "
            "Get the safetensors version, which can run through transformers."
        )
    return family


def _name(metadata: Mapping[str, Any], file_stem: str) -> str:
    """What people call the model: its file's name without the quantization.

    The file's own general.name is often that of a training run; it serves where the file's name says nothing.
    """
    stem = _QUANTIZATION.sub("", file_stem)
    own = metadata.get("general.name")
    if isinstance(own, str) and own.strip() and _NAMELESS.fullmatch(stem):
        return own.strip()
    return stem or file_stem


def _vocab_size(tensors: Mapping[str, tuple[int, ...]], file_stem: str) -> int:
    shape = tensors.get("token_embd.weight", ())
    if len(shape) != 2:
        raise ValueError(f"{file_stem} has no embedding table (token_embd.weight). The file is incomplete.")
    return shape[0]


def _rope(fields: _Keys, tensors: Mapping[str, tuple[int, ...]], read_vector: ReadVector, head_dim: int) -> RopeSpec:
    """The (global) rotary table. A factor tensor in the file wins over the scaling keys."""
    theta = fields.number("rope.freq_base", 10000.0)
    rotary_dim = fields.count("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise fields.wrong("rope.dimension_count", rotary_dim, f"even and at most the head's {head_dim}")
    original = fields.optional_count("rope.scaling.original_context_length") or fields.count("context_length", 2048)
    attention_factor = fields.number("rope.scaling.attn_factor", 1.0)
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        short, long = read_vector("rope_factors_short.weight"), read_vector("rope_factors_long.weight")
        _check_length(fields, short, rotary_dim, "rope_factors_short.weight")
        _check_length(fields, long, rotary_dim, "rope_factors_long.weight")
        return RopeSpec(
            theta, rotary_dim, "longrope", original_max_position=original, attention_factor=attention_factor,
            short_factors=short, long_factors=long,
        )  # fmt: skip
    if "rope_freqs.weight" in tensors:
        divisors = read_vector("rope_freqs.weight")
        _check_length(fields, divisors, rotary_dim, "rope_freqs.weight")
        return RopeSpec(theta, rotary_dim, "factors", short_factors=divisors)
    kind = fields.text("rope.scaling.type", "none")
    if kind == "linear" or (kind == "none" and fields.has("rope.scale_linear")):
        factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
        return RopeSpec(theta, rotary_dim, "linear", factor=factor)
    if kind == "yarn":
        factor = fields.number("rope.scaling.factor")
        grown = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return RopeSpec(
            theta, rotary_dim, "yarn", factor=factor, original_max_position=original,
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=grown * fields.number("rope.scaling.yarn_attn_factor", attention_factor),
        )  # fmt: skip
    if kind in ("none", "longrope"):
        return RopeSpec(theta, rotary_dim)
    raise fields.unsupported(f"the RoPE scaling {kind!r}")


def _check_length(fields: _Keys, factors: tuple[float, ...], rotary_dim: int, name: str) -> None:
    if len(factors) != rotary_dim // 2 or min(factors) <= 0:
        raise ValueError(
            f"{fields.where}: {name} should hold {rotary_dim // 2} factors greater than 0, but has {len(factors)}. "
            "Get another conversion of the model."
        )


def _layers(family: str, fields: _Keys, num_layers: int) -> tuple[LayerSpec, ...]:
    if family == "smollm3":
        return tuple(LayerSpec(rope=None if (i + 1) % 4 == 0 else 0) for i in range(num_layers))
    window = fields.optional_count("attention.sliding_window")
    if window is None:
        return (LayerSpec(),) * num_layers
    if family == "phi3":
        return (LayerSpec(window=window),) * num_layers
    if family not in ("gemma2", "gemma3"):
        return (LayerSpec(),) * num_layers
    local_rope = 1 if family == "gemma3" else 0
    sliding = _sliding_layers(family, fields, num_layers)
    return tuple(LayerSpec(window, local_rope) if slides else LayerSpec() for slides in sliding)


def _sliding_layers(family: str, fields: _Keys, num_layers: int) -> tuple[bool, ...]:
    pattern = fields.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise fields.wrong("attention.sliding_window_pattern", pattern, f"{num_layers} flags")
        return tuple(bool(flag) for flag in pattern)
    period = fields.count("attention.sliding_window_pattern", 2 if family == "gemma2" else 6)
    return tuple((i + 1) % period != 0 for i in range(num_layers))


def _attention_scale(family: str, fields: _Keys, hidden: int, heads: int, num_layers: int) -> float:
    """0 (meaning head_dim ** -0.5) but for the 27B Gemmas, whose query_pre_attn_scalar GGUF does not store."""
    if (scale := fields.optional_number("attention.scale")) is not None:
        return scale
    if (family, num_layers) in (("gemma2", 46), ("gemma3", 62)):
        return float((hidden / heads) ** -0.5)
    return 0.0
