"""Tokenizers from GGUF metadata (``tokenizer.ggml.*``): byte-level BPE with its merges, or SentencePiece with its scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers

from engine.tokenizer import TokenizerParts, looks_like_control, new_nonce, private_name
from engine.tokenizer_pre import pre_tokenizer_named

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_SPACE = "\u2581"
_NO_TOKENIZER = "This GGUF file holds no tokenizer; get a complete file of the model."


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build a tokenizer from a file's metadata. Raises ValueError when the file holds none, or of an unknown kind."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise ValueError(_NO_TOKENIZER)
    builder = _Builder(metadata, list(tokens))
    if kind == "gpt2":
        return builder.byte_level()
    if kind == "llama":
        return builder.sentencepiece()
    raise ValueError(f"This GGUF file's tokenizer is of the kind {kind!r}; Ridgeline reads 'gpt2' and 'llama'.")


def spellings_from_gguf(metadata: Mapping[str, Any]) -> list[str | None]:
    """id -> spelling, without building the tokenizer. Raises ValueError when the file holds none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(_NO_TOKENIZER)
    return list(tokens)


class _Builder:
    """Collects what both kinds share. tokens, types: one entry per id."""

    def __init__(self, metadata: Mapping[str, Any], tokens: list[str]) -> None:
        self.metadata = metadata
        self.tokens = tokens
        self.types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type") or ()]
        if len(self.types) != len(tokens):
            self.types = [_NORMAL] * len(tokens)
        self.ids = {name: self._id(name) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
        self.notes: list[str] = []
        self.nonce = new_nonce()
        self.control = self._control()
        self.private = {token_id: private_name(self.nonce, token_id) for token_id in self.control.values()}
        # A spelling that occurs twice belongs to its first id, as in a vocabulary written in order.
        self.vocab: dict[str, int] = {}
        for token_id, token in enumerate(tokens):
            self.vocab.setdefault(self.private.get(token_id, token), token_id)

    def byte_level(self) -> TokenizerParts:
        pre = pre_tokenizer_named(self.metadata.get("tokenizer.ggml.pre"), self.notes)
        merges = self._given_merges(self.metadata.get("tokenizer.ggml.merges") or ())
        tokenizer = Tokenizer(models.BPE(vocab=self.vocab, merges=merges, ignore_merges=pre.ignore_merges))
        normalizer = pre.normalizer()
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre.pre_tokenizer()
        return self._parts(tokenizer, "byte_level", strip_space=False, adds_bos=pre.adds_bos)

    def sentencepiece(self) -> TokenizerParts:
        scores = self.metadata.get("tokenizer.ggml.scores")
        if not scores or len(scores) != len(self.tokens):
            raise ValueError("This GGUF file's tokenizer has no scores; get a complete file of the model.")
        merges = merges_from_scores(
            (token, score)
            for token, score, kind, token_id in zip(
                self.tokens, scores, self.types, range(len(self.tokens)), strict=True
            )
            if kind == _NORMAL and token_id not in self.private
        )
        unknown = self.ids["unknown"]
        model = models.BPE(
            vocab=self.vocab,
            merges=merges,
            unk_token=None if unknown is None else self.private.get(unknown, self.tokens[unknown]),
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        spaces = normalizers.Replace(" ", _SPACE)
        prefixed = bool(self.metadata.get("tokenizer.ggml.add_space_prefix", True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
        return self._parts(tokenizer, "sentencepiece", strip_space=prefixed, adds_bos=True)

    def _given_merges(self, lines: Iterable[str]) -> list[tuple[str, str]]:
        """The file's merges, less those whose parts or result are no ordinary token (control tokens are never merged)."""
        pairs = (line.split(" ", 1) for line in lines)
        vocab = self.vocab
        return [
            (pair[0], pair[1])
            for pair in pairs
            if len(pair) == 2 and pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab
        ]

    def _parts(self, tokenizer: Tokenizer, style: Any, strip_space: bool, adds_bos: bool) -> TokenizerParts:
        user_defined = [i for i, kind in enumerate(self.types) if kind == _USER_DEFINED and i not in self.private]
        tokenizer.add_special_tokens([self._added(i, self.private[i]) for i in self.private])
        tokenizer.add_tokens([AddedToken(self.tokens[i], normalized=False) for i in user_defined])
        bos = self.ids["bos"]
        if bos is not None:
            adds_bos = bool(self.metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
        named = {key: self.tokens[i] for name, key in _NAMED.items() if (i := self.ids[name]) is not None}
        ends = (self.ids[name] for name in ("eos", "eot", "eom"))
        return TokenizerParts(
            tokenizer=tokenizer,
            tokens=list(self.tokens),
            control=self.control,
            private=self.private,
            style=style,
            verbatim=frozenset(user_defined),
            strip_space=strip_space,
            bos_token_id=bos,
            adds_bos=adds_bos and bos is not None,
            # llama.cpp, for which these files are made, always begins with it; templates in them often leave it out.
            adds_bos_to_template=True,
            eos_token_ids=frozenset(i for i in ends if i is not None),
            named=named,
            chat_template=self.metadata.get("tokenizer.chat_template"),
            notes=tuple(self.notes),
        )

    def _added(self, token_id: int, name: str) -> AddedToken:
        # Phi-3's control tokens swallow the space behind them; its GGUF files cannot say so.
        keeps_space = self.tokens[token_id] in ("<unk>", "<s>", "<|endoftext|>")
        strips = (
            self.metadata.get("general.architecture") == "phi3" and self.metadata["tokenizer.ggml.model"] == "llama"
        )
        return AddedToken(name, normalized=False, special=True, rstrip=strips and not keeps_space)

    def _id(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return int(value) if value is not None and 0 <= int(value) < len(self.tokens) else None

    def _control(self) -> dict[str, int]:
        known = {i for name in ("bos", "eos", "eot", "eom") if (i := self.ids[name]) is not None}
        found: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            wanted = kind in (_CONTROL, _UNKNOWN) or token_id in known
            if wanted or (kind in (_NORMAL, _USER_DEFINED) and looks_like_control(token)):
                found.setdefault(token, token_id)
        found.pop("", None)
        return found


def merges_from_scores(pieces: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """BPE merges that act like SentencePiece's scores: the classic conversion.

    SentencePiece joins the neighbours whose union has the best score. So every way to split a piece into two pieces is a
    merge, ranked by the piece's score; of equal scores the one with the longer left part comes first.
    """
    scored = sorted(pieces, key=lambda entry: -entry[1])
    known = {piece for piece, _ in scored}
    # One comprehension: Gemma's 262 144 pieces have 1.4 million splits, and this is most of the time to load them.
    return [
        (left, right)
        for piece, _ in scored
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in known and (right := piece[cut:]) in known
    ]
