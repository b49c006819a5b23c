"""Greedy fp32 text of two real models equals transformers' on the same dequantized weights (acceptance point 3).

The transformers side is built by hand: its configuration is written here, its weights are our canonical tensors put back
under transformers' names, so that a wrong reading of the file's metadata cannot hide on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_batches import Text, make_batch, make_cache, scattered_pages
from torch import Tensor

from engine.model.decoder import Decoder
from engine.model.load import build_decoder
from engine.ops.reference import ReferenceOps
from engine.weights.source import WeightSource, open_source

NEW_TOKENS = 64
PAGE_SIZE = 16


def smollm2_config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        attn_implementation="eager",
    )


def gemma3_config() -> Any:
    return transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        sliding_window=512,
        layer_types=["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(18)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        attn_implementation="eager",
    )


_NORMS = {"attn_norm": "input_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_LLAMA_NORMS = {**_NORMS, "mlp_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    **_NORMS,
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def reference_model(source: WeightSource, config: Any) -> Any:
    """transformers' model of ``config`` holding the tensors of ``source``."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to_empty(device="cpu").float().eval()
    for module in model.modules():  # tables that are no weights were lost on the meta device
        if type(module).__name__.endswith(("RotaryEmbedding", "ScaledWordEmbedding")):
            _restore_tables(module, config)
    state = model.state_dict()
    filled = set()
    for name, tensor in _theirs(source, config):
        state[name].copy_(tensor)
        filled.add(name)
    assert set(state) - filled <= {"lm_head.weight"}, "a weight of transformers' model was left without a value"
    model.tie_weights()
    return model


def _restore_tables(module: Any, config: Any) -> None:
    if hasattr(module, "scalar_embed_scale"):
        module.embed_scale.fill_(module.scalar_embed_scale)
        return
    fresh = type(module)(config)
    for name, buffer in fresh.named_buffers():
        setattr(module, name, torch.nn.Buffer(buffer, persistent=False))


def _theirs(source: WeightSource, config: Any) -> Iterator[tuple[str, Tensor]]:
    is_gemma = config.model_type.startswith("gemma")
    offset = 1.0 if is_gemma else 0.0
    yield "model.embed_tokens.weight", source.read("embed")
    yield "model.norm.weight", source.read("final_norm") - offset
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    for index in range(config.num_hidden_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        for name, their_name in (_GEMMA_NORMS if is_gemma else _LLAMA_NORMS).items():
            if f"{ours}.{name}" in source.names():
                yield f"{theirs}.{their_name}.weight", source.read(f"{ours}.{name}") - offset
        for part, rows in zip("qkv", source.read(f"{ours}.qkv").split((q_size, kv_size, kv_size)), strict=True):
            yield f"{theirs}.self_attn.{part}_proj.weight", rows
        gate, up = source.read(f"{ours}.gate_up").chunk(2)
        yield f"{theirs}.mlp.gate_proj.weight", gate
        yield f"{theirs}.mlp.up_proj.weight", up
        yield f"{theirs}.self_attn.o_proj.weight", source.read(f"{ours}.attn_out")
        yield f"{theirs}.mlp.down_proj.weight", source.read(f"{ours}.mlp_out")


def greedy(decoder: Decoder, prompt: list[int]) -> list[int]:
    """NEW_TOKENS tokens of the largest logit each, on scattered pages."""
    (pages,) = scattered_pages(1, len(prompt) + NEW_TOKENS, PAGE_SIZE)
    cache = make_cache(decoder, len(pages) + 1, PAGE_SIZE)
    text = Text(list(prompt), pages)
    while len(text.token_ids) < len(prompt) + NEW_TOKENS:
        count = len(text.token_ids) - text.num_computed
        logits = decoder.forward(make_batch([(text, count)], PAGE_SIZE, wanted=[count - 1]), cache)
        text.num_computed += count
        text.token_ids.append(int(logits[0].argmax()))
    return text.token_ids[len(prompt) :]


def check(path: Path, config: Any, pieces: list[str]) -> None:
    source = open_source(path)
    vocabulary = source.tokenizer_files.metadata["tokenizer.ggml.tokens"]
    prompt = [vocabulary.index(piece) for piece in pieces]
    model = reference_model(source, config)
    wanted = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ops = ReferenceOps()
    decoder = build_decoder(source, {True: ops, False: ops}, "none")
    assert greedy(decoder, prompt) == wanted[0, len(prompt) :].tolist()
    assert len(set(wanted[0].tolist())) > 8, "a text that only repeats itself proves little"


@pytest.mark.slow
def test_smollm2_writes_what_transformers_writes(starter_path: Path) -> None:
    check(starter_path, smollm2_config(), ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"])


@pytest.mark.slow
def test_gemma3_writes_what_transformers_writes(gemma_path: Path) -> None:
    check(gemma_path, gemma3_config(), ["<bos>", "The", "▁capital", "▁of", "▁France", "▁is"])
