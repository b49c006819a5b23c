"""``ridgeline options``: the table of optimizations, for people and for scripts. Loads no model and no torch."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping

from app.commands import Subparsers
from engine.ops.cpu import native
from engine.options import OPTIONS, Capabilities, OptionEntry, unavailable


def add_to(commands: Subparsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("options", help="list the optimizations that --set and the window switch")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    refused = unavailable(Capabilities(has_native_kernels=native.is_available()))
    if arguments.json:
        print(json.dumps([_as_json(option, refused.get(option.key, {})) for option in OPTIONS], indent=2))
    else:
        print(_as_text(refused))
    return 0


def _as_json(option: OptionEntry, refused: Mapping[str, str]) -> dict[str, object]:
    """One entry. ``available`` is whether anything but the default can be chosen here; ``reason`` says why not."""
    others = [value for value in option.values if value != option.default]
    is_available = any(value not in refused for value in others)
    return {
        "key": option.key,
        "title": option.title,
        "choices": list(option.values),
        "notes": {choice.value: choice.note for choice in option.choices},
        "default": option.default,
        "kind": str(option.kind),
        "pile": str(option.pile),
        "available": is_available,
        "reason": "" if is_available else refused[others[0]],
        "refused": dict(refused),
        "needs": [f"{needed.key}={needed.value}: {needed.why}" for needed in option.requires],
        "lossless": option.lossless,
        "explanation": option.explanation,
        "changes": option.terms,
    }


def _as_text(refused: Mapping[str, Mapping[str, str]]) -> str:
    lines: list[str] = []
    pile = None
    for option in OPTIONS:
        if option.pile is not pile:
            pile = option.pile
            lines += ["", str(pile), "-" * len(pile)]
        shown = ["*" + value if value == option.default else value for value in option.values]
        lines.append(f"{option.key}  ({option.kind})  {' '.join(shown)}")
        paragraphs = [option.explanation]
        paragraphs += [f"Not here: {option.key}={value}. {why}" for value, why in refused.get(option.key, {}).items()]
        paragraphs += [f"Needs {needed.key}={needed.value}: {needed.why}." for needed in option.requires]
        for paragraph in paragraphs:
            lines += textwrap.wrap(paragraph, 96, initial_indent="    ", subsequent_indent="    ")
    lines += ["", "* default. Use: ridgeline chat --set KEY=VALUE"]
    return "\n".join(lines).strip()
