"""The package's build: compile the C kernels where there is a compiler. Everything else stands in pyproject.toml."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

NATIVE = runpy.run_path(str(Path(__file__).parent / "engine" / "ops" / "cpu" / "native" / "build.py"))


class BuildWithKernels(build_py):
    """Compiles into the source tree first, where an editable install looks too; without a compiler the package works all the same."""

    def run(self) -> None:
        try:
            print(NATIVE["build_in_place"](only_if_stale=True), file=sys.stderr)
        except NATIVE["BuildError"] as error:
            print(
                f"The C kernels could not be compiled; products will run on torch's operations.\n{error}",
                file=sys.stderr,
            )
        super().run()


class MaybeBinary(Distribution):
    """A wheel with a compiled library is for this platform alone."""

    def has_ext_modules(self) -> Any:
        return NATIVE["find_compiler"]() is not None


setup(cmdclass={"build_py": BuildWithKernels}, distclass=MaybeBinary)
