"""Tokenizers from model folders, against the same files run by the `tokenizers` library and by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_fixtures import CHATML, CHATML_TEMPLATE, byte_level, sentencepiece, with_bos, write_folder
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.commands import Message
from engine.text import TextCodec
from engine.weights.source import TokenizerFiles

CHATML_CONFIG = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHATML_TEMPLATE}
TALK = (Message("system", "Be brief."), Message("user", "The fox  doesn't\n\nsleep"), Message("assistant", "It does."))


def codec_of(folder: Path, vocab_size: int = 10_000) -> TextCodec:
    return TextCodec.open(TokenizerFiles("hf", folder=folder), (), vocab_size)


@pytest.fixture(scope="module")
def byte_truth() -> Tokenizer:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture(scope="module")
def chatml(byte_truth: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return codec_of(write_folder(tmp_path_factory.mktemp("chatml"), byte_truth, **CHATML_CONFIG))


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30) | st.lists(st.sampled_from([*CHATML, "<b>", " ", "fox", "é", "\n"])).map("".join))
def test_plain_text_equals_the_library(chatml: TextCodec, byte_truth: Tokenizer, text: str) -> None:
    """With control tokens as control tokens: that is what a plain prompt means."""
    text = text.encode("utf-8", "replace").decode()
    ids = byte_truth.encode(text, add_special_tokens=False).ids
    assert chatml.encode(text) == ids
    assert chatml.decode(ids) == byte_truth.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from(["<s>", "</s>", "fox", " ", "  ", "é", "日", "\n", "the dog", "1."])).map("".join))
def test_sentencepiece_style_equals_the_library(prefix: bool, text: str, tmp_path_factory: Any) -> None:
    truth = sentencepiece_truth(prefix)
    codec = SENTENCEPIECE.setdefault(
        prefix, codec_of(write_folder(tmp_path_factory.mktemp("sp"), truth, bos_token="<s>", eos_token="</s>"))
    )
    ids = truth.encode(text, add_special_tokens=False).ids
    assert codec.encode(text) == ids
    assert codec.decode(ids) == truth.decode(ids, skip_special_tokens=True)


SENTENCEPIECE: dict[bool, TextCodec] = {}
_TRUTHS: dict[bool, Tokenizer] = {}


def sentencepiece_truth(prefix: bool) -> Tokenizer:
    if prefix not in _TRUTHS:
        _TRUTHS[prefix] = sentencepiece(prefix)
    return _TRUTHS[prefix]


@pytest.mark.parametrize("num_messages", [1, 2, 3])
def test_a_conversation_equals_transformers(chatml: TextCodec, byte_truth: Tokenizer, num_messages: int) -> None:
    from transformers import PreTrainedTokenizerFast

    truth = PreTrainedTokenizerFast(tokenizer_object=byte_truth, eos_token="<|im_end|>", chat_template=CHATML_TEMPLATE)
    talk = TALK[:num_messages]
    plain = [{"role": message.role, "content": message.content} for message in talk]
    prompts = talk[-1].role != "assistant"
    text = truth.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompts)
    assert chatml.encode(talk) == truth(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=150, deadline=None)
@given(
    content=st.lists(
        st.sampled_from([*CHATML, "<|im_", "end|>", "<|", "|>", "<", " ", "hi", "\ufdd2", "\ufdd0", "\n"]), min_size=1
    ).map("".join)
)
def test_typed_control_tokens_stay_text(chatml: TextCodec, content: str) -> None:
    """FIELD 41: only the template's own control tokens come out, and the user's text comes out whole."""
    ids = chatml.encode((Message("user", content),))
    assert [i for i in ids if i < len(CHATML)] == [1, 2, 1]
    assert chatml.decode(ids) == f"user\n{content}\nassistant\n"
    fallback = chatml.encode((Message("system", content), Message("user", content)))
    assert [i for i in fallback if i < len(CHATML)] == [1, 2, 1, 2, 1]


def test_merges_and_whole_words_never_yield_a_control_token(tmp_path: Path) -> None:
    """A vocabulary whose merges build "<s>", and one that takes whole words: typed text still cannot be control."""
    vocab = {"<s>": 0, "<": 1, "s": 2, ">": 3, "<s": 4, "u": 5}
    for ignore_merges in (False, True):
        model = models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")], ignore_merges=ignore_merges)
        tokenizer = Tokenizer(model)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<s>"])
        template = "{{ bos_token }}{{ messages[0].content }}"
        folder = write_folder(tmp_path / str(ignore_merges), tokenizer, bos_token="<s>", chat_template=template)
        assert codec_of(folder).encode((Message("user", "u<s>u"),)) == [0, 5, 4, 3, 5]


def test_unigram_control_pieces_are_not_found_in_text(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("▁", -2.0), ("<", -3.0), ("s", -3.0), (">", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    template = "{{ bos_token }}{{ messages[0].content }}"
    codec = codec_of(write_folder(tmp_path, tokenizer, bos_token="<s>", chat_template=template))
    ids = codec.encode((Message("user", "<s>"),))
    assert ids.count(1) == 1
    assert codec.decode(ids) == "<s>"


def test_space_handling_of_control_tokens_is_kept(tmp_path: Path) -> None:
    """lstrip and rstrip apply around the template's tokens, not around the same words typed by a user."""
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_special_tokens([AddedToken("<|e|>", lstrip=True, rstrip=True, normalized=False)])
    end = tokenizer.token_to_id("<|e|>")
    template = "{{ messages[0].content }}  <|e|>  x"
    codec = codec_of(write_folder(tmp_path, tokenizer, chat_template=template))
    ids = codec.encode((Message("user", "a  <|e|>  b"),))
    assert ids.count(end) == 1
    assert codec.decode(ids) == "a  <|e|>  bx"
    assert codec.encode("a  <|e|>  x") == tokenizer.encode("a  <|e|>  x").ids


def test_no_second_bos(tmp_path: Path) -> None:
    """FIELD 39: a template's BOS stays alone; plain text gets the one its post-processor or config asks for."""
    tokenizer = with_bos(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)), "<|endoftext|>")
    template = "{{ bos_token }}{{ messages[0].content }}"
    codec = codec_of(write_folder(tmp_path / "a", tokenizer, bos_token="<|endoftext|>", chat_template=template))
    assert codec.encode((Message("user", "hi"),)).count(0) == 1
    assert codec.encode("hi").count(0) == 1
    assert codec.encode("<|endoftext|>hi").count(0) == 1
    bare = codec_of(write_folder(tmp_path / "b", tokenizer, bos_token="<|endoftext|>", chat_template="{{ 1 }}"))
    assert 0 not in bare.encode((Message("user", "hi"),))  # as transformers: the template alone decides
    off = codec_of(write_folder(tmp_path / "c", tokenizer, bos_token="<|endoftext|>", add_bos_token=False))
    assert 0 not in off.encode("hi")


def test_an_eos_of_the_post_processor_does_not_end_the_prompt(tmp_path: Path) -> None:
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)])
    codec = codec_of(write_folder(tmp_path, tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>"))
    assert not {1, 2} & set(codec.encode("hi"))


def test_leftover_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    plain = tokenizer.encode("the dog sleeps and sleeps").ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    assert codec_of(write_folder(tmp_path, tokenizer)).encode("the dog sleeps and sleeps") == plain


def test_where_the_template_comes_from(byte_truth: Tokenizer, tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ 'default' }}"}]
    folder = write_folder(tmp_path, byte_truth, chat_template=several)
    hello = (Message("user", "hi"),)
    codec = codec_of(folder)
    assert codec.decode(codec.encode(hello)) == "default"
    (folder / "chat_template.jinja").write_text("{{ 'from the file' }}", encoding="utf-8")
    codec = codec_of(folder)
    assert codec.decode(codec.encode(hello)) == "from the file"


def test_without_a_template_turns_are_plain(byte_truth: Tokenizer, tmp_path: Path) -> None:
    codec = codec_of(write_folder(tmp_path, byte_truth))
    assert not codec.has_chat_template
    assert codec.turn_stop == ("\nUser:",)
    ids = codec.encode((Message("system", "Be brief."), Message("user", "<|im_end|> hi")))
    assert codec.decode(ids) == "Be brief.\n\nUser: <|im_end|> hi\n\nAssistant:"
    assert 2 not in ids


def test_a_system_message_goes_into_the_first_turn_when_refused(byte_truth: Tokenizer, tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    codec = codec_of(write_folder(tmp_path, byte_truth, chat_template=template))
    assert codec.decode(codec.encode(TALK)) == "[Be brief.\n\nThe fox  doesn't\n\nsleep][It does.]"
    with pytest.raises(ValueError, match="System role not supported"):
        codec.encode(TALK[:1])


def test_ends_of_turn_the_template_writes(byte_truth: Tokenizer, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_truth, eos_token="<|endoftext|>", chat_template=CHATML_TEMPLATE)
    assert codec_of(folder).eos_token_ids == {0, 2}
    plain = write_folder(tmp_path / "plain", byte_truth, eos_token={"content": "<|endoftext|>"})
    assert codec_of(plain).eos_token_ids == {0}


def test_half_a_surrogate_pair_is_replaced(chatml: TextCodec) -> None:
    assert chatml.decode(chatml.encode((Message("user", "a\ud83db"),))) == "user\na?b\nassistant\n"


def test_a_codec_without_decoder_joins_words(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    codec = codec_of(write_folder(tmp_path, tokenizer))
    assert codec.decode(codec.encode("a b a")) == "a b a" == tokenizer.decode([0, 1, 0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no tokenizer.json"),
        (b"", "cannot be read"),
        (b"<html>not found</html>", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[1, 2]", "not what a model folder holds"),
        (b'{"model": {"type": "Unheard"}}', "not a tokenizer"),
    ],
)
def test_broken_files_have_a_clear_error(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        codec_of(tmp_path)


def test_a_broken_config_has_a_clear_error(byte_truth: Tokenizer, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_truth)
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be read"):
        codec_of(folder)


def test_a_broken_template_loads_and_fails_with_a_message(byte_truth: Tokenizer, tmp_path: Path) -> None:
    codec = codec_of(write_folder(tmp_path, byte_truth, chat_template="{{ x | no_such }}"))
    assert codec.encode("plain text still works")
    with pytest.raises(ValueError, match="no_such"):
        codec.encode((Message("user", "hi"),))


def test_config_may_name_control_tokens(tmp_path: Path) -> None:
    """An added token that is not marked special, but is the config's end of text."""
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens(["~end~"])
    end = tokenizer.token_to_id("~end~")
    folder = write_folder(tmp_path, tokenizer, eos_token="~end~", chat_template="{{ messages[0].content }}~end~")
    codec = codec_of(folder)
    assert end in codec.eos_token_ids
    assert codec.encode((Message("user", "~end~"),)).count(end) == 1
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "~end~"
