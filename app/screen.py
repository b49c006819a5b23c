"""Is there a screen, and are the system libraries that Qt needs for it here? Standard library only: set-up runs it first.

``python -m app.screen run|test`` prints the missing packages, one line, empty when nothing is missing.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

_FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")
_FONT_PACKAGES = ("fonts-inter", "fonts-dejavu-core")


@dataclass(frozen=True, slots=True)
class Missing:
    """A shared library that is not here and the Debian package that brings it."""

    file: str
    package: str


def platform(environment: Mapping[str, str] | None = None) -> str | None:
    """The Qt platform a window would use: "windows", "cocoa", "xcb", "wayland", "offscreen" ...; None without a screen."""
    given = os.environ if environment is None else environment
    asked = given.get("QT_QPA_PLATFORM", "").partition(":")[0].partition(";")[0]
    if asked:
        return asked
    if sys.platform == "win32":
        return "windows"
    if sys.platform == "darwin":
        return "cocoa"
    if given.get("WAYLAND_DISPLAY"):
        return "wayland"
    return "xcb" if given.get("DISPLAY") else None


def missing_libraries(screen: str | None) -> list[Missing]:
    """Libraries that a window on ``screen`` needs and this Linux lacks, in table order; nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return []
    needs = {"window", screen or "window"}
    return [
        Missing(row["file"], row["package"])
        for row in _table()
        if row["needed_for"] in needs and not _is_loadable(row["file"])
    ]


def missing_fonts() -> tuple[str, ...]:
    """Debian packages to install when this Linux has no font at all."""
    if not sys.platform.startswith("linux"):
        return ()
    for folder in _FONT_FOLDERS:
        if any(path.suffix.lower() in (".ttf", ".otf", ".ttc") for path in Path(folder).expanduser().rglob("*.*")):
            return ()
    return _FONT_PACKAGES


def install_line(packages: list[str]) -> str:
    """One line a person can copy."""
    as_root = "" if os.name == "posix" and os.geteuid() == 0 else "sudo "
    return f"{as_root}apt-get install -y {' '.join(packages)}"


def _table() -> list[dict[str, str]]:
    text = resources.files("resources").joinpath("linux_libraries.toml").read_text(encoding="utf-8")
    rows: list[dict[str, str]] = tomllib.loads(text)["library"]
    return rows


def _is_loadable(file: str) -> bool:
    try:
        ctypes.CDLL(file)
    except OSError:
        return False
    return True


def main(mode: str = "run") -> int:
    """Print what is missing for a window here; with "test", for tests that draw without a screen."""
    where = platform() or ("offscreen" if mode == "test" else None)
    if where:
        packages = [missing.package for missing in missing_libraries(where)]
        print(*dict.fromkeys([*packages, *missing_fonts()]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
