"""``attention=reference`` runs the plain steps for real, leaves the other fused operations alone, and changes no text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_fallback import PAGE, batch, configs, ignore
from tiny_engine import greedy, load, save_model, text

from engine.engine import Engine
from engine.events import StepRecord
from engine.kv.cache import KvCache
from engine.model.fallback import load_fallback
from engine.ops import reference
from engine.ops.cpu import CpuOps

PLAIN = "torch reference attention"


@pytest.fixture(scope="module", params=["none", "int8"])
def engine(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    # In 16 bits: where the two ways differ in a sum's last bit, 8 bits can round to different steps.
    settings = {"weights": request.param, "activations": "none"}
    engine = load(save_model(tmp_path_factory.mktemp("tiny")), settings)
    yield engine
    engine.close()


def records(engine: Engine) -> list[StepRecord]:
    engine.submit(text(60), greedy(6))
    events = []
    while engine.has_work:
        events += engine.step()
    return [event for event in events if isinstance(event, StepRecord)]


def test_the_path_that_ran_is_named_and_the_scores_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        reference, "_attend", lambda *arguments, run=reference._attend: calls.append(1) or run(*arguments)
    )
    engine.apply({"attention": "fused", "fused_ops": "on", "prefix": "off"})
    fused = records(engine)
    assert not calls
    assert all(PLAIN not in record.active_paths["attention"] for record in fused)
    engine.apply({"attention": "reference"})
    plain = records(engine)
    assert len(calls) == sum(len(record.requests) for record in plain) * engine.info.num_layers
    assert all(record.active_paths["attention"] == PLAIN for record in plain)
    assert all("layers" not in record.active_paths for record in plain)
    for before, after in zip(fused, plain, strict=True):
        assert after.cost.activation_bytes > before.cost.activation_bytes
        assert after.cost.attention_flops == before.cost.attention_flops
    engine.apply({"attention": "fused", "prefix": "on"})


def test_it_is_apart_from_the_other_fused_operations(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    monkeypatch.setattr(
        reference, "rms_norm", lambda *arguments, run=reference.rms_norm: norms.append(1) or run(*arguments)
    )
    engine.apply({"attention": "reference", "fused_ops": "on"})
    records(engine)
    assert not norms
    engine.apply({"attention": "fused", "fused_ops": "off"})
    assert all(PLAIN not in record.active_paths["attention"] for record in records(engine))
    assert norms
    engine.apply({"fused_ops": "on"})


def test_the_text_stays_while_it_is_flipped(engine: Engine) -> None:
    prompts = [text(70), text(33, 1), text(5, 2)]
    plain = [each.token_ids for each in engine.generate(prompts, greedy(16))]
    engine.apply({"attention": "reference"})
    assert [each.token_ids for each in engine.generate(prompts, greedy(16))] == plain
    engine.apply({"attention": "fused"})


@pytest.mark.parametrize("changes", [{"kv_dtype": "int8"}, {"window": "512"}, {"gqa": "off"}, {"sparse": "8"}])
def test_it_reads_every_kind_of_cache(engine: Engine, changes: dict[str, str]) -> None:
    before = dict(engine.options)
    engine.apply({**changes, "attention": "reference"})
    try:
        record = records(engine)[-1]
        assert record.active_paths["attention"] == PLAIN
        engine.check_integrity()
    finally:
        engine.apply(before)


def test_a_model_through_transformers_has_it_too(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(configs()["granite"]).eval().float()
    model.save_pretrained(tmp_path)
    spec, loaded = load_fallback(tmp_path, {True: CpuOps(True), False: CpuOps(False)}, True, ignore)
    tokens, paths, logits = [[5, 9, 11, 2, 7, 30]], [], []
    for fused_attention in (True, False):
        loaded.set_fused(True, fused_attention)
        logits.append(loaded.forward(batch(tokens, [0], [[7, 2, 9]]), KvCache(spec, 20, PAGE, torch.float32)))
        paths.append(loaded.active_paths()["attention"])
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert paths[1] == PLAIN != paths[0]
