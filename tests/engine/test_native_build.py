"""The C library as a build: up to date or refused, clean under sanitizers, and also a Windows DLL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.ops.cpu import native
from engine.ops.cpu.native import build

COMPILER = build.find_compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here")
MINGW = shutil.which("x86_64-w64-mingw32-gcc")

# Odd shapes through every entry point of the products, on heap buffers of exactly the right size. No torch: it is not built for this.
_EXERCISE = """
import ctypes, random, sys
library = ctypes.CDLL(sys.argv[1])
for name in ("rl_linear", "rl_pack", "rl_rows", "rl_packed_bytes", "rl_set_isa", "rl_set_threads", "rl_isa", "rl_dequantize"):
    getattr(library, name).restype = ctypes.c_int64
i64, random = ctypes.c_int64, random.Random(0)
floats = lambda count: (ctypes.c_float * count)(*(random.uniform(-1, 1) for _ in range(count)))
ran = 0
for isa in (1, 2, 3):
    if library.rl_set_isa(i64(isa)) < 0:
        continue
    for threads in (1, 3):
        library.rl_set_threads(i64(threads))
        for product in (1, 4, 8, 4 | 64, 8 | 64):
            kind = product & 63
            for out, size, rows in ((1, 1, 1), (17, 33, 5), (40, 96, 13), (16, 64, 70)):
                packed = (ctypes.c_uint8 * library.rl_packed_bytes(i64(kind), i64(out), i64(size)))()
                assert library.rl_pack(i64(kind), floats(out * size), i64(out), i64(size), i64(1), packed) == 0
                result = floats(rows * out)
                x, bias = floats(rows * size), floats(out)
                assert library.rl_linear(i64(product), packed, i64(out), i64(size), x, i64(rows), bias, result, result) == 0
                ids = (i64 * 2)(out - 1, 0)
                assert library.rl_rows(i64(kind), packed, i64(size), ids, i64(2), floats(2 * size)) == 0
                ran += 1
for kind, size, weights in ((2, 18, 32), (3, 20, 32), (8, 34, 32), (12, 144, 256), (13, 176, 256), (14, 210, 256)):
    blocks = (ctypes.c_uint8 * (3 * size))(*(random.randrange(256) for _ in range(3 * size)))
    assert library.rl_dequantize(i64(kind), blocks, i64(3), floats(3 * weights)) == 0
    ran += 1
library.rl_set_threads(i64(1))
print(ran)
"""


@needs_compiler
def test_the_build_is_remembered_and_forgotten_when_a_source_changes(tmp_path: Path) -> None:
    for source in build.FOLDER.iterdir():
        if source.suffix in (".c", ".h", ".py"):
            shutil.copy(source, tmp_path)
    command = [sys.executable, str(tmp_path / "build.py"), "--if-stale"]

    def said() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    assert "Built" in said()
    assert "up to date" in said()
    with (tmp_path / "rl.h").open("a") as header:
        header.write("#error not today\n")
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "not today" in refused.stderr
    assert "torch" in refused.stderr


def test_no_compiler_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert "no C compiler" in build.build_in_place()


@needs_compiler
def test_a_library_of_other_sources_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIDGELINE_NATIVE", raising=False)
    stale = tmp_path / build.library_name()
    shutil.copy(build.FOLDER / build.library_name(), stale)
    monkeypatch.setattr(build, "sources_digest", lambda: "other")
    with pytest.raises(native._Unavailable, match=r"built from other sources.*native\.build"):
        native._load(stale)
    with pytest.raises(native._Unavailable, match="is not there"):
        native._load(tmp_path / "absent.so")
    broken = tmp_path / "broken.so"  # not over the other one, which is mapped now
    broken.write_bytes(b"not a library")
    with pytest.raises(native._Unavailable, match="cannot be loaded"):
        native._load(broken)


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="preloads the sanitizers' runtime")
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    assert COMPILER is not None
    library = tmp_path / build.library_name()
    build.build(library, COMPILER, ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"])
    runtime = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-c", _EXERCISE, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) >= 22


@pytest.mark.slow
@pytest.mark.skipif(MINGW is None, reason="there is no mingw compiler here")
def test_the_same_sources_make_a_windows_library(tmp_path: Path) -> None:
    assert MINGW is not None
    library = tmp_path / build.library_name(windows=True)
    build.build(library, MINGW)
    assert library.read_bytes()[:2] == b"MZ"
