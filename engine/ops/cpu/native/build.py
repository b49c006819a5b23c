"""Compile the C kernels into one shared library beside this file: ``python -m engine.ops.cpu.native.build``.

Needs gcc or clang ($CC, else cc, gcc or clang) and nothing else; imports nothing of Ridgeline, so that the package's own build can run it
in an empty environment. Cross-compiling (CC=x86_64-w64-mingw32-gcc) gives a Windows DLL.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
# Each file named *_isa.c is compiled once with each of these.
ISA_FLAGS = {"avx2": _AVX2, "avx512": _AVX512, "avx512vnni": (*_AVX512, "-mavx512vnni")}
# Products and sums fuse only where the source says so: the same sums on every instruction set and compiler.
_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden")
# The products unroll themselves; more of it is six times the code and the compiler's time, and no faster.
_FILE_FLAGS = {"linear_isa": ("-O2",)}
_WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-function")


class BuildError(Exception):
    """There is no compiler, or it refused; the message is its own."""


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.c"))


def sources_digest() -> str:
    """Names the state of all C files; the library remembers the one it was built from."""
    digest = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16]


def library_name(windows: bool = sys.platform == "win32") -> str:
    return "_kernels.dll" if windows else "_kernels.so"


def find_compiler() -> str | None:
    """The C compiler to use; None where there is none, or where the kernels could not run anyway (not x86-64)."""
    if "CC" in os.environ:
        return shutil.which(os.environ["CC"].split()[0])
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def build(target: Path, compiler: str, extra: Sequence[str] = ()) -> None:
    """Compile and link all sources to ``target``. extra: more flags for each call. Raises BuildError."""
    windows = "mingw" in Path(compiler).name or sys.platform == "win32"
    digest = f'-DRL_SOURCES="{sources_digest()}"'
    system = () if windows else ("-fPIC", "-pthread")
    with tempfile.TemporaryDirectory() as scratch:
        jobs = []
        for source in sources():
            isas = ISA_FLAGS if source.stem.endswith("_isa") else {"": ()}
            for isa, flags in isas.items():
                item = Path(scratch) / f"{source.stem}{isa}.o"
                named = (f"-DRL_ISA={isa}",) if isa else ()
                own = _FILE_FLAGS.get(source.stem, ())
                jobs.append(
                    (item, [*_FLAGS, *own, *_WARNINGS, *system, *flags, *named, digest, *extra, "-c", str(source)])
                )
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda job: _call([compiler, *job[1], "-o", str(job[0])]), jobs))
        linked = Path(scratch) / target.name
        objects = [str(item) for item, _ in jobs]
        link = ("-static-libgcc",) if windows else ("-pthread", "-lm")
        _call([compiler, "-shared", *objects, "-o", str(linked), *extra, *link])
        # In two steps, so that a process that has the old one loaded keeps it whole.
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copyfile(linked, fresh)
        fresh.replace(target)


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")


def build_in_place(only_if_stale: bool = False) -> str:
    """Build beside the sources; says in a few words what happened. Raises BuildError when the compiler refuses."""
    target, stamp = FOLDER / library_name(), FOLDER / "_kernels.stamp"
    if only_if_stale and target.is_file() and stamp.is_file() and stamp.read_text() == sources_digest():
        return "The C kernels are up to date."
    compiler = find_compiler()
    if compiler is None:
        return "There is no C compiler here: products run on torch's packed operations."
    build(target, compiler)
    stamp.write_text(sources_digest())
    return f"Built {target.name} with {Path(compiler).name}."


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the C kernels.")
    parser.add_argument("--if-stale", action="store_true", help="do nothing when the library is up to date")
    parser.add_argument("--output", type=Path, help="build here instead of beside the sources")
    arguments = parser.parse_args()
    try:
        if arguments.output:
            compiler = find_compiler()
            if compiler is None:
                raise BuildError("There is no C compiler here.")
            build(arguments.output, compiler)
        else:
            print(build_in_place(arguments.if_stale), file=sys.stderr)
    except BuildError as error:
        print(
            f"The C kernels could not be compiled; products run on torch's packed operations.\n{error}", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
