"""``ridgeline doctor``: what this machine has and lacks, in one page. Loads no torch and no Qt."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from app import screen
from app.commands import Subparsers
from app.library import catalog
from app.library.starter import find_starter, models_folder
from app.paths import find_paths
from engine.ops.cpu import native

_PACKAGES = ("torch", "transformers", "tokenizers", "gguf", "safetensors", "PySide6-Essentials", "pyqtgraph")
# What the fast paths ask for, by Linux's names.
_CPU_FEATURES = (
    "avx2",
    "f16c",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
)
_LOW_SPACE_BYTES = 1 << 30


def add_to(commands: Subparsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("doctor", help="what this machine has and what is missing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when something must be fixed before Ridgeline can run."""
    report = examine()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(as_text(report))
    return 1 if report["problems"] else 0


def examine() -> dict[str, object]:
    """Everything the report says. ``problems`` stop Ridgeline; ``notes`` do not. Each names its remedy."""
    problems: list[str] = []
    notes: list[str] = []
    report: dict[str, object] = {
        "ridgeline": _package_version("ridgeline"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _package_version(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "kernels": _kernels(notes),
        "machine": _machine(notes),
        "models": _models(notes),
        "screen": _screen(problems, notes),
        "free_bytes": _free_space(problems, notes),
        "data_folder": str(find_paths().data),
        "log": str(find_paths().log_file),
    }
    absent = [name for name in _PACKAGES if _package_version(name) is None]
    if absent:
        problems.append(f"Python packages are missing: {', '.join(absent)}. Install them with: pip install ridgeline")
    report["problems"] = problems
    report["notes"] = notes
    return report


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, object]:
    flags: set[str] = set()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        facts = dict(line.split(":", 1) for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if ":" in line)
        by_key = {key.strip(): value.strip() for key, value in facts.items()}
        name = by_key.get("model name", name)
        flags = set(by_key.get("flags", by_key.get("Features", "")).split())
    usable: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return {
        "name": name,
        "cores": os.cpu_count(),
        "usable_threads": len(usable(0)) if usable else os.cpu_count(),
        "features": [feature for feature in _CPU_FEATURES if feature in flags],
    }


def _kernels(notes: list[str]) -> str:
    """What int4 and int8 products run on."""
    reason = native.reason_unavailable()
    if reason is None:
        return f"C kernels, {native.isa()}"
    notes.append(f"The C kernels do not run: {reason}")
    return "torch's packed operations"


def _machine(notes: list[str]) -> dict[str, object]:
    """The figures measured when a model was first loaded, with their date; empty before that."""
    file = find_paths().machine_file
    if not file.is_file():
        notes.append("This machine has not been measured yet; the first model that is loaded does it.")
        return {}
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{file} cannot be read ({error}). Delete it; the next model that is loaded measures again.")
        return {}
    return {key: value for key, value in figures.items() if key != "version"} if isinstance(figures, dict) else {}


def _models(notes: list[str]) -> dict[str, object]:
    found = catalog.models()
    notes.extend(f"{model.path}: {model.problem}" for model in found if model.problem)
    if find_starter() is None:
        notes.append("The starter model is not here yet. Fetch it with: ridgeline models get starter")
    return {
        "folder": str(models_folder()),
        "starter": str(find_starter() or ""),
        "count": len(found),
        "bytes": sum(model.num_bytes for model in found),
    }


def _screen(problems: list[str], notes: list[str]) -> dict[str, object]:
    where = screen.platform()
    missing = screen.missing_libraries(where)
    if missing:
        line = screen.install_line([library.package for library in missing])
        files = ", ".join(library.file for library in missing)
        (problems if where else notes).append(f"A window needs {files}. Install what is missing: {line}")
    fonts = screen.missing_fonts()
    if fonts:
        notes.append(f"This system has no fonts. Install some: {screen.install_line(list(fonts))}")
    if where is None:
        notes.append("There is no display here: ridgeline starts the terminal chat instead of the window.")
    return {"platform": where, "missing": {library.file: library.package for library in missing}}


def _free_space(problems: list[str], notes: list[str]) -> int:
    folder = models_folder()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < _LOW_SPACE_BYTES:
        notes.append(f"Only {free / 1e6:.0f} MB are free in {folder}. Free some space before fetching models.")
    if not os.access(folder, os.W_OK):
        problems.append(f"{folder} cannot be written to. Choose another folder with --data-dir.")
    return free


def as_text(report: dict[str, object]) -> str:
    lines = []
    for key, value in report.items():
        if key in ("problems", "notes"):
            continue
        if isinstance(value, dict):
            lines.append(key.replace("_", " "))
            lines += [f"    {inner.replace('_', ' '):<22} {_shown(inner, fact)}" for inner, fact in value.items()]
        else:
            lines.append(f"{key.replace('_', ' '):<26} {_shown(key, value)}")
    for title in ("problems", "notes"):
        entries = report[title]
        assert isinstance(entries, list)
        lines += ["", *(f"{title[:-1].capitalize()}: {entry}" for entry in entries)] if entries else []
    return "\n".join(lines)


def _shown(key: str, value: object) -> str:
    """A fact with its unit, which its key names."""
    if isinstance(value, int | float) and key.endswith("bytes_per_second"):
        return f"{value / 1e9:.1f} GB/s"
    if isinstance(value, int) and key.endswith("bytes"):
        return f"{value / 1e9:.1f} GB"
    if isinstance(value, float) and key.endswith("seconds"):
        return f"{value * 1e6:.1f} microseconds"
    if isinstance(value, dict) and key == "flops_per_second":
        return ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{inner} ({fact})" for inner, fact in value.items()) or "none"
    return "none" if value in (None, "") else str(value)
