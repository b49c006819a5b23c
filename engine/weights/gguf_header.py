"""Reading the header of a GGUF file: metadata and the table of tensors, nothing of the weights. Imports no torch.

Layout (the GGUF specification of the ggml project, versions 2 and 3): magic "GGUF", version u32, tensor count u64,
key/value count u64, the key/value pairs, the tensor infos, padding up to ``general.alignment``, the data. Strings
are a u64 length and UTF-8. gguf's own reader builds numpy views for each string of the vocabulary and takes seconds;
this one takes a tenth of a second and can say what is wrong with a file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
MAX_STRING_BYTES = 1 << 26  # chat templates are thousands of bytes; more than 64 MiB is damage
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the table.

    shape: outermost dimension first ([out, in] for a matrix). offset: bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: key -> int, float, bool, str or list of them. tensors: name -> where its data lie."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at ``path``; ValueError in plain words when it is not a sound one."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        _check_magic(path, file.read(64), num_bytes)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path.name, data, num_bytes).header()


def _check_magic(path: Path, start: bytes, num_bytes: int) -> None:
    if num_bytes == 0:
        raise ValueError(f"{path.name} is empty (0 bytes). The download did not finish; download it again.")
    if start[:4] == MAGIC and num_bytes >= 24:
        return
    if start[:4] == MAGIC:
        raise ValueError(f"{path.name} ends after {num_bytes} bytes. The download did not finish; download it again.")
    head = start.lstrip().lower()
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise ValueError(
            f"{path.name} is a web page, not a model: the server answered with HTML, often a login or error page. "
            "Open the download link in a browser, or download the model again."
        )
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path.name} is a Git LFS pointer, not the model itself. Run git lfs pull, or download it.")
    if start[:2] == b"PK" or start[:1] == b"\x80":
        raise ValueError(
            f"{path.name} looks like a pickle file. Such files can run any code when opened, so Ridgeline never reads "
            "them. Get the model as safetensors or GGUF instead."
        )
    raise ValueError(
        f"{path.name} is not a GGUF file: it starts with {start[:4]!r} instead of {MAGIC!r}. "
        "Choose a .gguf file or a folder of safetensors."
    )


class _Parser:
    """A cursor over the header; every length is checked against the file's size before it is used."""

    def __init__(self, name: str, data: mmap.mmap, num_bytes: int) -> None:
        self.name = name
        self.data = data
        self.num_bytes = num_bytes
        self.at = 4

    def header(self) -> GgufHeader:
        (version,) = self._unpack("I")
        if version not in (2, 3):
            self._refuse_version(version)
        num_tensors, num_pairs = self._unpack("QQ")
        # A pair takes at least 13 bytes and a tensor info at least 24, so an absurd count cannot fit the file.
        if num_pairs * 13 > self.num_bytes or num_tensors * 24 > self.num_bytes:
            self._damaged(f"its header counts {num_tensors} tensors and {num_pairs} keys, more than fit the file")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("a key")
            (kind,) = self._unpack("I")
            metadata[key] = self._value(key, kind)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            self._damaged(f"general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        return GgufHeader(metadata, {info[0]: self._placed(info, start) for info in infos})

    def _refuse_version(self, version: int) -> NoReturn:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
            raise ValueError(f"{self.name} is a big-endian GGUF file. Get the little-endian one.")
        raise ValueError(
            f"{self.name} is GGUF version {version}; versions 2 and 3 can be read. "
            "Get a newer conversion of the model, or update Ridgeline."
        )

    def _damaged(self, what: str) -> NoReturn:
        raise ValueError(f"{self.name} is damaged: {what}. Download it again.")

    def _need(self, num_bytes: int, what: str) -> None:
        if self.at + num_bytes > self.num_bytes:
            raise ValueError(
                f"{self.name} is truncated or damaged: {what} would end at byte {self.at + num_bytes}, "
                f"but the file has {self.num_bytes}. Download it again."
            )

    def _unpack(self, format_: str) -> tuple[Any, ...]:
        size = struct.calcsize("<" + format_)
        self._need(size, "its header")
        values = struct.unpack_from("<" + format_, self.data, self.at)
        self.at += size
        return values

    def _string(self, what: str) -> str:
        (length,) = self._unpack("Q")
        if length > MAX_STRING_BYTES:
            self._damaged(f"{what} claims to be {length} bytes long")
        self._need(length, what)
        text = self.data[self.at : self.at + length]
        self.at += length
        return text.decode("utf-8", errors="replace")

    def _value(self, key: str, kind: int) -> Any:
        if kind == _FLOAT32:  # as the decimal that was meant: 1e-06, not 9.999999974752427e-07
            return float(str(np.float32(self._unpack("f")[0])))
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string(f"the value of {key}")
        if kind != _ARRAY:
            self._damaged(f"key {key} has the unknown type {kind}")
        item_kind, count = self._unpack("IQ")
        if item_kind in _SCALARS:
            self._need(count * struct.calcsize("<" + _SCALARS[item_kind]), f"the array {key}")
            return list(self._unpack(f"{count}{_SCALARS[item_kind]}"))
        if item_kind != _STRING:
            self._damaged(f"key {key} is an array of the unsupported type {item_kind}")
        self._need(count * 8, f"the array {key}")
        return self._strings(key, count)

    def _strings(self, key: str, count: int) -> list[str]:
        """The hot loop: vocabularies have a quarter of a million entries."""
        data, at, end = self.data, self.at, self.num_bytes
        length_of = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):
            if at + 8 > end:
                self._need(end, f"the array {key}")
            start = at + 8
            at = start + length_of(data, at)[0]
            if at > end:
                self._need(at - self.at, f"the array {key}")
            texts.append(data[start:at].decode("utf-8", errors="replace"))
        self.at = at
        return texts

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        (num_dimensions,) = self._unpack("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self._damaged(f"tensor {name} has {num_dimensions} dimensions")
        extents = self._unpack(f"{num_dimensions}Q")
        ggml_type, offset = self._unpack("IQ")
        return name, tuple(reversed(extents)), ggml_type, offset

    def _placed(self, info: tuple[str, tuple[int, ...], int, int], start: int) -> TensorInfo:
        """``info`` with absolute offset and size, both within the file."""
        from engine.weights.ggml_types import block_of

        name, shape, ggml_type, offset = info
        block = block_of(ggml_type)
        if block is None:
            raise ValueError(
                f"{self.name}: tensor {name} has the unknown type {ggml_type}. The file may be newer than this version "
                "of Ridgeline, or damaged; get another quantization such as Q4_K_M or Q8_0."
            )
        if min(shape) <= 0 or shape[-1] % block.elements:
            self._damaged(f"tensor {name} has the impossible shape {list(shape)} for {block.name}")
        placed = TensorInfo(name, shape, ggml_type, start + offset, 0)
        num_bytes = placed.num_elements // block.elements * block.bytes
        if placed.offset + num_bytes > self.num_bytes:
            raise ValueError(
                f"{self.name} is truncated: tensor {name} would end at byte {placed.offset + num_bytes}, "
                f"but the file has {self.num_bytes}. The download did not finish; download it again."
            )
        return TensorInfo(name, shape, ggml_type, placed.offset, num_bytes)
