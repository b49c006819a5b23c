"""What rounding costs on the starter, mean KL to fp32 of the file's own values over 4,000 tokens, outlier channels included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from outliers import OUTLIERS, Change, Changed, off_grid
from torch import Tensor

from engine.engine import Engine
from engine.model import load
from engine.quality import fixed_tokens, full_precision, quality, read, reference_rows
from engine.weights.source import WeightSource

NUM_TOKENS = 4000
NUM_OUTLIER_TOKENS = 1000
LIMITS = {"int8 weights": 0.005, "int4 weights": 0.05, "int4 weights and int8 activations": 0.05, "int8 KV": 0.001}
SETTINGS = {
    "int8 weights": {"weights": "int8"},
    "int4 weights": {"weights": "int4"},
    "int4 weights and int8 activations": {"weights": "int4", "activations": "int8"},
    "int8 KV": {"kv_dtype": "int8"},
}
FELT = 0.02  # KL of 4 bits where they round anything, at least

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Bench:
    """fp32 of the file read once; settings are compared with that."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path, self._patch, self._open = path, monkeypatch, load.open_source
        self._changes: tuple[Change, ...] = ()
        monkeypatch.setattr(load, "open_source", self._changed)
        reference = self._load({})
        self.tokens = fixed_tokens(reference, NUM_TOKENS)
        self._rows: list[Tensor] = reference_rows(reference, self.tokens)
        reference.close()

    def _changed(self, path: Path) -> WeightSource:
        source = self._open(path)
        for change in self._changes:
            source = Changed(source, change)
        return source

    def _load(self, settings: dict[str, str]) -> Engine:
        plain = {**full_precision(), "sensitive_layers": "on"}
        return Engine.load(str(self._path), {**plain, **settings}, kv_bytes=1 << 28, find=Path)

    def kl(self, name: str, *changes: Change, num_tokens: int = NUM_OUTLIER_TOKENS) -> float:
        """Mean KL of the setting ``name``, on the model with ``changes``, to the unchanged one in fp32."""
        self._changes = changes
        engine = self._load(SETTINGS[name])
        self._changes = ()
        tokens = self.tokens[:num_tokens]
        # the reference read its last quarter token by token; for a shorter text, what it read as a prompt serves as well
        found = quality(self._rows[:num_tokens], read(engine, tokens), tokens).mean_kl
        engine.close()
        print(f"{name}, {' '.join(change.__name__ for change in changes) or 'as the file is'}: KL {found:.5f}")
        return found


@pytest.fixture(scope="module")
def bench(starter_path: Path) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        yield Bench(starter_path, patch)


@pytest.mark.parametrize("name", SETTINGS)
def test_rounding_stays_within_its_limit(bench: Bench, name: str) -> None:
    assert 1e-6 < bench.kl(name, num_tokens=NUM_TOKENS) <= LIMITS[name]


@pytest.mark.parametrize("name", SETTINGS)
def test_an_outlier_channel_at_most_doubles_what_rounding_costs(bench: Bench, name: str) -> None:
    usual = bench.kl(name)
    for outlier in OUTLIERS:
        assert bench.kl(name, outlier) <= 2 * usual


def test_an_outlier_channel_at_most_doubles_the_cost_of_4_bits_off_the_files_grid(bench: Bench) -> None:
    """With every channel moved by a little nothing lies on a grid any more, so that 4 bits cost what they cost."""
    usual = bench.kl("int4 weights", off_grid)
    assert usual > FELT
    for outlier in OUTLIERS:
        assert bench.kl("int4 weights", off_grid, outlier) <= 2 * usual
