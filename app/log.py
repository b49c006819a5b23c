"""The log: one rotating file, no chat text, no secrets."""

from __future__ import annotations

import logging
import re
import sys
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

_LARGEST_BYTES = 1_000_000
_OLD_FILES = 3
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_SECRETS = (
    (re.compile(r"\b(hf|sk|gh[pousr])[-_][A-Za-z0-9_\-]{8,}"), r"\1_[hidden]"),
    (re.compile(r"(?i)\b(bearer)\s+[^\s\"',;]+"), r"\1 [hidden]"),
    (
        re.compile(r"(?i)\b((?:[a-z0-9_]*(?:token|api[_-]?key|password|secret))[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]{6,}"),
        r"\1[hidden]",
    ),
    (re.compile(r"(https?://)[^/\s:@]+:[^/\s@]+@"), r"\1[hidden]@"),
)


def redact(text: str) -> str:
    """``text`` with anything that looks like a token, key, password or credentials in an address hidden."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class RedactingFormatter(logging.Formatter):
    """Hides secrets in the finished line, traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def start_logging(log_file: Path, level: int = logging.INFO) -> logging.Handler | None:
    """Write the log of ``app`` and ``engine`` to ``log_file``, and what nobody caught too.

    Returns the handler, or None when the file cannot be written: the program goes on, with its log on stderr.
    """
    root = logging.getLogger()
    root.setLevel(level)
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(log_file, maxBytes=_LARGEST_BYTES, backupCount=_OLD_FILES, encoding="utf-8")
    except OSError as error:
        logging.getLogger(__name__).warning("The log file %s cannot be written: %s", log_file, error)
        return None
    handler.setFormatter(RedactingFormatter(_FORMAT))
    root.addHandler(handler)
    _log_uncaught()
    return handler


def _log_uncaught() -> None:
    logger = logging.getLogger("app.uncaught")
    before = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logger.critical("Uncaught exception", exc_info=(kind, error, trace))
        before(kind, error, trace)

    def on_thread_exception(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None:
            return
        name = args.thread.name if args.thread else "unknown"
        logger.critical(
            "Uncaught exception in thread %s", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback)
        )

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception
