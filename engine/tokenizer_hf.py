"""Tokenizers from a model folder: tokenizer.json, tokenizer_config.json and the chat template files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.tokenizer import Style, TokenizerParts, looks_like_control, new_nonce, private_name

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_folder(folder: Path) -> TokenizerParts:
    """Read a folder's tokenizer. Raises ValueError in plain words when a file is missing or broken."""
    path = _tokenizer_file(folder)
    spec, config = _read_json(path), _read_config(folder)
    named = {key: text for key in _NAMED if (text := _text_of(config.get(key))) is not None}
    control = _control(spec, set(named.values()))
    nonce = new_nonce()
    private = {token_id: private_name(nonce, token_id) for token_id in control.values()}
    tokens = _tokens(spec)
    added = frozenset(entry["id"] for entry in spec.get("added_tokens") or ())
    _rename(spec, {spelling: private[token_id] for spelling, token_id in control.items()})
    tokenizer = _build(spec, path)
    bos = control.get(named.get("bos_token", ""), None)
    eos = control.get(named.get("eos_token", ""), None)
    first = tokenizer.encode("", add_special_tokens=True).ids[:1]
    adds_bos = config.get("add_bos_token")
    if adds_bos is None:
        adds_bos = bos is not None and first == [bos]
    return TokenizerParts(
        tokenizer=tokenizer,
        tokens=tokens,
        control=control,
        private=private,
        style=_style(spec),
        verbatim=added - frozenset(private),
        strip_space=_strips_space(spec),
        bos_token_id=bos,
        adds_bos=bool(adds_bos) and bos is not None,
        adds_bos_to_template=False,  # as transformers does: the template alone decides
        eos_token_ids=frozenset() if eos is None else frozenset({eos}),
        named=named,
        chat_template=_chat_template(folder, config),
    )


def spellings_from_folder(folder: Path) -> list[str | None]:
    """id -> spelling, None where an id is unused, without building the tokenizer. Raises ValueError as for the whole."""
    return _tokens(_read_json(_tokenizer_file(folder)))


def _tokenizer_file(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder.name} has no tokenizer.json; download the complete model folder.")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} cannot be read ({error}); download the model folder again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not what a model folder holds under this name; download it again.")
    return value


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return _read_json(path) if path.is_file() else {}


def _text_of(entry: Any) -> str | None:
    """A token in tokenizer_config.json: a string, or an object with its content."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over the config; of several templates the one called "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default") or next(iter(by_name.values()), None)
    return template if isinstance(template, str) else None


def _vocab(spec: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(spelling, id) of the model's own vocabulary; Unigram's is a list of (spelling, score)."""
    vocab = spec.get("model", {}).get("vocab") or {}
    if isinstance(vocab, list):
        yield from ((entry[0], token_id) for token_id, entry in enumerate(vocab))
    else:
        yield from vocab.items()


def _tokens(spec: Mapping[str, Any]) -> list[str | None]:
    by_id = {token_id: spelling for spelling, token_id in _vocab(spec)}
    by_id |= {entry["id"]: entry["content"] for entry in spec.get("added_tokens") or ()}
    tokens: list[str | None] = [None] * (max(by_id, default=-1) + 1)
    for token_id, spelling in by_id.items():
        tokens[token_id] = spelling
    return tokens


def _control(spec: Mapping[str, Any], named: set[str]) -> dict[str, int]:
    """Added tokens that are special, or named in the config, or spelled like one."""
    return {
        entry["content"]: entry["id"]
        for entry in spec.get("added_tokens") or ()
        if entry["content"]
        and (entry.get("special") or entry["content"] in named or looks_like_control(entry["content"]))
    }


def _rename(spec: dict[str, Any], names: Mapping[str, str]) -> None:
    """Let the tokenizer know control tokens by their private names only; ``spec`` is changed in place."""
    for entry in spec.get("added_tokens") or ():
        if entry["content"] in names:
            entry["content"] = names[entry["content"]]
            entry["special"] = True
    model = spec.get("model") or {}
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        model["vocab"] = [[names.get(entry[0], entry[0]), *entry[1:]] for entry in vocab]
    elif isinstance(vocab, dict):
        model["vocab"] = {names.get(spelling, spelling): token_id for spelling, token_id in vocab.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        # A merge that yields a control token would let typed text become one.
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
    spec["truncation"] = spec["padding"] = None  # leftovers of training; a prompt is never cut in silence


def _touches(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _build(spec: Mapping[str, Any], path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises bare Exception for every kind of fault
        raise ValueError(f"{path.name} is not a tokenizer that can be used ({error}).") from error


def _steps(part: Mapping[str, Any] | None, children: str) -> list[Mapping[str, Any]]:
    """A decoder or pre-tokenizer as a flat list; sequences are opened."""
    if not part:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for child in part.get(children) or () for step in _steps(child, children)]


def _style(spec: Mapping[str, Any]) -> Style:
    """How spellings become bytes, from the decoder or, without one, from the pre-tokenizer. Raises ValueError."""
    steps = _steps(spec.get("decoder"), "decoders") or _steps(spec.get("pre_tokenizer"), "pretokenizers")
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"}:
        return "sentencepiece"
    if spec.get("decoder") is None:
        return "words"
    raise ValueError(
        f"This model's tokenizer decodes with {', '.join(sorted(map(str, kinds)))}, which is not supported."
    )


def _strips_space(spec: Mapping[str, Any]) -> bool:
    steps = _steps(spec.get("decoder"), "decoders")
    for step in steps or _steps(spec.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return step.get("add_prefix_space", True) is not False
        if step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0:
            return True
    return _style(spec) == "words"
