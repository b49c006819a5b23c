"""Every ggml type that gguf can decode reads slice by slice as it does whole; others are refused by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType

from engine.weights import gguf as gguf_source
from engine.weights.ggml_types import block_of, can_dequantize, file_type_name
from engine.weights.source import UnsupportedArchitecture, open_source
from tests.engine import gguf_files, tiny_models

DECODABLE = [kind for kind in GgmlType if can_dequantize(kind)]
COLUMNS = 256


def _random_blocks(kind: GgmlType, rows: int) -> np.ndarray:
    """Bytes below 0x7C, so that no half or single among them is NaN or infinite."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind))
    return random.integers(0, 0x7C, size=(rows, COLUMNS // elements * num_bytes), dtype=np.uint8)


def _model_with(kind: GgmlType, path: Path, blocks: np.ndarray) -> Path:
    """A one-layer llama whose embedding [rows, 256] is ``blocks``."""
    transformers = tiny_models.transformers
    config = transformers.LlamaConfig(
        vocab_size=blocks.shape[0], hidden_size=COLUMNS, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    gguf_files.write_gguf(path, model, replace={"token_embd.weight": (blocks, kind)})
    return path


def test_the_types_people_use_can_be_decoded() -> None:
    wanted = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_XXS IQ2_XXS MXFP4 TQ1_0"
    assert set(wanted.split()) <= {kind.name for kind in DECODABLE}


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_type_reads_in_slices_as_gguf_decodes_it_whole(
    kind: GgmlType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_source, "SLICE_WEIGHTS", 7 * COLUMNS)  # 40 rows: five slices of 7 and one of 5
    blocks = _random_blocks(kind, 40)
    source = open_source(_model_with(kind, tmp_path / "model.gguf", blocks))
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(blocks, kind)
    assert np.isfinite(wanted).all()
    assert np.array_equal(source.read("embed").numpy(), wanted)


@pytest.mark.parametrize("kind", [kind for kind in GgmlType if kind not in DECODABLE], ids=lambda kind: kind.name)
def test_type_without_decoder_is_refused_by_name_on_opening(kind: GgmlType, tmp_path: Path) -> None:
    path = _model_with(kind, tmp_path / "model.gguf", _random_blocks(kind, 8))
    with pytest.raises(UnsupportedArchitecture, match=f"model.gguf: tensor token_embd.weight is stored as {kind.name}"):
        open_source(path)


def test_tensor_nobody_needs_may_have_any_type(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    extra = {"blk.0.attn_rot_embd.weight": (_random_blocks(GgmlType.I8, 2), GgmlType.I8)}
    gguf_files.write_gguf(path, tiny_models.make_model("llama"), extra=extra)
    assert "embed" in open_source(path).names()


def test_block_sizes_and_file_types_by_number() -> None:
    assert block_of(3) == ("Q4_1", 32, 20)
    assert block_of(4) is None  # removed from the format long ago
    assert file_type_name(15) == "Q4_K_M"
    assert file_type_name(0) == "F32"
    assert file_type_name(9999) is None
