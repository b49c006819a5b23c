"""Ridgeline's inference engine: what makes tokens. Never imports Qt.

Importing the package is cheap: the vocabulary (options, events, parameters) needs no torch, and
``Engine`` is resolved on first use.
"""

import os

# torch's worker threads (libgomp) wait for each other by spinning, about 10 ms by default. When anything else wants the
# core, the window's plots for one, the waiting thread burns the time slice that the awaited one needs: measured beside seven
# other processes on two cores, a decode step took 490 ms instead of 85. 2000 turns last some 0.1 ms, longer than the
# gap between two products. libgomp reads this once, when torch is first imported; a setting of the user's own is kept.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from engine.events import Completion
from engine.params import SamplingParams

__all__ = ["Completion", "Engine", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
