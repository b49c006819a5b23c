"""Products, attention and the operations between them under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.ops.cpu.native import build

COMPILER = build.find_compiler()
_FLAGS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.mark.slow
@pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"), reason="needs a Linux compiler's sanitizers"
)
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    assert COMPILER is not None
    library, program = tmp_path / build.library_name(), tmp_path / "exercise"
    build.build(library, COMPILER, _FLAGS)
    source = Path(__file__).with_name("native_exercise.c")
    command = [COMPILER, *_FLAGS, "-Wall", "-Wextra", "-Werror", f"-I{build.FOLDER}", str(source), str(library), "-lm"]
    subprocess.run([*command, f"-Wl,-rpath,{tmp_path}", "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 200
