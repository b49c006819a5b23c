"""The CPU backend: torch's packed products and fused attention."""

from engine.ops.cpu.ops import CpuOps

__all__ = ["CpuOps"]
