"""For the engine's tests: the C kernels, built before anything asks whether they are there."""

from __future__ import annotations

from engine.ops.cpu.native.build import build_in_place

build_in_place(only_if_stale=True)
