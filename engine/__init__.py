"""Ridgeline's inference engine: what makes tokens. Never imports Qt.

Importing the package is cheap: the vocabulary (options, events, parameters) needs no torch, and
``Engine`` is resolved on first use.
"""

from engine.events import Completion
from engine.params import SamplingParams

__all__ = ["Completion", "Engine", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
