"""The command line: which commands exist, and how their mistakes reach a person. Imports neither torch nor Qt."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.commands import bench, chat, doctor, gui, models, options
from app.log import start_logging
from app.paths import find_paths

COMMANDS = (gui, chat, bench, options, models, doctor)
INTERRUPTED = 130  # the shell's code for a program ended by Ctrl+C


def run(arguments: Sequence[str]) -> int:
    """Parse and run; the exit code. A user's mistake is one message on stderr, never a traceback."""
    parser = _parser()
    parsed = parser.parse_args(arguments or ["gui"])
    if getattr(parsed, "data_dir", None):
        os.environ["RIDGELINE_DATA_DIR"] = str(Path(parsed.data_dir).expanduser().resolve())
    try:
        with _log_file() if parsed.run in (chat.run, bench.run) else contextlib.nullcontext():
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
    except MemoryError:
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


@contextlib.contextmanager
def _log_file() -> Iterator[None]:
    """What engine and app log goes to the log file while a command runs, not between the words of an answer."""
    hooks, level = (sys.excepthook, threading.excepthook), logging.getLogger().level
    handler = start_logging(find_paths().log_file)
    logging.raiseExceptions = False  # a log that cannot be written (full disk) must not spoil the answer
    try:
        yield
    finally:
        logging.raiseExceptions = True
        sys.excepthook, threading.excepthook = hooks
        logging.getLogger().setLevel(level)
        if handler:
            logging.getLogger().removeHandler(handler)
            handler.close()


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
