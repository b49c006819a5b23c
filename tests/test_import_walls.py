"""Who may know whom: app/ never sees torch, engine/ never sees Qt, the engine's vocabulary loads without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH_SIDE = {"torch", "transformers", "triton", "bitsandbytes", "safetensors", "gguf"}
QT_SIDE = {"PySide6", "shiboken6", "pyqtgraph"}
VOCABULARY = (
    *("engine", "engine.options", "engine.events", "engine.commands", "engine.params", "engine.context"),
    "engine.model.spec",
)


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield from ((node.lineno, arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _breaches(folder: str, forbidden: set[str]) -> list[str]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder}/ has no Python files; the wall would guard nothing"
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files
        for line, module in _imports(path)
        if str(module).partition(".")[0] in forbidden
    ]


def test_app_never_imports_torch_or_transformers() -> None:
    assert _breaches("app", TORCH_SIDE) == []


def test_engine_never_imports_qt_or_the_app() -> None:
    assert _breaches("engine", {*QT_SIDE, "app"}) == []


def test_the_wall_sees_every_way_to_import(tmp_path: Path) -> None:
    source = tmp_path / "sneaky.py"
    source.write_text(
        "import torch.nn as nn\nfrom torch import Tensor\nimport importlib\n"
        "def late():\n    importlib.import_module('torch')\n    return __import__('torch')\n"
    )
    found = [str(module).partition(".")[0] for _, module in _imports(source)]
    assert found.count("torch") == 4


def _loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    script = f"{code}\nimport sys\nprint('MODULES', *{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(result.stdout.rpartition("MODULES")[2].split())


@pytest.mark.parametrize("module", VOCABULARY)
def test_vocabulary_loads_without_torch_or_qt(module: str) -> None:
    assert not _loaded_after(f"import {module}") & (TORCH_SIDE | QT_SIDE | {"numpy"})


def test_options_command_loads_neither_torch_nor_qt() -> None:
    loaded = _loaded_after("from app.__main__ import main; assert main(['options', '--json']) == 0")
    assert not loaded & (TORCH_SIDE | QT_SIDE | {"numpy"})


def test_doctor_loads_neither_torch_nor_qt_to_name_the_kernels() -> None:
    loaded = _loaded_after("from app.__main__ import main; main(['doctor', '--json'])")
    assert not loaded & (TORCH_SIDE | QT_SIDE)


def test_models_list_loads_neither_torch_nor_qt() -> None:
    loaded = _loaded_after("from app.__main__ import main; assert main(['models', 'list', '--json']) == 0")
    assert not loaded & (TORCH_SIDE | QT_SIDE)


def test_library_use_needs_no_qt() -> None:
    assert not _loaded_after("from engine import SamplingParams, Completion") & QT_SIDE
