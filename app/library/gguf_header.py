"""The few facts a list of models shows, read from the head of a GGUF file in milliseconds. No torch, no whole-file read.

Layout: "GGUF", version, tensor count, key count, then key, type and value one after another
(the GGUF specification of ggml, versions 2 and 3, little-endian).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"GGUF"
_MAX_STRING_BYTES = 1 << 20
_MAX_KEYS = 100_000
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
# general.file_type: the type of most tensors.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """``file_type`` is a name such as "Q4_1", empty when the file does not say; ``context_length`` in tokens."""

    name: str
    architecture: str
    file_type: str
    context_length: int | None


def read_header(path: Path) -> GgufHeader:
    """The facts of ``path``; ValueError in plain words when it is not a whole GGUF head."""
    with path.open("rb") as stream:
        if stream.read(4) != _MAGIC:
            raise ValueError(f"{path.name} is not a GGUF file.")
        try:
            return _header(stream)
        except struct.error:
            raise ValueError(f"{path.name} ends in the middle of its header; it is cut off. Fetch it again.") from None


def _header(stream: BinaryIO) -> GgufHeader:
    version, _, num_keys = struct.unpack("<IQQ", stream.read(20))
    if version not in (2, 3) or num_keys > _MAX_KEYS:
        raise ValueError(f"This GGUF file has version {version} and {num_keys} keys; versions 2 and 3 are known.")
    found: dict[str, object] = {}
    for _ in range(num_keys):
        key = _string(stream)
        if key.startswith("tokenizer."):
            break  # general and architecture keys come first; vocabularies are long
        found[key] = _value(stream, _number(stream, "<I"))
    architecture = str(found.get("general.architecture", ""))
    context = found.get(f"{architecture}.context_length")
    file_type = found.get("general.file_type")
    return GgufHeader(
        name=str(found.get("general.name", "")),
        architecture=architecture,
        file_type=_FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else "",
        context_length=context if isinstance(context, int) else None,
    )


def _value(stream: BinaryIO, kind: int) -> object:
    if kind == _STRING:
        return _string(stream)
    if kind == _ARRAY:
        item_kind, count = struct.unpack("<IQ", stream.read(12))
        _skip_items(stream, item_kind, count)
        return None
    if kind not in _SCALARS:
        raise ValueError(f"The GGUF header has a value of unknown type {kind}; the file is damaged.")
    return _number(stream, _SCALARS[kind])


def _skip_items(stream: BinaryIO, kind: int, count: int) -> None:
    if kind in _SCALARS:
        stream.seek(count * struct.calcsize(_SCALARS[kind]), 1)
        return
    for _ in range(count):
        _value(stream, kind)


def _number(stream: BinaryIO, form: str) -> int:
    value = struct.unpack(form, stream.read(struct.calcsize(form)))[0]
    return value  # type: ignore[no-any-return]


def _string(stream: BinaryIO) -> str:
    length = _number(stream, "<Q")
    if length > _MAX_STRING_BYTES:
        raise ValueError(f"The GGUF header has a text of {length} bytes; the file is damaged.")
    data = stream.read(length)
    if len(data) < length:
        raise struct.error("short read")
    return data.decode("utf-8", errors="replace")
