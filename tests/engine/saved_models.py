"""Tiny models on disk, for what loads from a path: safetensors beside a byte-level tokenizer. Also for the app's tests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.engine.tiny_models import make_model


def save_tiny(family: str, folder: Path) -> Path:
    """A random model of ``family`` whose tokens are single bytes; returns ``folder``."""
    make_model(family).save_pretrained(folder)
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return folder
