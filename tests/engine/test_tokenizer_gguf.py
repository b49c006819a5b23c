"""Tokenizers built from GGUF metadata, against tokenizers that the `tokenizers` library trained and runs."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_fixtures import CHATML, CHATML_TEMPLATE, byte_level, gguf_metadata, sentencepiece, split_by
from tokenizers import Tokenizer, pre_tokenizers

from engine.commands import Message
from engine.text import TextCodec
from engine.tokenizer_pre import PRE_TOKENIZERS
from engine.weights.source import TokenizerFiles

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BYTE_LEVEL = {
    "gpt-2": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": byte_level(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "llama-bpe": byte_level(split_by(LLAMA3)),
    "qwen2": byte_level(split_by(QWEN2), nfc=True),
}
TEXTS = (
    st.text(max_size=30)
    | st.text("ab 12'sSlLtT\n\r\t.,<>|é日👍\u0301", max_size=30)
    | st.sampled_from(
        [
            "The fox doesn't.  12345 we'LL\n\n\n x",
            "<b>bold</b> text",
            "   leading",
            "trailing   ",
            "\r\n\r\n",
            "e\u0301",
        ]
    )
)


def codec_of(metadata: dict[str, Any], vocab_size: int = 10_000) -> TextCodec:
    return TextCodec.open(TokenizerFiles("gguf", metadata=metadata), (), vocab_size)


CODECS = {pre: codec_of(gguf_metadata(truth, "gpt2", pre, add_bos_token=False)) for pre, truth in BYTE_LEVEL.items()}


@pytest.mark.parametrize("pre", BYTE_LEVEL)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_byte_level_equals_the_library(pre: str, text: str) -> None:
    truth, codec = BYTE_LEVEL[pre], CODECS[pre]
    text = text.encode("utf-8", "replace").decode()
    ids = truth.encode(text, add_special_tokens=False).ids
    assert codec.encode(text) == ids
    assert codec.decode(ids) == truth.decode(ids, skip_special_tokens=True)


def pieces(codec: TextCodec, text: str) -> list[str]:
    return [codec.decode([token]) for token in codec.encode(text)]


def cuts(pre: str, text: str) -> list[str]:
    cutter = PRE_TOKENIZERS[pre].pre_tokenizer()
    return [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "a 2024", ["a", " ", "2", "0", "2", "4"]),
        ("gpt-2", "a 2024", ["a", " 2024"]),
        ("llama-bpe", "a 12345678", ["a", " ", "123", "456", "78"]),
        ("qwen2", "a 12345", ["a", " ", "1", "2", "3", "4", "5"]),
        ("tekken", "a 123", ["a", " ", "1", "2", "3"]),
        ("gpt-4o", "isn'T CamelCase 1234", ["isn'T", " Camel", "Case", " ", "123", "4"]),
        ("deepseek-v3", "x=12345", ["x", "=", "123", "45"]),
        ("falcon", "a,b 12345", ["a", ",", "b", " ", "123", "45"]),
        ("llama-bpe", "we'LL go", ["we", "'LL", " go"]),
        ("gpt-2", "we'LL go", ["we", "'", "LL", " go"]),
        ("llama-bpe", "a!\n\nb", ["a", "!\n\n", "b"]),
        ("gpt-2", "a   b", ["a", "  ", " b"]),
        ("default", "x=1234", ["x", "=", "123", "4"]),
        ("deepseek-coder", "a\nb 12", ["a", "\n", "b", " ", "1", "2"]),
    ],
)
def test_how_each_kind_cuts_text(pre: str, text: str, expected: list[str]) -> None:
    assert cuts(pre, text) == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_known_kind_loses_no_text(pre: str) -> None:
    text = "Hi, we'll\r\n\n  see  42,195 things:\tκόσμε 世界 👍🏽!  \n"
    assert "".join(cuts(pre, text)) == text


@pytest.mark.parametrize("pre", [None, "of-tomorrow"])
def test_an_unknown_kind_says_so(pre: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        codec = codec_of(gguf_metadata(BYTE_LEVEL["gpt-2"], "gpt2", pre))
    assert "pre-tokenizer" in codec.notes[0]
    assert "pre-tokenizer" in caplog.text
    assert codec.decode(codec.encode("still works")) == "still works"


def naive_sentencepiece(text: str, scores: dict[str, float], vocab: dict[str, int]) -> list[int]:
    """SentencePiece's BPE by its definition: join the best-scored neighbours, the leftmost of equals, until none is left."""
    parts = list(text.replace(" ", "▁"))
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joins:
            break
        place = min(joins)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    ids = []
    for part in parts:
        ids += [vocab[part]] if part in vocab else [vocab[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


SENTENCEPIECE = {prefix: sentencepiece(prefix) for prefix in (True, False)}


def sentencepiece_metadata(prefix: bool, **extra: Any) -> dict[str, Any]:
    options = {"add_space_prefix": prefix, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return gguf_metadata(SENTENCEPIECE[prefix], "llama", **(options | extra))


SENTENCEPIECE_CODECS = {prefix: codec_of(sentencepiece_metadata(prefix)) for prefix in (True, False)}


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=150, deadline=None)
@given(text=st.text("abedfgihklmnotru THxwqy,.1é日👍\n", min_size=1, max_size=24))
def test_sentencepiece_equals_its_definition(prefix: bool, text: str) -> None:
    metadata, codec = sentencepiece_metadata(prefix), SENTENCEPIECE_CODECS[prefix]
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = {
        t: s for t, s, kind in zip(tokens, metadata["tokenizer.ggml.scores"], kinds, strict=True) if kind == 1 and t
    }
    vocab = {token: i for i, token in enumerate(tokens)}
    expected = [1, *naive_sentencepiece(" " + text if prefix else text, scores, vocab)]
    assert codec.encode(text) == expected
    assert codec.decode(expected) == text


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=100, deadline=None)
@given(text=st.text("abedfgihklmnotru THxwqy,.1é日👍\n", max_size=24))
def test_sentencepiece_equals_the_library(prefix: bool, text: str) -> None:
    truth, codec = SENTENCEPIECE[prefix], SENTENCEPIECE_CODECS[prefix]
    ids = codec.encode(text)
    assert ids[0] == 1
    assert truth.decode(ids) == text == codec.decode(ids)


def test_spaces_around_control_tokens_follow_the_prefix_rule() -> None:
    """Llama's files put a space before the text after each control token, Gemma's never do."""
    assert SENTENCEPIECE_CODECS[True].encode("<s>fox")[1:] == SENTENCEPIECE_CODECS[True].encode("fox")[1:]
    bare = SENTENCEPIECE_CODECS[False]
    assert [bare._parts.tokens[i] for i in bare.encode("</s>fox")][1:3] == ["</s>", "fox"]


def test_sentencepiece_without_the_flags_takes_llamas_defaults() -> None:
    metadata = sentencepiece_metadata(True)
    del metadata["tokenizer.ggml.add_space_prefix"]
    assert codec_of(metadata).encode("The dog") == SENTENCEPIECE_CODECS[True].encode("The dog")


def test_user_defined_tokens_are_text_and_control_tokens_are_not() -> None:
    codec = CODECS["smollm"]
    assert pieces(codec, "a<b>c") == ["a", "<b>", "c"]
    assert codec.decode(codec.encode("<|im_start|>a<b>c<|im_end|>")) == "a<b>c"


def test_control_tokens_by_spelling_even_when_marked_as_text() -> None:
    metadata = gguf_metadata(BYTE_LEVEL["smollm"], "gpt2", "smollm", chat_template=CHATML_TEMPLATE)
    metadata["tokenizer.chat_template"] = metadata.pop("tokenizer.ggml.chat_template")
    metadata["tokenizer.ggml.token_type"] = [4 if kind == 3 else kind for kind in metadata["tokenizer.ggml.token_type"]]
    codec = codec_of(metadata)
    assert codec.encode("<|im_end|>") == [2]
    assert codec.eos_token_ids == {0, 2}
    typed = codec.encode((Message("user", "<|im_end|>"),))
    assert typed.count(2) == 1
    codec.close()


def test_ends_of_text_are_the_union_of_all_sources() -> None:
    metadata = gguf_metadata(BYTE_LEVEL["gpt-2"], "gpt2", "gpt-2", eos_token_id=2, eot_token_id=5, eom_token_id=7)
    codec = TextCodec.open(TokenizerFiles("gguf", metadata=metadata), (9, 10**6), 10_000)
    assert codec.eos_token_ids == {0, 2, 5, 7, 9}  # 0: <|endoftext|>; ids that cannot exist are dropped


def test_bos_once_and_only_when_wanted() -> None:
    wants = codec_of(gguf_metadata(BYTE_LEVEL["gpt-2"], "gpt2", "gpt-2", bos_token_id=0, add_bos_token=True))
    assert wants.encode("hi")[0] == 0
    assert wants.encode("<|endoftext|>hi").count(0) == 1
    assert 0 not in codec_of(gguf_metadata(BYTE_LEVEL["gpt-2"], "gpt2", "gpt-2", bos_token_id=0)).encode("hi")
    llama3 = codec_of(gguf_metadata(BYTE_LEVEL["llama-bpe"], "gpt2", "llama-bpe", bos_token_id=0))
    assert llama3.encode("hi")[0] == 0


def test_padded_and_too_small_vocabularies() -> None:
    metadata = gguf_metadata(BYTE_LEVEL["gpt-2"], "gpt2", "gpt-2")
    size = len(metadata["tokenizer.ggml.tokens"])
    padded = codec_of(metadata, size + 50)
    assert padded.vocab_size == size
    assert padded.encode((size + 49,)) == [size + 49]
    assert padded.decode([size + 49]) == ""
    with pytest.raises(ValueError, match="vocabulary"):
        padded.encode((size + 50,))
    with pytest.raises(ValueError, match="vocabulary"):
        padded.encode((-1,))
    small = codec_of(metadata, 100)
    assert small.vocab_size == 100
    with pytest.raises(ValueError, match="vocabulary"):
        small.encode("<b>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
    ],
)
def test_unusable_metadata_has_a_clear_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec_of(gguf_metadata(BYTE_LEVEL["gpt-2"], "gpt2", "gpt-2") | changes)


def test_phi3_control_tokens_swallow_the_space_behind_them() -> None:
    truth = Tokenizer.from_str(SENTENCEPIECE[True].to_str())
    truth.add_special_tokens(["<|end|>"])
    metadata = gguf_metadata(truth, "llama", add_space_prefix=True, bos_token_id=1, unknown_token_id=0)
    plain, phi3 = codec_of(metadata), codec_of(metadata | {"general.architecture": "phi3"})
    assert phi3.encode("<|end|>\nfox") == plain.encode("<|end|>fox")
    assert plain.encode("<|end|>\nfox") != plain.encode("<|end|>fox")


def test_names_of_control_tokens_cannot_be_guessed() -> None:
    """Two codecs of one file use different private names, and a private-looking text is only text."""
    first, second = (codec_of(gguf_metadata(BYTE_LEVEL["gpt-2"], "gpt2", "gpt-2")) for _ in range(2))
    assert set(first._parts.private.values()).isdisjoint(second._parts.private.values())
    name = first._parts.private[2]
    assert second.decode(second.encode(name)) == name
    assert not set(second.encode(name)) & set(range(len(CHATML)))
