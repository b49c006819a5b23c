"""Acceptance point 1, its second half: the real window opens on the real engine and streams answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_window_opens_and_streams_answers(starter_path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "window.png"
    result = subprocess.run(
        [sys.executable, "packaging/screenshot.py", str(picture)],
        cwd=ROOT,
        env={**os.environ, "RIDGELINE_STARTER": str(starter_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "a window that works has nothing to say on stderr"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 30_000, "an empty window compresses to less"
