"""Write the README's generated part: the table of switches, from engine/options.py. ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN = "<!-- options:begin (written by make readme from engine/options.py) -->"
END = "<!-- options:end -->"


def options_table() -> str:
    """One Markdown table per pile; the default choice is bold."""
    from engine.options import OPTIONS

    lines: list[str] = []
    pile = None
    for option in OPTIONS:
        if option.pile is not pile:
            pile = option.pile
            lines += ["", f"### {pile}", "", "| switch | choices | change | what it does |", "|---|---|---|---|"]
        choices = ", ".join(f"**{value}**" if value == option.default else value for value in option.values)
        lines.append(f"| {option.title} `{option.key}` | {choices} | {option.kind} | {option.explanation} |")
    return "\n".join([*lines, ""])


def updated(text: str) -> str:
    """``text`` with the part between the markers written again."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "the README lost its markers"
    return f"{before}{BEGIN}\n{options_table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    text = README.read_text(encoding="utf-8")
    fresh = updated(text)
    if "--check" in arguments:
        return int(fresh != text)
    README.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
