"""Where Ridgeline keeps its files: the system's folders, one folder of the user's choice, or a folder beside the program."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs

_APP = "ridgeline"
PORTABLE_MARKER = "portable"
_VARIABLE = "RIDGELINE_DATA_DIR"  # as --data-dir, for scripts and tests
# SQLite's Unix layer takes 512 bytes for a path; its journal names add a few to the longest of ours.
_LONGEST_FOLDER_BYTES = 480
_LONG_ON_WINDOWS = 240


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders, all of them existing once ``create`` was called.

    data: chats and models. config: settings. cache: what can be made again. logs: log files.
    """

    data: Path
    config: Path
    cache: Path
    logs: Path
    is_portable: bool = False

    @property
    def chats_file(self) -> Path:
        return self.data / "chats.db"

    @property
    def settings_file(self) -> Path:
        return self.config / "settings.json"

    @property
    def log_file(self) -> Path:
        return self.logs / "ridgeline.log"

    @property
    def models(self) -> Path:
        return self.data / "models"

    @property
    def machine_file(self) -> Path:
        """The figures measured once on this machine."""
        return self.cache / "machine.json"

    @property
    def best_here_file(self) -> Path:
        """The best setting for this machine, found by a measured search."""
        return self.cache / "best_here.json"

    def create(self) -> Paths:
        """Make the folders; ValueError says which one could not be made and what to do."""
        for folder in (self.data, self.config, self.cache, self.logs, self.models):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror or str(error)
                raise ValueError(
                    f"The folder {folder} cannot be created ({reason}). Choose another one with --data-dir FOLDER."
                ) from error
        return self


def find_paths(data_dir: str | Path | None = None, program: Path | None = None) -> Paths:
    """The folders to use, not yet created.

    data_dir (``--data-dir``, else RIDGELINE_DATA_DIR) puts everything under one folder; else a file named ``portable`` beside the program
    does the same with ``data`` beside it; else the system's own folders. ``program`` is the running executable.
    ValueError when the folder's path is too long to hold a database.
    """
    given = data_dir or os.environ.get(_VARIABLE)
    if given:
        return _under(Path(given).expanduser().absolute(), is_portable=False)
    beside = _portable_folder(program or Path(sys.executable))
    if beside is not None:
        return _under(beside / "data", is_portable=True)
    return _checked(
        Paths(
            data=Path(platformdirs.user_data_dir(_APP, appauthor=False)),
            config=Path(platformdirs.user_config_dir(_APP, appauthor=False)),
            cache=Path(platformdirs.user_cache_dir(_APP, appauthor=False)),
            logs=Path(platformdirs.user_log_dir(_APP, appauthor=False)),
        )
    )


def _under(root: Path, is_portable: bool) -> Paths:
    root = long_path(root)
    return _checked(Paths(root, root / "config", root / "cache", root / "logs", is_portable))


def _portable_folder(program: Path) -> Path | None:
    # An installed tree has its interpreter one folder below the launcher that the user sees.
    for folder in (program.parent, program.parent.parent):
        if (folder / PORTABLE_MARKER).is_file():
            return folder
    return None


def _checked(paths: Paths) -> Paths:
    length = len(os.fsencode(paths.data))
    if os.name != "nt" and length > _LONGEST_FOLDER_BYTES:
        raise ValueError(
            f"The data folder's path is {length} bytes long; the chat database can use at most {_LONGEST_FOLDER_BYTES}. "
            "Choose a shorter one with --data-dir FOLDER."
        )
    return paths


def long_path(path: Path, on_windows: bool = os.name == "nt") -> Path:
    r"""``path``, or the same with Windows' ``\\?\`` prefix where it would pass the 260-character limit."""
    text = str(path)
    if not on_windows or len(text) < _LONG_ON_WINDOWS or text.startswith("\\\\?\\"):
        return path
    if text.startswith("\\\\"):
        return Path("\\\\?\\UNC\\" + text[2:])
    return Path("\\\\?\\" + text)
