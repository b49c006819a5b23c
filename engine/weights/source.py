"""Where weights come from: one interface over GGUF files and safetensors folders.

``open_source`` reads headers only: everything that can be wrong with a file (foreign, truncated, a missing shard,
a wrong shape) is a ValueError in plain words before memory is spent. Weights then stream one canonical tensor at a
time (see ``canonical.py`` for the names), so loading peaks at the final size plus one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engine.model.fields import UnsupportedArchitecture
from engine.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from engine.weights.stored import StoredRows


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the text codec is built from.

    kind "hf": ``folder`` holds tokenizer.json, tokenizer_config.json and so on.
    kind "gguf": ``metadata`` is the file's key/value mapping ("tokenizer.ggml.tokens" a list of str, ...).
    """

    kind: Literal["hf", "gguf"]
    folder: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class WeightSource(Protocol):
    """An opened model: its shape, and its tensors on request.

    stored_format: for people, e.g. "GGUF Q4_1" or "safetensors bfloat16".
    not_stored_packed: why no matrix can be kept as it is stored, a sentence; empty when some can.
    eos_token_ids: every token that ends a text, the union of all places that name one.
    """

    spec: ModelSpec
    stored_format: str
    not_stored_packed: str
    tokenizer_files: TokenizerFiles
    eos_token_ids: frozenset[int]

    def names(self) -> frozenset[str]:
        """Canonical names of the tensors this model has."""
        ...

    def read(self, name: str) -> Tensor:
        """One canonical tensor; nothing of it is kept here afterwards.

        GGUF gives fp32; safetensors gives the stored float dtype, norms in fp32.
        ValueError when its weights are not finite numbers or the file ends early.
        """
        ...

    def read_stored(self, name: str, types: frozenset[int]) -> tuple[StoredRows, ...] | None:
        """The blocks of one canonical matrix as the file stores them, rows in the order of ``read``.

        None when some of it is of another ggml type than ``types``. ValueError when the file ends early.
        """
        ...

    def stores_numbers(self, name: str) -> bool:
        """Whether a matrix is stored as plain fp32, fp16 or bf16."""
        ...


__all__ = ["TokenizerFiles", "UnsupportedArchitecture", "WeightSource", "open_source"]

_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})


def open_source(path: Path) -> WeightSource:
    """Open a GGUF file or a folder of safetensors; ValueError says what is wrong, where, and what to do.

    UnsupportedArchitecture (a ValueError) means that the files are sound but of a kind the decoder lacks.
    """
    try:
        return _open(Path(path).expanduser())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror or error}. Check its permissions and the disk, or move it."
        ) from error


def _open(path: Path) -> WeightSource:
    from engine.weights.gguf import GgufSource
    from engine.weights.safetensors import SafetensorsSource

    if not path.exists():
        raise ValueError(f"There is no file or folder at {path}. Check the path, or choose another model.")
    if path.is_dir():
        return SafetensorsSource(_folder_of_weights(path))
    if path.suffix.lower() in _PICKLES:
        raise ValueError(
            f"{path.name} is a pickle file. Such files can run any code when opened, so Ridgeline never reads them. "
            "Get the model as safetensors or GGUF instead."
        )
    if path.suffix.lower() == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        return SafetensorsSource(path.parent)
    return GgufSource(path)


def _folder_of_weights(folder: Path) -> Path:
    """``folder`` if it looks like a model; ValueError tells what is missing or what else lies there."""
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        return folder
    ggufs = sorted(file.name for file in folder.glob("*.gguf"))
    if ggufs:
        raise ValueError(f"The folder {folder} holds GGUF files. Choose one of them: {', '.join(ggufs[:8])}.")
    if any(file.suffix.lower() in _PICKLES for file in folder.iterdir()):
        raise ValueError(
            f"The folder {folder} holds its weights as pickle files only. Such files can run any code when opened, "
            "so Ridgeline never reads them. Get the model as safetensors or GGUF instead."
        )
    raise ValueError(f"The folder {folder} holds no model: there is no .safetensors file in it. Download it again.")
