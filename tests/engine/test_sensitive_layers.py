"""sensitive_layers: which matrices keep 8 bits under int4, what that costs in bytes and gains in closeness."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from saved_models import save_tiny
from tiny_models import FAMILIES, StateDictSource, make_model

from engine.engine import Engine
from engine.model.load import read_weights, sensitive_scheme
from engine.ops.cpu import CpuOps
from engine.quality import fixed_tokens, full_precision, quality, read, reference_rows


@pytest.mark.parametrize(
    ("scheme", "sensitive", "head", "layers"),
    [
        ("int4", "off", "int4", ["int4"] * 3),
        ("int4", "on", "int8", ["int4"] * 3),
        ("int4", "more", "int8", ["int8", "int4", "int8"]),
        ("int4_g64", "more", "int8", ["int8", "int4_g64", "int8"]),
        ("int4_g128", "off", "int4_g128", ["int4_g128"] * 3),
        ("int8", "more", "int8", ["int8"] * 3),
        ("none", "more", "none", ["none"] * 3),
        ("int8", "off", "int8", ["int8"] * 3),
    ],
)
def test_only_four_bits_become_eight_and_only_where_asked(
    scheme: str, sensitive: str, head: str, layers: list[str]
) -> None:
    assert sensitive_scheme(scheme, sensitive) == head
    assert [sensitive_scheme(scheme, sensitive, layer, 3) for layer in range(3)] == layers


@pytest.mark.parametrize("sensitive", ["off", "on", "more"])
def test_every_matrix_is_packed_as_the_rule_says(sensitive: str) -> None:
    source = StateDictSource(FAMILIES["qwen3"].spec, make_model("qwen3").state_dict())
    weights = read_weights(source, CpuOps(), "int4", lambda text, share: None, sensitive=sensitive)
    assert weights.head.scheme == weights.embed.scheme == sensitive_scheme("int4", sensitive)
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        wanted = sensitive_scheme("int4", sensitive, index, last + 1)
        assert {layer.qkv.scheme, layer.attn_out.scheme, layer.gate_up.scheme, layer.mlp_out.scheme} == {wanted}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save_tiny("llama", tmp_path_factory.mktemp("tiny"))
    engine = Engine.load(str(folder), full_precision(), kv_bytes=1 << 20)
    yield engine
    engine.close()


def test_more_bits_cost_bytes_and_bring_the_text_closer(engine: Engine) -> None:
    engine.apply(full_precision())
    tokens = fixed_tokens(engine, 100)
    reference = reference_rows(engine, tokens)
    sizes, kls = [], []
    for sensitive in ("off", "on", "more"):
        engine.apply({"weights": "int4", "sensitive_layers": sensitive})
        sizes.append(engine.info.weight_bytes)
        kls.append(quality(reference, read(engine, tokens), tokens).mean_kl)
    assert sizes[0] < sizes[1] < sizes[2]
    assert kls[0] > kls[1] > kls[2] > 0


def test_larger_groups_hold_fewer_bytes_and_their_paths_say_which(engine: Engine) -> None:
    sizes = []
    for weights in ("int4", "int4_g64", "int4_g128"):
        engine.apply({"weights": weights, "sensitive_layers": "off"})
        sizes.append(engine.info.weight_bytes)
        read(engine, fixed_tokens(engine, 20))
        assert engine.info.active_paths["weights"].startswith(f"{weights}: ")
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("fused", ["on", "off"])
def test_mixed_layers_give_the_same_logits_in_chunks_and_token_by_token(engine: Engine, fused: str) -> None:
    engine.apply({"weights": "int4", "sensitive_layers": "more", "fused_ops": fused})
    tokens = fixed_tokens(engine, 70)
    chunked, decoded = (torch.cat([rows.clone() for rows in engine.read_text(tokens, n)]) for n in (70, 1))
    torch.testing.assert_close(chunked.softmax(-1), decoded.softmax(-1), atol=0.05, rtol=0)
