"""``ridgeline gui``: the window; without a screen, the terminal chat."""

from __future__ import annotations

import argparse
import sys

from app import screen
from app.commands import Subparsers, chat

NO_SCREEN = "No display here, so the chat runs in this terminal. (ridgeline doctor says what a window would need.)"


def add_to(commands: Subparsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("gui", help="open the window (the default)")
    parser.add_argument("-m", "--model", metavar="MODEL", help="open with this model")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    where = screen.platform()
    if where is None:
        print(NO_SCREEN, file=sys.stderr)
        return chat.run_in_terminal(arguments.model or "starter")
    missing = screen.missing_libraries(where)
    if missing:
        line = screen.install_line([library.package for library in missing])
        raise ValueError(
            f"The window needs {missing[0].file} and this system lacks it. Install what is missing:\n  {line}"
        )
    from app.application import run as run_window

    return run_window(arguments.model)
