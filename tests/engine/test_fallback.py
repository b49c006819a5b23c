"""Models outside the decoder's families run through transformers, in our pages, with the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.kv.cache import KvCache
from engine.model.fallback import load_fallback
from engine.ops.interface import Span, StepBatch
from engine.ops.reference import ReferenceOps

PAGE = 4
OPS = {True: ReferenceOps(), False: ReferenceOps()}


def ignore(stage: str, fraction: float) -> None:
    pass


def configs() -> dict[str, transformers.PreTrainedConfig]:
    common = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    return {
        "gpt_neox": transformers.GPTNeoXConfig(**common, num_attention_heads=4),
        "olmo2": transformers.Olmo2Config(**common, num_attention_heads=4, num_key_value_heads=2),
        "granite": transformers.GraniteConfig(**common, num_attention_heads=4, num_key_value_heads=2),
        "cohere": transformers.CohereConfig(**common, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0),
        "starcoder2": transformers.Starcoder2Config(
            **common, num_attention_heads=4, num_key_value_heads=2, sliding_window=8
        ),
        "phi": transformers.PhiConfig(**common, num_attention_heads=4),
    }


def batch(tokens: list[list[int]], starts: list[int], pages: list[list[int]]) -> StepBatch:
    """Rows of each request from its start on; logits of every row."""
    ids, positions, slots, spans = [], [], [], []
    for text, start, table in zip(tokens, starts, pages, strict=True):
        spans.append(Span(len(ids), len(text) - start, len(text), table))
        for position in range(start, len(text)):
            ids.append(text[position])
            positions.append(position)
            slots.append(table[position // PAGE] * PAGE + position % PAGE)
    return StepBatch(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(slots), tuple(spans), torch.arange(len(ids))
    )


@pytest.mark.parametrize("name", sorted(configs()))
def test_logits_equal_transformers_whole_and_in_parts(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = configs()[name]
    config._attn_implementation = "eager"
    truth = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    for parameter in truth.parameters():
        parameter.data.normal_(std=0.2)
    truth.save_pretrained(tmp_path)
    spec, model = load_fallback(tmp_path, OPS, True, ignore)
    cache = KvCache(spec, 20, PAGE, torch.float32)
    one, two = [5, 9, 11, 2, 7, 30, 31, 8, 1, 4, 90], [3, 3, 60, 61]
    pages = [[7, 2, 9], [4]]
    with torch.inference_mode():
        wanted = torch.cat([truth(torch.tensor([text])).logits[0] for text in (one, two)])
        together = model.forward(batch([one, two], [0, 0], pages), cache)
        torch.testing.assert_close(together, wanted, atol=1e-4, rtol=1e-4)
        cache = KvCache(spec, 20, PAGE, torch.float32)
        model.forward(batch([one[:6]], [0], pages[:1]), cache)
        rest = model.forward(batch([one, two], [6, 0], pages), cache)
        torch.testing.assert_close(rest, wanted[6:], atol=1e-4, rtol=1e-4)
    assert model.weight_bytes == sum(p.numel() * 4 for p in truth.parameters())
    assert "transformers" in model.active_paths()["weights"]


def test_a_model_without_paged_keys_is_refused_with_a_remedy(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Choose another model"):
        load_fallback(tmp_path, OPS, True, ignore)
