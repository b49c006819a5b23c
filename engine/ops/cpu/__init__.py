"""The CPU backend: C kernels where they could be built, else torch's packed products and fused attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.ops.cpu.ops import CpuOps

__all__ = ["CpuOps"]


def __getattr__(name: str) -> Any:
    """CpuOps on first use: ``native`` beside it is asked by programs that must not wait for torch."""
    if name == "CpuOps":
        from engine.ops.cpu.ops import CpuOps

        return CpuOps
    raise AttributeError(name)
