"""load_model: what it returns, what it refuses, how it is cancelled, and where foreign architectures go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from gguf_files import write_gguf
from paged_batches import run_in_chunks
from tiny_models import make_model
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.model.load import LoadCancelled, LoadedModel, load_model


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """``model`` as safetensors with a byte-level tokenizer of single characters."""
    model.save_pretrained(folder)
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return folder


def load(path: Path, **changes: object) -> LoadedModel:
    settings = {"weights": "none", "fused": True, "progress": lambda _text, _share: None, **changes}
    return load_model(path, **settings)  # type: ignore[arg-type]


def test_a_folder_becomes_a_model_with_its_text(tmp_path: Path) -> None:
    seen: list[float] = []
    loaded = load(save(make_model("qwen3"), tmp_path), progress=lambda _text, share: seen.append(share))
    assert not loaded.is_fallback
    assert loaded.spec.family == "qwen3"
    assert loaded.text.decode(loaded.text.encode("Hello")) == "Hello"
    assert loaded.stored_format == "safetensors float32"
    assert loaded.load_seconds > 0
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert seen == sorted(seen)
    assert "fp32" in loaded.model.active_paths()["weights"]


@pytest.mark.parametrize("allowed", [0, 1, 9])
def test_loading_can_be_cancelled_at_any_tensor(tmp_path: Path, allowed: int) -> None:
    folder = save(make_model("llama"), tmp_path)
    seen: list[float] = []
    with pytest.raises(LoadCancelled):
        load(
            folder,
            progress=lambda _text, share: seen.append(share),
            cancelled=lambda: len(seen) > allowed,
        )
    assert len(seen) == allowed + 1


def test_longrope_lowers_the_window_to_what_its_short_factors_serve(tmp_path: Path) -> None:
    folder = save(make_model("phi3"), tmp_path)
    assert load(folder).spec.max_position == 256
    assert load(folder, max_context=512).spec.max_position == 512


def test_an_architecture_the_decoder_lacks_runs_through_transformers(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    loaded = load(save(model, tmp_path))
    assert loaded.is_fallback
    prompt = list(range(5, 45))
    loaded.model.spec = loaded.spec  # the test's cache is made from it
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(run_in_chunks(loaded.model, prompt, 7), wanted, atol=1e-4, rtol=0)


def test_a_foreign_gguf_is_refused_since_transformers_reads_gguf_wrongly(tmp_path: Path) -> None:
    def call_it_foreign(writer: object) -> None:
        writer.add_string("general.architecture", "mamba")  # type: ignore[attr-defined]

    path = write_gguf(tmp_path / "foreign.gguf", make_model("llama"), fill_metadata=call_it_foreign)
    with pytest.raises(ValueError, match="mamba"):
        load(path)


def test_an_unknown_weight_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int3"):
        load(save(make_model("llama"), tmp_path), weights="int3")
