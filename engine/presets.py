"""Presets: named rows over the options table, for a purpose. Imports no torch.

The rows stand in ``resources/presets.toml``, one more may have been found on this machine by a measured search
(``engine/best_here.py``) and kept beside its figures. A preset sets every switch: those it does not name go to their defaults,
so that choosing one after another leaves nothing behind.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from engine.options import OPTIONS, Capabilities, Options

BEST_HERE = "best_here"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Preset:
    """``values``: the switches it names. note: one line, what it is for and what it costs."""

    name: str
    title: str
    note: str
    values: Mapping[str, str] = field(default_factory=dict)

    def settings(self, capabilities: Capabilities | None = None) -> dict[str, str]:
        """Every switch: the preset's value, or the default where it names none or its value cannot be used here."""
        here = capabilities or Capabilities()
        full = {}
        for option in OPTIONS:
            value = self.values.get(option.key, option.default)
            full[option.key] = option.default_for(here) if option.reason(value, here) else value
        return full


@cache
def presets() -> tuple[Preset, ...]:
    """The rows of the file, in its order. ValueError for a key or value that the options table does not have."""
    return parse(resources.files("resources").joinpath("presets.toml").read_text(encoding="utf-8"))


def parse(text: str) -> tuple[Preset, ...]:
    """Presets from TOML: a table each, with ``title``, ``note`` and the switches under ``values``."""
    found = []
    for name, row in tomllib.loads(text).items():
        preset = Preset(name, row["title"], row["note"], dict(row["values"]))
        Options(preset.values)
        found.append(preset)
    return tuple(found)


def canonical(name: str) -> str:
    """ "Best here" and "best-here" are both best_here."""
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def preset(name: str, best: Found | None = None) -> Preset:
    """The preset called ``name``; ValueError names those there are. best: what "best here" is, where it was found."""
    wanted = canonical(name)
    known = {row.name: row for row in presets()}
    if wanted == BEST_HERE and best:
        return best.as_preset()
    if wanted == BEST_HERE:
        raise ValueError(
            "The best setting for this machine has not been measured yet. Run: ridgeline bench --preset best_here"
        )
    if wanted not in known:
        raise ValueError(f"There is no preset {name!r}. Presets are: {', '.join((*known, BEST_HERE))}.")
    return known[wanted]


@dataclass(frozen=True, slots=True)
class Found:
    """What a measured search found: for which machine and model, when, and how much it gains over the defaults."""

    machine: str
    model: str
    measured_at: str  # ISO date
    speedup: float  # time of the defaults / time of these values, for the search's work
    values: Mapping[str, str]

    @property
    def words(self) -> str:
        """What it is, in one line: "weights=int8: 1.31 times the speed of the defaults"."""
        if not self.values:
            return "the defaults; nothing else was faster"
        named = ", ".join(f"{key}={value}" for key, value in self.values.items())
        return f"{named}: {self.speedup:.2f} times the speed of the defaults"

    def is_of(self, machine: str, model: str) -> bool:
        return (machine, model) == (self.machine, self.model)

    def as_preset(self) -> Preset:
        date = self.measured_at[:10]
        gain = f"{self.speedup:.2f} times the speed of the defaults" if self.speedup > 1 else "the defaults"
        return Preset(
            BEST_HERE, "Best here", f"{gain}, measured on {date} with {self.model} on {self.machine}", self.values
        )


def keep_best(found: Found, file: Path) -> None:
    row = {
        "machine": found.machine,
        "model": found.model,
        "measured_at": found.measured_at,
        "speedup": found.speedup,
        "values": dict(found.values),
    }
    part = file.with_suffix(".part")
    part.write_text(json.dumps(row, indent=2), encoding="utf-8")
    part.replace(file)


def stored_best(file: Path) -> Found | None:
    """The kept result, if it can be read and its switches still exist: for whichever machine and model it was found."""
    try:
        row = json.loads(file.read_text(encoding="utf-8"))
        found = Found(row["machine"], row["model"], row["measured_at"], float(row["speedup"]), dict(row["values"]))
        Options(found.values)
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.info("The best setting is measured again: %s cannot be used (%s).", file.name, error)
        return None
