"""Pre-tokenizers of byte-level BPE vocabularies, by the name a GGUF file gives them (``tokenizer.ggml.pre``).

A BPE vocabulary only means something together with the way its text was cut before merging. tokenizer.json spells that
out; GGUF has only a name. The table below says which cutting each name stands for: the published expressions of the
models' own tokenizer.json files (see llama.cpp's vocabulary loader for the list of names).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_log = logging.getLogger(__name__)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_SEED_CODER = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging.

    patterns: applied one after another, each to the pieces of the one before; matches and gaps both become pieces.
    nfc: text is normalised to composed characters first.
    ignore_merges: a piece that is a token as a whole is taken without looking at the merges.
    adds_bos: the model wants a begin-of-text token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_PLAIN_LLAMA3 = PreTokenizer((_LLAMA3,))
_PLAIN_QWEN2 = PreTokenizer((_QWEN2,))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))


def _table(*rows: tuple[str, PreTokenizer]) -> dict[str, PreTokenizer]:
    return {name: pre for names, pre in rows for name in names.split()}


PRE_TOKENIZERS = _table(
    ("default", _DEFAULT),
    ("smollm starcoder refact codeshell exaone minerva-7b", _DIGITS_THEN_GPT2),
    ("command-r", PreTokenizer((r"\p{N}", _GPT2), nfc=True)),
    ("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat exaone4 a.x-4.0 mellum", PreTokenizer((_GPT2,))),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3_BPE),
    ("dbrx smaug-bpe glm4 chatglm-bpe", _PLAIN_LLAMA3),
    ("qwen2", PreTokenizer((_QWEN2,), nfc=True)),
    ("deepseek-r1-qwen stablelm2 megrez kormo hunyuan grok-2", _PLAIN_QWEN2),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True)),
    ("gpt-4o llama4 minimax-m2", PreTokenizer((_GPT4O,))),
    ("deepseek-v3 hunyuan-dense", PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
)


def pre_tokenizer_named(name: str | None, notes: list[str]) -> PreTokenizer:
    """The pre-tokenizer called ``name``; for an unknown or missing name the default one, with a note that says so."""
    if name is not None and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    said = "names no pre-tokenizer" if name is None else f"names the pre-tokenizer {name!r}, which is not known here"
    notes.append(
        f"The model file {said}; the general one is used, so some words may be cut differently than in training."
    )
    _log.warning("%s", notes[-1])
    return _DEFAULT


def known_names() -> Sequence[str]:
    return sorted(PRE_TOKENIZERS)
