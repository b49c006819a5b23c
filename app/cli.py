"""The command line: which commands exist, and how their mistakes reach a person. Imports neither torch nor Qt."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from app.commands import bench, chat, compare, doctor, gui, models, options
from app.commands.session import INTERRUPTED

COMMANDS = (gui, chat, bench, compare, options, models, doctor)


def run(arguments: Sequence[str]) -> int:
    """Parse and run; the exit code. A user's mistake is one message on stderr, never a traceback."""
    parser = _parser()
    parsed = parser.parse_args(arguments or ["gui"])
    if getattr(parsed, "data_dir", None):
        os.environ["RIDGELINE_DATA_DIR"] = str(Path(parsed.data_dir).expanduser().resolve())
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_stdout()
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        return _complain(str(error))
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):  # torch's words for it
            raise
        return _complain("There is not enough memory. Close other programs or choose a smaller model.")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _discard_stdout()
        return _complain(_explain(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ridgeline",
        description="Chat with a language model on this machine and see where every token's time goes.",
        epilog="Without a command the window opens.",
    )
    parser.add_argument("--version", action="version", version=f"ridgeline {_version()}")
    _add_data_dir(parser)
    commands = parser.add_subparsers(metavar="command", required=False)
    for module in COMMANDS:
        _add_data_dir(module.add_to(commands))
    parser.set_defaults(run=gui.run, model=None)
    return parser


def _add_data_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-dir",
        metavar="FOLDER",
        default=argparse.SUPPRESS,
        help="where chats, settings and models are kept (default: the user's data folder)",
    )


def _version() -> str:
    try:
        return importlib.metadata.version("ridgeline")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _complain(message: str) -> int:
    print(f"ridgeline: {message}", file=sys.stderr)
    return 1


def _explain(error: OSError) -> str:
    where = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk is full; nothing more could be written{where}. Free some space, or use --data-dir on another disk."
    return f"{error.strerror or error}:{where}. Check the path and its permissions."


def _discard_stdout() -> None:
    """Nobody takes our output any more (closed pipe, full disk); keep Python's own flush at exit from complaining."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
