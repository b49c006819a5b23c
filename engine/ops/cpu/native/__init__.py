"""The C kernels: one shared library, loaded with ctypes, whose calls release the GIL.

``reason_unavailable()`` says why they cannot run here (None when they can); everything else needs them. $RIDGELINE_NATIVE=off keeps them
out, $RIDGELINE_CPU=avx2|avx512|avx512vnni chooses the instruction set. Imports no torch.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

ABI_VERSION = 3  # RL_ABI_VERSION of rl.h
ISAS = ("", "avx2", "avx512", "avx512vnni")  # by the numbers of enum rl_isa_id
_REBUILD = "Build them with: python -m engine.ops.cpu.native.build"


class _Unavailable(Exception):  # noqa: N818  (not an error: a machine without them works too)
    pass


@cache
def _loaded() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    from engine.ops.cpu.native.build import FOLDER, library_name  # late: that module also runs as a program

    try:
        return _load(FOLDER / library_name())
    except _Unavailable as reason:
        return str(reason)


def _load(path: Path) -> ctypes.CDLL:
    from engine.ops.cpu.native.build import sources, sources_digest

    if os.environ.get("RIDGELINE_NATIVE", "").lower() in ("off", "0"):
        raise _Unavailable("RIDGELINE_NATIVE is off")
    if not path.is_file():
        raise _Unavailable(f"{path.name} is not there. {_REBUILD}")
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.rl_abi_version())
    except (OSError, AttributeError) as error:
        raise _Unavailable(f"{path.name} cannot be loaded ({error}). {_REBUILD}") from error
    if version != ABI_VERSION:
        raise _Unavailable(f"{path.name} is of version {version}, not {ABI_VERSION}. {_REBUILD}")
    library.rl_sources.restype = ctypes.c_char_p
    if sources() and library.rl_sources().decode() != sources_digest():
        raise _Unavailable(f"{path.name} was built from other sources. {_REBUILD}")
    for name in ("rl_isa", "rl_set_isa", "rl_set_threads"):
        getattr(library, name).restype = ctypes.c_int64
    library.rl_set_isa.argtypes = library.rl_set_threads.argtypes = [ctypes.c_int64]
    if library.rl_isa() == 0:
        raise _Unavailable("this CPU lacks AVX2")
    forced = os.environ.get("RIDGELINE_CPU", "").lower()
    if forced and (forced not in ISAS or library.rl_set_isa(ISAS.index(forced)) < 0):
        raise _Unavailable(
            f"RIDGELINE_CPU asks for {forced}, which this CPU lacks (or nobody has: {', '.join(ISAS[1:])})"
        )
    return library


def reason_unavailable() -> str | None:
    """Why the C kernels do not run in this process; None when they do."""
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None


def is_available() -> bool:
    return reason_unavailable() is None


def library() -> ctypes.CDLL:
    """The loaded library; ``is_available()`` must hold."""
    loaded = _loaded()
    assert not isinstance(loaded, str), loaded
    return loaded


def function(name: str, *argument_types: Any) -> Any:
    """An entry point that returns an int64, with its argument types declared."""
    entry = getattr(library(), name)
    entry.argtypes = argument_types
    entry.restype = ctypes.c_int64
    return entry


def isa() -> str:
    """The instruction set in use: one of ISAS."""
    return ISAS[int(library().rl_isa())]


def set_isa(name: str) -> bool:
    """Use another instruction set from now on; False when this CPU lacks it. Not while a kernel runs."""
    return bool(library().rl_set_isa(ISAS.index(name)) == 0)


def set_threads(num_threads: int) -> int:
    """Threads that work on each call, the caller included; how many there are now."""
    return int(library().rl_set_threads(num_threads))
