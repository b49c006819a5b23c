"""Every family, saved by transformers and as GGUF: same spec, same canonical tensors as the model they came from."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.weights.source import open_source
from tests.engine import gguf_files, tiny_models

IN_GGUF = [name for name in tiny_models.FAMILIES if name not in ("mistral", "smollm3", "llama3", "phi3")]


def _without_name(spec: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(spec)
    del fields["name"]
    return fields


def _assert_same_tensors(source: Any, model: Any, spec: Any, tolerance: float = 0.0) -> None:
    truth = tiny_models.StateDictSource(spec, model.state_dict())
    assert source.names() == truth.names()
    for name in sorted(truth.names()):
        read, wanted = source.read(name), truth.read(name)
        assert read.shape == wanted.shape, name
        assert (read - wanted).abs().max() <= tolerance, name


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_safetensors_folder_gives_the_spec_and_tensors_of_its_model(family: str, tmp_path: Path) -> None:
    model = tiny_models.make_model(family)
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    spec = tiny_models.FAMILIES[family].spec
    assert _without_name(source.spec) == _without_name(spec)
    assert source.stored_format == "safetensors float32"
    assert source.eos_token_ids == {2}
    assert source.tokenizer_files.folder == tmp_path
    _assert_same_tensors(source, model, spec)


@pytest.mark.parametrize("family", IN_GGUF)
def test_gguf_file_gives_the_spec_and_tensors_of_its_model(family: str, tmp_path: Path) -> None:
    model = tiny_models.make_model(family)
    source = open_source(gguf_files.write_gguf(tmp_path / "model.gguf", model))
    spec = tiny_models.FAMILIES[family].spec
    wanted = _without_name(spec) | {"attention_scale": pytest.approx(spec.attention_scale, rel=1e-6)}
    assert _without_name(source.spec) == wanted
    assert source.stored_format == "GGUF F32"
    assert source.eos_token_ids == {2}
    _assert_same_tensors(source, model, spec, tolerance=1e-6)  # Gemma's norms: (w + 1) rounded once


def test_gguf_llama3_rope_is_read_from_the_rope_freqs_tensor(tmp_path: Path) -> None:
    model = tiny_models.make_model("llama3")
    source = open_source(gguf_files.write_gguf(tmp_path / "model.gguf", model))
    (rope,) = source.spec.ropes
    assert (rope.kind, rope.theta, rope.rotary_dim) == ("factors", 500.0, 24)
    truth = model.model.rotary_emb.inv_freq
    plain = 500.0 ** -(torch.arange(0, 24, 2) / 24)
    torch.testing.assert_close(plain / torch.tensor(rope.short_factors), truth)
    assert rope.short_factors[-1] == pytest.approx(8.0)  # the slowest frequency is stretched in full
    _assert_same_tensors(source, model, tiny_models.FAMILIES["llama3"].spec)


def test_gguf_phi3_has_both_factor_lists_its_attention_factor_and_fused_tensors(tmp_path: Path) -> None:
    model = tiny_models.make_model("phi3")
    source = open_source(gguf_files.write_gguf(tmp_path / "model.gguf", model))
    spec = tiny_models.FAMILIES["phi3"].spec
    rope, wanted = source.spec.ropes[0], spec.ropes[0]
    assert (rope.kind, rope.rotary_dim, rope.original_max_position) == ("longrope", 18, 256)
    assert rope.short_factors == pytest.approx(wanted.short_factors)
    assert rope.long_factors == pytest.approx(wanted.long_factors)
    assert rope.attention_factor == pytest.approx(wanted.attention_factor)
    assert source.spec.layers == spec.layers  # a sliding window of 0 means none
    _assert_same_tensors(source, model, spec)


def test_gguf_smollm3_rows_are_put_back_and_every_fourth_layer_has_no_rope(tmp_path: Path) -> None:
    family = tiny_models.FAMILIES["smollm3"]
    config = family.make_config()
    config.no_rope_layers = [1, 1, 1, 0]
    model = tiny_models.transformers.AutoModelForCausalLM.from_config(config).float()
    source = open_source(gguf_files.write_gguf(tmp_path / "model.gguf", model))
    assert [layer.rope for layer in source.spec.layers] == [0, 0, 0, None]
    assert source.spec.ropes == family.spec.ropes
    _assert_same_tensors(source, model, family.spec)


def test_gguf_mistral_is_llama_there_and_gets_its_rows_put_back(tmp_path: Path) -> None:
    config = tiny_models.FAMILIES["mistral"].make_config()
    config.sliding_window = None
    model = tiny_models.transformers.AutoModelForCausalLM.from_config(config).float()
    source = open_source(gguf_files.write_gguf(tmp_path / "model.gguf", model))
    assert source.spec.family == "llama"
    _assert_same_tensors(source, model, dataclasses.replace(source.spec, family="mistral"))


def test_only_llama_kind_files_have_rows_put_back(tmp_path: Path) -> None:
    """The bytes of q in the file and what is read differ for llama, and are the same for qwen2."""
    for family, is_moved in (("llama", True), ("qwen2", False)):
        path = gguf_files.write_gguf(tmp_path / f"{family}.gguf", tiny_models.make_model(family))
        stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_q.weight").data
        source = open_source(path)
        read = source.read("layers.0.qkv")[: source.spec.q_size].numpy()
        assert np.array_equal(stored, read) != is_moved


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_gguf_reads_as_its_dequantized_weights(type_name: str, tmp_path: Path) -> None:
    model = tiny_models.make_model("llama")  # rows of 96 and 160: blocks of 32 fit
    source = open_source(gguf_files.write_gguf(tmp_path / "model.gguf", model, type_name))
    truth = tiny_models.StateDictSource(tiny_models.FAMILIES["llama"].spec, model.state_dict())
    assert source.stored_format == f"GGUF {type_name}"
    for name in sorted(truth.names()):
        wanted = truth.read(name).numpy()
        if wanted.ndim == 2:
            wanted = gguf_files.quantize_and_back(wanted, type_name)
        assert np.array_equal(source.read(name).numpy(), wanted), name
        assert source.read(name).dtype == torch.float32


def test_shards_read_the_same_as_one_file(tmp_path: Path) -> None:
    model = tiny_models.make_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    _assert_same_tensors(open_source(tmp_path), model, tiny_models.FAMILIES["qwen3"].spec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_norms_are_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_models.make_model("gemma3")).to(dtype)
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert source.stored_format == f"safetensors {str(dtype).removeprefix('torch.')}"
    read = source.read("layers.1.gate_up")
    assert read.dtype == dtype
    assert torch.equal(read[:160], model.model.layers[1].mlp.gate_proj.weight)
    norm = source.read("layers.1.attn_norm")
    assert norm.dtype == torch.float32
    assert torch.equal(norm, model.model.layers[1].input_layernorm.weight.float() + 1)


def test_mixed_and_double_precision_become_fp32(tmp_path: Path) -> None:
    model = tiny_models.make_model("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"].half()
    tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].double()
    save_file(tensors, file, metadata={"format": "pt"})
    source = open_source(tmp_path)
    assert source.read("layers.0.qkv").dtype == torch.float32
    assert source.read("layers.0.mlp_out").dtype == torch.float32
    _assert_same_tensors(source, model, tiny_models.FAMILIES["llama"].spec, tolerance=2e-3)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_gemma3_inside_a_model_with_a_vision_tower(prefix: str, tmp_path: Path) -> None:
    model = tiny_models.make_model("gemma3")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": config,
        "vision_config": {"hidden_size": 7},
        "eos_token_id": [2, 5],
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {name.replace("model.", prefix, 1): tensor.clone() for name, tensor in tensors.items()}
    moved["vision_tower.patch.weight"] = torch.zeros(3, 3)
    save_file(moved, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert source.eos_token_ids == {2, 5, 9}
    spec = dataclasses.replace(tiny_models.FAMILIES["gemma3"].spec, eos_token_ids=(2, 5, 9))
    assert _without_name(source.spec) == _without_name(spec)
    _assert_same_tensors(source, model, spec)


def test_tied_model_with_a_stored_head_uses_the_embedding(tmp_path: Path) -> None:
    """transformers ties on load whatever the file holds; so do we."""
    model = tiny_models.make_model("llama_tied_biased")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    assert "head" not in open_source(tmp_path).names()


def test_starter_opens_quickly_as_what_it_is(starter_path: Path) -> None:
    source = open_source(starter_path)
    spec = source.spec
    assert (spec.family, spec.num_layers, spec.num_heads, spec.num_kv_heads) == ("llama", 30, 9, 3)
    assert (spec.hidden_size, spec.intermediate_size, spec.head_dim, spec.vocab_size) == (576, 1536, 64, 49152)
    assert spec.tied_head
    assert (spec.ropes[0].theta, spec.norm_eps, spec.max_position) == (100000.0, 1e-5, 8192)
    assert source.stored_format == "GGUF Q4_1"
    assert 2 in source.eos_token_ids
    metadata = source.tokenizer_files.metadata
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert "<|im_start|>" in metadata["tokenizer.chat_template"]


def test_gemma_file_has_two_rotary_tables_and_ends_at_the_end_of_a_turn(gemma_path: Path) -> None:
    source = open_source(gemma_path)
    spec = source.spec
    assert (spec.family, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == ("gemma3", 18, 4, 1, 256)
    assert [rope.theta for rope in spec.ropes] == [1e6, 1e4]
    assert [index for index, layer in enumerate(spec.layers) if layer.window is None] == [5, 11, 17]
    assert {(layer.window, layer.rope) for layer in spec.layers} == {(512, 1), (None, 0)}
    assert spec.qk_norm
    assert spec.sandwich_norms
    assert spec.embedding_scale == pytest.approx(640**0.5)
    assert source.eos_token_ids == {1, 106}  # <eos> and <end_of_turn>; the file names the first alone
    assert source.stored_format == "GGUF Q4_K_M"


@pytest.mark.parametrize("which", ["starter_path", "gemma_path"])
def test_real_files_read_as_the_ggml_package_reads_them(which: str, request: pytest.FixtureRequest) -> None:
    """Bit for bit, for one tensor of each storage type in the file (Q4_1, Q8_0; Q4_K, Q5_0, Q6_K and so on)."""
    source = open_source(request.getfixturevalue(which))
    tensors = source._tensors  # type: ignore[attr-defined]
    names = {"embed": "token_embd.weight"} | {
        f"layers.{i}.{ours}": f"blk.{i}.{theirs}.weight"
        for i in (0, 5)
        for ours, theirs in (("attn_out", "attn_output"), ("mlp_out", "ffn_down"), ("attn_norm", "attn_norm"))
    }
    kinds = set()
    for ours, theirs in names.items():
        info = tensors[theirs]
        data = np.fromfile(request.getfixturevalue(which), np.uint8, info.num_bytes, offset=info.offset)
        kind = gguf.GGMLQuantizationType(info.ggml_type)
        last = data.reshape(info.shape[0], -1)[-999:]  # gguf takes long for a whole embedding
        read = source.read(ours).numpy()[-999:]
        assert np.array_equal(read, gguf.quants.dequantize(last, kind).reshape(read.shape)), ours
        kinds.add(kind)
    assert len(kinds) >= 3
