"""The log holds no secrets and does not grow without end."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import log


@pytest.fixture
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.level, list(root.handlers), sys.excepthook, threading.excepthook)
    yield
    for handler in root.handlers[:]:
        if handler not in before[1]:
            root.removeHandler(handler)
            handler.close()
    root.setLevel(before[0])
    sys.excepthook, threading.excepthook = before[2], before[3]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("got hf_abcdefghijklmnop from env", "abcdefghijklmnop"),
        ("Authorization: Bearer eyJhbGciOi.abc", "eyJhbGciOi"),
        ("https://host/x?token=s3cr3tvalue&y=1", "s3cr3tvalue"),
        ("https://user:pa55word@host/x", "pa55word"),
        ("{'api_key': 'k-123456789'}", "k-123456789"),
        ("HF_TOKEN=abcdef123456", "abcdef123456"),
    ],
)
def test_secrets_are_hidden(text: str, secret: str) -> None:
    assert secret not in log.redact(text)
    assert "[hidden]" in log.redact(text)


def test_plain_sentences_pass() -> None:
    text = "118 tokens/s, first token 0.21 s; the tokenizer: ok"
    assert log.redact(text) == text


def test_a_secret_in_a_traceback_is_hidden(tmp_path: Path, restored: None) -> None:
    handler = log.start_logging(tmp_path / "new folder" / "log.txt")
    assert handler is not None
    try:
        raise ValueError("password=hunter2hunter2")
    except ValueError:
        logging.getLogger("app.x").exception("failed")
    handler.flush()
    written = (tmp_path / "new folder" / "log.txt").read_text(encoding="utf-8")
    assert "ValueError" in written
    assert "hunter2" not in written


def test_the_log_rotates(tmp_path: Path, restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_LARGEST_BYTES", 5000)
    log.start_logging(tmp_path / "log.txt")
    for i in range(500):
        logging.getLogger("app.x").info("line %d %s", i, "x" * 60)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 4
    assert max(sizes) <= 5100


def test_a_log_that_cannot_be_written_does_not_stop_the_program(tmp_path: Path, restored: None) -> None:
    (tmp_path / "file").write_text("")
    assert log.start_logging(tmp_path / "file" / "log.txt") is None


def test_what_nobody_caught_is_logged(tmp_path: Path, restored: None, capsys: pytest.CaptureFixture[str]) -> None:
    sys.excepthook = sys.__excepthook__  # pytest-qt's own would fail the test
    log.start_logging(tmp_path / "log.txt")
    error = RuntimeError("lost")
    sys.excepthook(RuntimeError, error, None)
    threading.excepthook(threading.ExceptHookArgs((RuntimeError, error, None, threading.current_thread())))
    written = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert written.count("RuntimeError: lost") == 2
    assert "RuntimeError: lost" in capsys.readouterr().err
