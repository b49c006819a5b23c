"""Tiny tokenizers made with the `tokenizers` library, and their export as GGUF metadata; for tests only.

They are the independent truth: trained and run by the library, with control tokens under their own names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "In 2024 there were 1234567 tokens, 99.5% of them plain: it's, we'll, they've, I'M, YOU'RE.",
    "def main():\n    for i in range(10):\n\t\tprint(i)\n\n\nreturn  None\r\n",
    "Größe, façade, naïve, ¿qué?, Ελλάδα, Москва, 日本語のテキスト, 中文文本, العربية, हिन्दी, 👨‍👩‍👧 🎉🎉",
    "user assistant system end start im_end im_start <|x|> </s> <b>bold</b>",
] * 3
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(pre: pre_tokenizers.PreTokenizer, vocab_size: int = 420, nfc: bool = False) -> Tokenizer:
    """A byte-level BPE with ChatML control tokens (ids 0, 1, 2) and one user-defined token, ``<b>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=CHATML,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<b>", normalized=False)])
    return tokenizer


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def sentencepiece(prefix: bool, vocab_size: int = 400) -> Tokenizer:
    """A SentencePiece-style BPE with byte fallback, as Llama's (``prefix``) or Gemma's files are."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    ascii_corpus = [line.encode("ascii", "ignore").decode() for line in CORPUS]
    words = [word for line in ascii_corpus for word in tokenizer.normalizer.normalize_str(line).split()]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]  # byte tokens are ordinary entries of the vocabulary
    return Tokenizer.from_str(json.dumps(spec))


def gguf_metadata(tokenizer: Tokenizer, kind: str, pre: str | None = None, **extra: Any) -> dict[str, Any]:
    """The metadata that the ggml project's converter would write for ``tokenizer``."""
    spec = json.loads(tokenizer.to_str())
    by_id = {i: t for t, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id[i] for i in range(len(by_id))]
    special = {entry["content"]: entry["special"] for entry in spec["added_tokens"]}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_type_of(token, special, kind) for token in tokens],
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ", 1)) for m in spec["model"]["merges"]]
    if kind == "gpt2":
        metadata["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    else:
        rank = {left + right: -float(place) for place, (left, right) in reversed(list(enumerate(merges)))}
        metadata["tokenizer.ggml.scores"] = [rank.get(token, -1e6) for token in tokens]
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def _type_of(token: str, special: dict[str, bool], kind: str) -> int:
    if token == "<unk>":
        return 2
    if token in special:
        return 3 if special[token] else 4
    return 6 if kind == "llama" and token.startswith("<0x") else 1


def write_folder(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer
