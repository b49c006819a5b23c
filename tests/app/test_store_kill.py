"""Acceptance 9, FIELD 1: killing the program at any moment loses no sent message and no finished reply."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.store import ChatStore

ROOT = Path(__file__).resolve().parent.parent.parent


def killed_at(folder: Path, seed: int, after_seconds: float) -> list[tuple[str, str]]:
    """Run the program, kill it ``after_seconds`` after its first message, and return what it had said by then."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.app.kill_target", str(folder), str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "QT_QPA_PLATFORM": "offscreen"},
    )
    assert program.stdout is not None
    try:
        first = program.stdout.readline()
        assert first, "the program ended by itself"
        time.sleep(after_seconds)
    finally:
        program.kill()
    rest = program.stdout.read()
    program.stdout.close()
    program.wait()
    lines = [line for line in (first + rest).splitlines(keepends=True) if line.endswith("\n")]
    return [tuple(json.loads(line)) for line in lines]


def check_nothing_is_lost(folder: Path, said: list[tuple[str, str]]) -> int:
    """Returns how many replies are interrupted."""
    store = ChatStore(folder / "chats.db")
    assert store.trouble == ""
    records = [record for chat in store.conversations() for record in store.messages(chat.conversation_id)]
    questions = {record.text for record in records if record.role == "user"}
    finished = {record.text for record in records if record.state == "done" and record.role == "assistant"}
    for kind, text in said:
        assert text in (questions if kind == "asked" else finished), f"{kind}: {text[:40]}"
    assert not any(record.state == "streaming" for record in records)
    store.close()
    return sum(record.state == "interrupted" for record in records)


@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path, rounds: int) -> None:
    chance = random.Random(rounds)
    said: list[tuple[str, str]] = []
    num_interrupted = 0
    for seed in range(rounds):
        said += killed_at(tmp_path, seed, chance.uniform(0.0, 0.6))
        num_interrupted = check_nothing_is_lost(tmp_path, said)
    assert sum(kind == "asked" for kind, _ in said) >= 4 * rounds
    assert any(kind == "finished" for kind, _ in said)
    assert num_interrupted >= rounds
