"""ModelSpec from GGUF metadata: the keys, and what GGUF leaves to the program."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.fields import UnsupportedArchitecture
from engine.model.spec import LayerSpec, ModelSpec, RopeSpec
from engine.model.spec_from_gguf import eos_token_ids, permutes_q_and_k, spec_from_gguf

VOCAB, HIDDEN = 64, 64
VECTORS = {
    "rope_freqs.weight": tuple(1.0 + i for i in range(8)),
    "rope_factors_short.weight": tuple(1.0 + i / 10 for i in range(8)),
    "rope_factors_long.weight": tuple(2.0 + i for i in range(8)),
}


def _metadata(arch: str, **keys: Any) -> dict[str, Any]:
    """keys: with "__" for ".", under the architecture."""
    base = {
        "block_count": 4,
        "embedding_length": HIDDEN,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 512,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    base |= {key.replace("__", "."): value for key, value in keys.items()}
    return {"general.architecture": arch, "general.name": "Tiny"} | {f"{arch}.{key}": v for key, v in base.items()}


def _spec(metadata: dict[str, Any], *tensors: str, stem: str = "tiny") -> ModelSpec:
    shapes = {"token_embd.weight": (VOCAB, HIDDEN)} | dict.fromkeys(tensors, (8,))
    return spec_from_gguf(metadata, shapes, VECTORS.__getitem__, stem)


def _windows(spec: ModelSpec) -> list[int | None]:
    return [layer.window for layer in spec.layers]


def test_plain_llama() -> None:
    spec = _spec(_metadata("llama", rope__freq_base=5e5, rope__dimension_count=16))
    assert spec == ModelSpec(
        family="llama", name="tiny", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_heads=4,
        num_kv_heads=2, head_dim=16, layers=(LayerSpec(),) * 4, ropes=(RopeSpec(5e5, 16),), max_position=512,
        norm_eps=1e-5, tied_head=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct"),
        ("gemma-3-270m-q4_k_m", "gemma-3-270m"),
        ("Qwen3-0.6B-IQ4_XS", "Qwen3-0.6B"),
        ("tiny_bf16", "tiny"),
        ("model", "Tiny"),
        ("ggml-model-f16", "Tiny"),
        ("sha256-0a1b2c", "Tiny"),
    ],
)
def test_model_is_called_what_its_file_is(stem: str, name: str) -> None:
    assert _spec(_metadata("llama"), stem=stem).name == name


def test_head_and_biases_are_there_when_their_tensors_are() -> None:
    tensors = ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_up.bias")
    spec = _spec(_metadata("llama"), *tensors)
    assert (spec.tied_head, spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (False, True, True, True)


def test_kv_heads_default_to_the_query_heads() -> None:
    metadata = _metadata("llama")
    del metadata["llama.attention.head_count_kv"]
    assert _spec(metadata).num_kv_heads == 4


def test_rope_linear_in_both_spellings() -> None:
    wanted = (RopeSpec(10000.0, 16, "linear", factor=4.0),)
    assert _spec(_metadata("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)).ropes == wanted
    assert _spec(_metadata("llama", rope__scale_linear=4.0)).ropes == wanted
    assert _spec(_metadata("llama", rope__scaling__type="none")).ropes == (RopeSpec(10000.0, 16),)


def test_rope_yarn_with_its_attention_factor() -> None:
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 128}
    (rope,) = _spec(_metadata("qwen2", **keys)).ropes
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 128)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    keys |= {
        "rope__scaling__attn_factor": 0.5,
        "rope__scaling__yarn_beta_fast": 24.0,
        "rope__scaling__yarn_beta_slow": 2.0,
    }
    (rope,) = _spec(_metadata("qwen2", **keys)).ropes
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    assert (rope.beta_fast, rope.beta_slow) == (24.0, 2.0)


def test_rope_factor_tensors_win_over_keys() -> None:
    scaled = _metadata("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
    (rope,) = _spec(scaled, "rope_freqs.weight").ropes
    assert (rope.kind, rope.short_factors) == ("factors", VECTORS["rope_freqs.weight"])
    keys = {"rope__scaling__original_context_length": 128, "rope__scaling__attn_factor": 1.19}
    (rope,) = _spec(_metadata("phi3", **keys), "rope_factors_long.weight", "rope_factors_short.weight").ropes
    assert (rope.kind, rope.original_max_position, rope.attention_factor) == ("longrope", 128, 1.19)
    assert rope.short_factors == VECTORS["rope_factors_short.weight"]
    assert rope.long_factors == VECTORS["rope_factors_long.weight"]


def test_rope_factors_of_the_wrong_length_are_named() -> None:
    with pytest.raises(ValueError, match=r"rope_freqs.weight should hold 4 factors"):
        _spec(_metadata("llama", rope__dimension_count=8), "rope_freqs.weight")


@pytest.mark.parametrize(
    "keys", [{"rope__dimension_count": 15}, {"rope__dimension_count": 18}, {"embedding_length": 60}]
)
def test_rotation_of_half_a_pair_or_beyond_the_head_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'rope.dimension_count' is"):
        _spec(_metadata("llama", **keys))


def test_gemma3_slides_on_five_of_six_layers_with_a_table_of_its_own() -> None:
    keys = {
        "block_count": 13,
        "attention__sliding_window": 8,
        "attention__key_length": 32,
        "attention__value_length": 32,
    }
    keys |= {"rope__freq_base": 1e6, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    spec = _spec(_metadata("gemma3", **keys), "blk.0.attn_q_norm.weight")
    assert _windows(spec) == [8, 8, 8, 8, 8, None] * 2 + [8]
    assert [layer.rope for layer in spec.layers] == [0 if window is None else 1 for window in _windows(spec)]
    assert spec.ropes == (RopeSpec(1e6, 32, "linear", factor=8.0), RopeSpec(1e4, 32))
    assert (spec.qk_norm, spec.sandwich_norms, spec.activation) == (True, True, "gelu_tanh")
    assert spec.embedding_scale == 8.0
    assert _spec(_metadata("gemma3", **keys, rope__freq_base_swa=2e4)).ropes[1].theta == 2e4


def test_gemma_patterns_can_be_a_period_or_a_list() -> None:
    window = {"attention__sliding_window": 8}
    assert _windows(_spec(_metadata("gemma2", **window))) == [8, None, 8, None]
    assert _windows(_spec(_metadata("gemma3", **window, attention__sliding_window_pattern=4))) == [8, 8, 8, None]
    flags = [False, True, True, False]
    assert _windows(_spec(_metadata("gemma3", **window, attention__sliding_window_pattern=flags))) == [None, 8, 8, None]
    with pytest.raises(ValueError, match="should be 4 flags"):
        _spec(_metadata("gemma3", **window, attention__sliding_window_pattern=[True]))
    assert _windows(_spec(_metadata("gemma3", attention__sliding_window=0))) == [None] * 4


def test_softcaps_and_the_query_scale_of_the_largest_gemmas() -> None:
    spec = _spec(_metadata("gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0))
    assert (spec.attention_softcap, spec.logit_softcap, spec.query_scale) == (50.0, 30.0, 0.25)
    # 27B: query_pre_attn_scalar is hidden / heads, not head_dim
    large = {"attention__key_length": 32, "attention__value_length": 32}
    assert _spec(_metadata("gemma2", block_count=46, **large)).query_scale == 0.25
    assert _spec(_metadata("gemma3", block_count=62, **large)).query_scale == 0.25
    assert _spec(_metadata("gemma3", block_count=34, **large)).query_scale == pytest.approx(32**-0.5)
    assert _spec(_metadata("gemma3", attention__scale=0.125)).query_scale == 0.125


def test_smollm3_rotates_three_of_four_layers() -> None:
    spec = _spec(_metadata("smollm3", block_count=9))
    assert [layer.rope for layer in spec.layers] == [0, 0, 0, None, 0, 0, 0, None, 0]


def test_phi3_window_is_everywhere_and_zero_means_none() -> None:
    assert _windows(_spec(_metadata("phi3", attention__sliding_window=2047))) == [2047] * 4
    assert _windows(_spec(_metadata("phi3", attention__sliding_window=0))) == [None] * 4


def test_rows_are_interleaved_for_llama_and_smollm3_only() -> None:
    moved = {"llama", "smollm3"}
    for arch in ("llama", "smollm3", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"):
        assert permutes_q_and_k(_metadata(arch)) == (arch in moved)


def test_end_of_text_is_every_id_named_and_control_tokens_that_end_a_turn() -> None:
    metadata = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "</s>", "b", "<end_of_turn>", "<|im_start|>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1, 1, 3],
    }
    # "<end_of_turn>" as plain text (type 1) is not one; "<|im_start|>" begins a turn
    assert eos_token_ids(metadata) == {1, 2, 3}
    assert eos_token_ids({}) == frozenset()
    assert eos_token_ids({"tokenizer.ggml.tokens": ["<|im_end|>"]}) == frozenset()
    with pytest.raises(ValueError, match=r"tokenizer.ggml.eos_token_id"):
        eos_token_ids({"tokenizer.ggml.eos_token_id": "</s>"})


def test_other_kinds_are_told_apart() -> None:
    for metadata in (_metadata("mamba"), _metadata("llama", expert_count=8)):
        with pytest.raises(UnsupportedArchitecture, match="safetensors"):
            _spec(metadata)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-3, 3) | st.text(max_size=3), max_size=4),
)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_key_missing_or_absurd_gives_a_spec_or_a_clear_error(data: st.DataObject) -> None:
    arch = data.draw(st.sampled_from(["llama", "qwen3", "gemma2", "gemma3", "phi3", "smollm3"]))
    scaling = {
        "rope__scaling__type": data.draw(st.sampled_from(["yarn", "linear", "none"])),
        "rope__scaling__factor": 2.0,
    }
    metadata = _metadata(arch, **scaling, attention__sliding_window=8, rope__freq_base=1e4)
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from(sorted(metadata)))
        metadata[key] = data.draw(JUNK)
        if data.draw(st.booleans()):
            del metadata[key]
    try:
        spec = _spec(metadata)
    except ValueError as error:
        assert "tiny" in str(error)  # noqa: PT017 (a spec is as good)
        return
    assert isinstance(spec, ModelSpec)
    assert all(rope.rotary_dim % 2 == 0 for rope in spec.ropes)
