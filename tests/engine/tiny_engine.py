"""A whole engine over a tiny random model with a long window: real switches, real pages, little time."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.engine import Engine
from engine.events import Event
from engine.params import SamplingParams

VOCAB = 260
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 6, 2, 16, 4


@functools.cache
def _model(head_dim: int = HEAD_DIM) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        max_position_embeddings=2048,
        bos_token_id=256,
        eos_token_id=257,
    )
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = transformers.LlamaForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.data.normal_(0.0, 1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
    return model


def save_model(folder: Path, head_dim: int = HEAD_DIM) -> Path:
    """The model as safetensors with a tokenizer of single bytes."""
    _model(head_dim).save_pretrained(folder)
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return folder


def save_draft(folder: Path) -> Path:
    """The model with every weight a little off: as a draft model it is right now and then."""
    model = _model()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        generator = torch.Generator().manual_seed(1)
        for value in model.state_dict().values():
            value.add_(torch.randn(value.shape, generator=generator) * value.std() * 0.12)
        return save_model(folder)
    finally:
        model.load_state_dict(kept)


def load(
    folder: Path, settings: Mapping[str, str] | None = None, kv_bytes: int = 4 * 2**20, draft: Path | None = None
) -> Engine:
    """fp32 weights unless ``settings`` say otherwise."""
    full = {"weights": "none", **(settings or {})}
    return Engine.load(str(folder), full, kv_bytes=kv_bytes, find=Path, draft=str(draft) if draft else None)


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of random tokens."""
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def reply(engine: Engine, prompt: tuple[int, ...], count: int = 12) -> tuple[int, ...]:
    (completion,) = engine.generate([prompt], greedy(count))
    engine.check_integrity()
    return tuple(completion.token_ids)


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    engine.check_integrity()
    return events
