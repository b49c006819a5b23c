"""``ridgeline options``: the table of optimizations, for people and for scripts. Loads no model and no torch."""

from __future__ import annotations

import argparse
import json
import textwrap

from app.commands import Subparsers
from engine.options import OPTIONS, Capabilities, OptionEntry, unavailable


def add_to(commands: Subparsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("options", help="list the optimizations that --set and the window switch")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    refused = unavailable(Capabilities())
    if arguments.json:
        print(json.dumps([_as_json(option, refused.get(option.key, {})) for option in OPTIONS], indent=2))
    else:
        print(_as_text())
    return 0


def _as_json(option: OptionEntry, refused: dict[str, str]) -> dict[str, object]:
    """One entry. ``available`` is whether anything but the default can be chosen here; ``reason`` says why not."""
    free = [value for value in option.values if value not in refused]
    return {
        "key": option.key,
        "title": option.title,
        "choices": list(option.values),
        "default": option.default,
        "kind": str(option.kind),
        "pile": str(option.pile),
        "available": bool(free),
        "reason": "" if free else next(iter(refused.values())),
        "refused": refused,
        "lossless": option.lossless,
        "explanation": option.explanation,
        "changes": option.terms,
    }


def _as_text() -> str:
    lines: list[str] = []
    pile = None
    for option in OPTIONS:
        if option.pile is not pile:
            pile = option.pile
            lines += ["", str(pile), "-" * len(pile)]
        shown = ["*" + value if value == option.default else value for value in option.values]
        lines.append(f"{option.key}  ({option.kind})  {' '.join(shown)}")
        lines += textwrap.wrap(option.explanation, 96, initial_indent="    ", subsequent_indent="    ")
    lines += ["", "* default. Use: ridgeline chat --set KEY=VALUE"]
    return "\n".join(lines).strip()
