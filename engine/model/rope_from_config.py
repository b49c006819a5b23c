"""RopeSpec from the two shapes a Hugging Face configuration can have. Imports no torch.

transformers 5 writes ``rope_parameters`` (theta and scaling together, flat or one object per layer type); older
files have ``rope_theta`` beside ``rope_scaling``. The defaults of missing scaling fields follow transformers.
"""

from __future__ import annotations

import math

from engine.model.fields import Fields, UnsupportedArchitecture
from engine.model.spec import RopeSpec

_PLAIN = frozenset({"default", "none", "plain"})
_LONGROPE = frozenset({"longrope", "su"})


def rope_for(config: Fields, head_dim: int, theta: float, layer_type: str = "full_attention") -> RopeSpec:
    """The rotary table of the layers of ``layer_type`` ("full_attention" or "sliding_attention").

    theta: the base if the rope's own object names none.
    ValueError names a field that is missing or wrong; UnsupportedArchitecture a scaling the decoder lacks.
    """
    rope = config.mapping("rope_parameters")
    if rope.has(layer_type):
        rope = rope.mapping(layer_type)
    elif not rope.values or rope.has("full_attention") or rope.has("sliding_attention"):
        rope = config.mapping("rope_scaling")
    theta = rope.number("rope_theta", theta)
    is_phi = config.text("model_type", "") == "phi3"
    # Of the families here only Phi-3 rotates a part of each head; transformers ignores the field for the others.
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) if is_phi else 1.0
    rotary_dim = int(head_dim * share)
    if head_dim % 2:
        raise config.wrong("head_dim", head_dim, "even (hidden_size / num_attention_heads when left out)")
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise config.wrong("partial_rotary_factor", share, f"a share of {head_dim} that is even and not more than 1")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind in _PLAIN:
        return RopeSpec(theta, rotary_dim)
    if kind in _LONGROPE or (is_phi and kind == "yarn"):
        return _longrope(config, rope, theta, rotary_dim)
    if kind == "linear":
        return RopeSpec(theta, rotary_dim, "linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta, rotary_dim, "llama3", factor=rope.number("factor"), low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"), original_max_position=_original(config, rope),
        )  # fmt: skip
    if kind == "yarn":
        return _yarn(config, rope, theta, rotary_dim)
    raise UnsupportedArchitecture(
        f"{config.where} asks for the RoPE scaling {kind!r}, which the decoder does not have."
    )


def _original(config: Fields, rope: Fields) -> int:
    """The window the model was first trained with; the configuration's own field wins, as in transformers."""
    return (
        config.optional_count("original_max_position_embeddings")
        or rope.optional_count("original_max_position_embeddings")
        or config.count("max_position_embeddings")
    )


def _yarn(config: Fields, rope: Fields, theta: float, rotary_dim: int) -> RopeSpec:
    original = _original(config, rope)
    factor = rope.optional_number("factor") or config.count("max_position_embeddings") / original
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
        attention_factor = _mscale(factor, 1.0)
        if mscale and mscale_all:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return RopeSpec(
        theta, rotary_dim, "yarn", factor=factor, original_max_position=original, attention_factor=attention_factor,
        beta_fast=rope.optional_number("beta_fast") or 32.0, beta_slow=rope.optional_number("beta_slow") or 1.0,
        truncate=rope.flag("truncate", True),
    )  # fmt: skip


def _mscale(factor: float, weight: float) -> float:
    """YaRN's correction of attention's temperature (Peng 2023, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(config: Fields, rope: Fields, theta: float, rotary_dim: int) -> RopeSpec:
    original = _original(config, rope)
    factor = rope.optional_number("factor") or config.count("max_position_embeddings", original) / original
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    short, long = rope.numbers("short_factor"), rope.numbers("long_factor")
    for key, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != rotary_dim // 2:
            raise rope.wrong(key, list(factors), f"a list of {rotary_dim // 2} numbers")
    return RopeSpec(
        theta, rotary_dim, "longrope", original_max_position=original,
        attention_factor=attention_factor, short_factors=short, long_factors=long,
    )  # fmt: skip
