"""Reading the header of safetensors files and finding the shards of a folder. Imports no torch.

A file is a u64 length, that many bytes of JSON (name -> dtype, shape, data_offsets) and the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 1 << 25  # the largest shards have headers of a few megabytes
MAX_SHARDS = 10_000
FLOAT_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_OTHER_BYTES: Mapping[str, int] = {
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: the file it is in, its dtype by the format's name, shape, and where its bytes lie in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError in plain words when the file holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not readable as JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object. Download it again.")
    return value


def shards_of(folder: Path) -> list[Path]:
    """The weight files of a folder: those its index names, else model.safetensors, else all there are."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    preferred = folder / "model.safetensors.index.json"
    index = preferred if preferred in indexes else indexes[0] if indexes else None
    if index is None:
        single = folder / "model.safetensors"
        return [single] if single.exists() else _numbered(sorted(folder.glob("*.safetensors")))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index.name} has no weight_map. Download it again.")
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise ValueError(f"{index.name} names a file outside of its folder. Do not trust this model; get another.")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise _missing(folder, missing, len(names))
    return [folder / name for name in names]


def _numbered(files: list[Path]) -> list[Path]:
    """``files``, or ValueError if their names ("model-00001-of-00003") tell that some are missing."""
    for file in files:
        match = re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)", file.name)
        if match is None or int(match[4]) > MAX_SHARDS:
            continue
        digits = len(match[2])
        wanted = [f"{match[1]}{i:0{digits}d}{match[3]}{match[4]}{match[5]}" for i in range(1, int(match[4]) + 1)]
        missing = sorted(set(wanted) - {other.name for other in files})
        if missing:
            raise _missing(file.parent, missing, len(wanted))
    return files


def _missing(folder: Path, missing: list[str], num_wanted: int) -> ValueError:
    return ValueError(
        f"{len(missing)} of {num_wanted} weight files are missing in {folder}: {', '.join(missing[:4])}. "
        "Download them into the same folder."
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of one safetensors file; ValueError in plain words when it is not a sound one."""
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise ValueError(f"{path.name} is empty (0 bytes). The download did not finish; download it again.")
    with path.open("rb") as file:
        start = file.read(64)
        length = int.from_bytes(start[:8], "little")
        _check_start(path, start, length, num_bytes)
        file.seek(8)
        text = file.read(length)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged: its header is not readable ({error}). Download it again.") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path.name} is damaged: its header is no table of tensors. Download it again.")
    entries.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, 8 + length, num_bytes) for name, entry in entries.items()}


def _check_start(path: Path, start: bytes, length: int, num_bytes: int) -> None:
    head = start.lstrip().lower()
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise ValueError(
            f"{path.name} is a web page, not a model: the server answered with HTML, often a login or error page. "
            "Open the download link in a browser, or download the model again."
        )
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path.name} is a Git LFS pointer, not the weights. Run git lfs pull, or download the file.")
    if start[8:9] != b"{" or length < 2 or length > MAX_HEADER_BYTES:
        raise ValueError(f"{path.name} is not a safetensors file: it does not start with a header. Download it again.")
    if 8 + length > num_bytes:
        raise ValueError(
            f"{path.name} is truncated: its header alone should be {length} bytes, but the file has {num_bytes}. "
            "Download it again."
        )


def _tensor(path: Path, name: str, entry: Any, data_start: int, num_bytes: int) -> StoredTensor:
    """One checked entry of the header."""
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path.name} is damaged: the entry of tensor {name} is incomplete. Download it again."
        ) from error
    element_bytes = FLOAT_BYTES.get(dtype, _OTHER_BYTES.get(dtype, 0))
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in (*shape, begin, end)):
        raise ValueError(f"{path.name} is damaged: tensor {name} has an impossible shape or place. Download it again.")
    num_elements = 1
    for extent in shape:
        num_elements *= extent
    if element_bytes and num_elements * element_bytes != end - begin:
        raise ValueError(
            f"{path.name} is damaged: tensor {name} of shape {list(shape)} takes {num_elements * element_bytes} bytes, "
            f"but its place has {end - begin}. Download it again."
        )
    if data_start + end > num_bytes:
        raise ValueError(
            f"{path.name} is truncated: tensor {name} would end at byte {data_start + end}, but the file has "
            f"{num_bytes}. The download did not finish; download it again."
        )
    return StoredTensor(path, dtype, shape, data_start + begin, end - begin)
