"""ModelSpec from config.json: what transformers makes of the same file is the truth, for old and new shapes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.fields import UnsupportedArchitecture
from engine.model.rope import inverse_frequencies
from engine.model.spec import ModelSpec
from engine.model.spec_from_config import spec_from_config

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 128,
    "rope_type": "llama3",
}
SHORT, LONG = [1.0 + i / 10 for i in range(8)], [2.0 + i for i in range(8)]
PHI_LONG = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
SLIDING = ["sliding_attention", "full_attention"] * 3

# name -> config.json as published files have it, cut down in size
CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_scaling": None},
    "llama3.1, old shape": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama3.1, new shape": {"model_type": "llama", "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    "llama, linear, old key": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama, partial": {"model_type": "llama", "partial_rotary_factor": 0.5, "head_dim": 32},
    "llama, partial, new shape": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 100000, "rope_interleaved": False},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0, 1, 1], "rope_theta": 5000000.0},
    "smollm3, interval": {"model_type": "smollm3", "no_rope_layer_interval": 3},
    "smollm3, window": {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 16},
    "mistral 0.1": {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0},
    "mistral 0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0, "head_dim": None},
    "mistral, all left out": {"model_type": "mistral"},
    "qwen2.5": {
        "model_type": "qwen2",
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 2,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen2, window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen2, window on all": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 0,
    },
    "qwen2, layer types": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": SLIDING,
    },
    "qwen2.5, yarn": {
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn, all fields": {
        "model_type": "qwen3",
        "head_dim": 128,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.3,
            "beta_fast": 24,
            "beta_slow": 2,
            "truncate": False,
        },
    },
    "yarn, mscale": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 512,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1000000, "attention_bias": False},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 32,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 144,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma2, all left out": {"model_type": "gemma2"},
    "gemma2, no softcaps": {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3 1b": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "rope_theta": 1000000,
        "rope_local_base_freq": 20000,
        "rope_scaling": None,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "num_hidden_layers": 13,
    },
    "gemma3, pattern of 3": {"model_type": "gemma3_text", "sliding_window_pattern": 3},
    "gemma3 4b's text": {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "gemma3, new shape": {
        "model_type": "gemma3_text",
        "layer_types": SLIDING,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        },
    },
    "phi3 4k": {"model_type": "phi3", "sliding_window": 2047, "original_max_position_embeddings": 4096},
    "phi3 128k": {
        "model_type": "phi3",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": PHI_LONG,
    },
    "phi4 mini": {
        "model_type": "phi3",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6]},
        "tie_word_embeddings": True,
    },
}


def _theirs(config: dict[str, Any]) -> Any:
    """transformers' reading of ``config``."""
    fields = dict(config) | {"pad_token_id": 0}  # theirs must lie within the small vocabulary
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **json.loads(json.dumps(fields)))


def _rotary(config: Any) -> Any:
    """transformers' rotary module of the model ``config`` describes."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return type(model.model.rotary_emb)(config)


@pytest.fixture(params=CONFIGS, ids=lambda name: name.replace(" ", "_"))
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SIZES | CONFIGS[request.param]


def test_sizes_and_switches_are_transformers_own(config: dict[str, Any]) -> None:
    spec, theirs = spec_from_config(config, "tiny"), _theirs(config)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert spec.head_dim == head_dim
    assert (spec.num_heads, spec.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.tied_head == theirs.tie_word_embeddings
    assert spec.bos_token_id == theirs.bos_token_id
    assert spec.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert spec.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert spec.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert spec.query_scale == pytest.approx((getattr(theirs, "query_pre_attn_scalar", None) or head_dim) ** -0.5)


def test_windows_are_transformers_own(config: dict[str, Any]) -> None:
    spec, theirs = spec_from_config(config, "tiny"), _theirs(config)
    if theirs.model_type in ("mistral", "phi3"):  # these read no layer types: the window is everywhere
        wanted = [theirs.sliding_window] * spec.num_layers
    else:
        types = getattr(theirs, "layer_types", None) or ["full_attention"] * spec.num_layers
        wanted = [theirs.sliding_window if kind == "sliding_attention" else None for kind in types]
    assert [layer.window for layer in spec.layers] == wanted
    if theirs.model_type == "smollm3":
        assert [layer.rope is not None for layer in spec.layers] == [bool(flag) for flag in theirs.no_rope_layers]


def test_rotations_are_transformers_own(config: dict[str, Any]) -> None:
    spec, theirs = spec_from_config(config, "tiny"), _theirs(config)
    rotary = _rotary(theirs)
    if theirs.model_type == "gemma3_text":
        pairs = [(rotary.full_attention_inv_freq, 1.0), (rotary.sliding_attention_inv_freq, 1.0)]
        assert [layer.rope for layer in spec.layers] == [0 if layer.window is None else 1 for layer in spec.layers]
    else:
        pairs = [(rotary.inv_freq, rotary.attention_scaling)]
    assert len(spec.ropes) == len(pairs)
    for rope, (frequencies, attention_factor) in zip(spec.ropes, pairs, strict=True):
        torch.testing.assert_close(inverse_frequencies(rope, 1), frequencies, rtol=1e-6, atol=0)
        assert rope.attention_factor == pytest.approx(attention_factor)


def test_longrope_keeps_both_lists_and_the_first_window() -> None:
    (rope,) = spec_from_config(SIZES | CONFIGS["phi3 128k"], "tiny").ropes
    assert (rope.kind, rope.original_max_position) == ("longrope", 4096)
    assert (list(rope.short_factors), list(rope.long_factors)) == (SHORT, LONG)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_window_of_a_yarn_model_is_the_extended_one() -> None:
    assert spec_from_config(SIZES | CONFIGS["qwen2.5, yarn"], "tiny").max_position == 131072
    assert spec_from_config(SIZES | CONFIGS["llama2"], "tiny").max_position == 4096


def test_biases_follow_the_family() -> None:
    def biases(**config: Any) -> tuple[bool, bool, bool]:
        spec = spec_from_config(SIZES | config, "tiny")
        return spec.qkv_bias, spec.output_bias, spec.mlp_bias

    assert biases(model_type="llama") == (False, False, False)
    assert biases(model_type="llama", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases(model_type="smollm3", mlp_bias=True) == (False, False, True)
    assert biases(model_type="qwen2") == (True, False, False)
    assert biases(model_type="qwen3", attention_bias=True, head_dim=16) == (True, True, False)
    assert biases(model_type="mistral", attention_bias=True) == (False, False, False)
    assert biases(model_type="phi3", attention_bias=True) == (False, False, False)


def test_gemma3_4b_as_published_is_read_through_its_text_config() -> None:
    """The published file leaves out everything that equals transformers' defaults."""
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    }
    spec = spec_from_config(published, "gemma-3-4b-it")
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert [index for index, layer in enumerate(spec.layers) if layer.window is None] == [5, 11, 17, 23, 29]
    assert (spec.ropes[0].kind, spec.ropes[0].factor, spec.ropes[0].theta) == ("linear", 8.0, 1e6)
    assert (spec.ropes[1].kind, spec.ropes[1].theta) == ("plain", 1e4)
    assert spec.tied_head
    assert spec.eos_token_ids == (1, 106)
    assert spec.max_position == 131072


def test_end_of_text_is_the_union_of_both_files() -> None:
    config = SIZES | {"model_type": "llama", "eos_token_id": 5}
    assert spec_from_config(config, "tiny", {"eos_token_id": [7, 5, 9]}).eos_token_ids == (5, 7, 9)
    assert spec_from_config(config, "tiny", {"eos_token_id": None}).eos_token_ids == (5,)
    assert spec_from_config(config | {"eos_token_id": None}, "tiny").eos_token_ids == ()
    with pytest.raises(ValueError, match=r"generation_config.json: 'eos_token_id' is 'stop'"):
        spec_from_config(config, "tiny", {"eos_token_id": "stop"})


def test_encoder_made_of_gemma_is_left_to_others() -> None:
    with pytest.raises(UnsupportedArchitecture, match="encoder"):
        spec_from_config(SIZES | {"model_type": "gemma3_text", "use_bidirectional_attention": True}, "tiny")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"no_rope_layers": [1, 1]}, "'no_rope_layers' is [1, 1], but should be a list of 6 zeros and ones"),
        ({"no_rope_layers": "all"}, "'no_rope_layers' is 'all'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling does not say 'low_freq_factor'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": -1}},
            "'factor' is -1, but should be a number greater than 0",
        ),
        ({"rope_scaling": "yarn"}, "'rope_scaling' is 'yarn', but should be an object"),
        ({"hidden_size": 60}, "'head_dim' is 15, but should be even"),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps' is '1e-5'"),
        (
            {"num_hidden_layers": 10**9},
            "'num_hidden_layers' is 1000000000, but should be a positive whole number up to",
        ),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes', but should be true or false"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full"]}, "'layer_types' is ['full']"),
    ],
)
def test_wrong_field_is_named_with_what_it_should_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"config.json") as caught:
        spec_from_config(SIZES | {"model_type": "smollm3"} | change, "tiny")
    assert words in str(caught.value)


def test_first_phi3_files_call_their_scaling_su_or_yarn() -> None:
    config = SIZES | CONFIGS["phi3 128k"]
    wanted = spec_from_config(config, "tiny")
    for kind in ("su", "yarn"):
        assert spec_from_config(config | {"rope_scaling": PHI_LONG | {"type": kind}}, "tiny") == wanted


def test_share_of_a_head_that_cannot_rotate_is_refused() -> None:
    for share in (3.0, 0.05, 0.58):
        with pytest.raises(ValueError, match="'partial_rotary_factor' is"):
            spec_from_config(SIZES | CONFIGS["phi3 4k"] | {"partial_rotary_factor": share}, "tiny")


def test_longrope_list_of_wrong_length_is_named() -> None:
    broken = SIZES | CONFIGS["phi3 128k"] | {"rope_scaling": PHI_LONG | {"long_factor": LONG[:3]}}
    with pytest.raises(ValueError, match=r"'long_factor' is .* should be a list of 8 numbers"):
        spec_from_config(broken, "tiny")


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.none(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention"]), st.integers() | st.text(max_size=6)),
)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_field_missing_null_or_absurd_gives_a_spec_or_a_clear_error(data: st.DataObject) -> None:
    config = SIZES | CONFIGS[data.draw(st.sampled_from(list(CONFIGS)))]
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from(sorted(config)))
        if data.draw(st.booleans()):
            config[key] = data.draw(JUNK)
        elif isinstance(config[key], dict) and config[key]:
            config[key] = config[key] | {data.draw(st.sampled_from(sorted(config[key]))): data.draw(JUNK)}
        else:
            config.pop(key)
    config["future_field"] = data.draw(JUNK)
    try:
        spec = spec_from_config(config, "tiny")
    except ValueError as error:
        assert "config.json" in str(error)  # noqa: PT017 (a spec is as good)
        return
    assert isinstance(spec, ModelSpec)
    assert all(math.isfinite(rope.theta) and rope.rotary_dim % 2 == 0 for rope in spec.ropes)


def test_builders_import_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, engine.model.spec_from_config, engine.model.spec_from_gguf, engine.weights.gguf_header, "
        "engine.weights.safetensors_header, engine.weights.canonical, engine.weights.source; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
