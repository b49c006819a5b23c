"""From a model's files to its logits: every family as a safetensors folder and as GGUF (acceptance point 3, FIELD 36)."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from gguf_files import write_gguf
from paged_batches import Text, advance, make_cache, run_in_chunks, scattered_pages
from tiny_models import FAMILIES, VOCAB, make_model
from torch import Tensor

from engine.model.load import build_decoder
from engine.model.spec import ModelSpec
from engine.ops.cpu import CpuOps
from engine.ops.interface import Ops
from engine.ops.reference import ReferenceOps
from engine.weights.source import open_source

PROMPT = torch.randint(3, VOCAB, (150,), generator=torch.Generator().manual_seed(4)).tolist()
# Mistral's window has no key in GGUF; SmolLM3's unrotated layers are fixed there (every fourth).
IN_GGUF = [family for family in FAMILIES if family not in ("mistral", "smollm3")] + ["smollm3_every_fourth"]


def logits_of_file(path: Path, ops: Ops, scheme: str = "none") -> Tensor:
    return run_in_chunks(build_decoder(open_source(path), {True: ops}, scheme), PROMPT, chunk=64)


def logits_of_transformers(family: str) -> Tensor:
    with torch.inference_mode():
        return make_model(family)(torch.tensor([PROMPT])).logits[0]


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    assert wanted.std() > 0.5, "the reference's logits are too flat to prove anything"
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=0)


def comparable(spec: ModelSpec) -> ModelSpec:
    """A spec without the names and end tokens that files add, and with numbers as near as a file keeps them (fp32)."""
    ropes = tuple(
        dataclasses.replace(
            rope,
            attention_factor=round(rope.attention_factor, 5),
            short_factors=tuple(round(factor, 5) for factor in rope.short_factors),
            long_factors=tuple(round(factor, 5) for factor in rope.long_factors),
        )
        for rope in spec.ropes
    )
    return dataclasses.replace(
        spec,
        name="",
        family="",
        ropes=ropes,
        eos_token_ids=(),
        norm_eps=round(spec.norm_eps, 9),
        attention_scale=round(spec.query_scale, 6),
    )


@pytest.mark.parametrize(
    "ops", [ReferenceOps(), CpuOps(fused=True), CpuOps(fused=False)], ids=["ref", "fused", "plain"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_safetensors_folder_is_understood_and_agrees(family: str, ops: Ops, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    assert comparable(open_source(tmp_path).spec) == comparable(FAMILIES[family].spec)
    assert_close(logits_of_file(tmp_path, ops), logits_of_transformers(family))


@pytest.mark.parametrize("family", IN_GGUF)
def test_a_gguf_file_agrees(family: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_model(family))
    assert_close(logits_of_file(path, CpuOps()), logits_of_transformers(family))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_weights_stored_in_bf16_run_in_fp32(family: str, tmp_path: Path) -> None:
    copy.deepcopy(make_model(family)).bfloat16().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0]
    assert_close(logits_of_file(tmp_path, CpuOps()), wanted)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize(("use_native", "rounded_away"), [(False, 0.05), (None, 0.08)], ids=["torch", "native"])
def test_packed_weights_agree_with_the_reference_on_the_weights_they_stand_for(
    family: str, scheme: str, use_native: bool | None, rounded_away: float, tmp_path: Path
) -> None:
    """bf16 or int8 activations beside fp32 ones: the same text within what they round away."""
    make_model(family).save_pretrained(tmp_path)
    wanted = logits_of_file(tmp_path, ReferenceOps(), scheme)
    actual = logits_of_file(tmp_path, CpuOps(use_native=use_native), scheme)
    assert (actual - wanted).norm() < rounded_away * wanted.norm()
    unpacked = logits_of_transformers(family)
    assert (wanted - unpacked).norm() < {"int8": 0.1, "int4": 0.8}[scheme] * unpacked.norm()


def test_switching_fused_ops_between_steps_keeps_weights_and_text(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    decoder = build_decoder(open_source(tmp_path), {True: CpuOps(True), False: CpuOps(False)}, "none")
    (pages,) = scattered_pages(1, len(PROMPT), 16)
    cache, text = make_cache(decoder, len(pages) + 1, 16), Text(PROMPT, pages)
    paths = []
    for step in range(5):
        decoder.set_fused(step % 2 == 0)
        advance(decoder, cache, [(text, 30)])
        paths.append(decoder.active_paths()["attention"])
    assert_close(torch.stack(text.logits), logits_of_transformers("llama"))
    assert paths[0] == paths[2] != paths[1] == paths[3]
