"""Pictures of the window with a scripted engine, to be looked at: every state, both themes, several sizes and scales.

    QT_QPA_PLATFORM=offscreen python tests/benchmarks/screenshots.py FOLDER [--only NAME]

The folder must lie outside the repository. Every figure in the pictures is invented by the script.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPLY = """Ice floats because water expands when it freezes: its molecules lock into an open lattice that takes about \
9 % more room, so the same mass fills more volume and the density falls.

You can check it with the two densities:

```python
def submerged_fraction(solid: float, liquid: float) -> float:
    return solid / liquid

print(submerged_fraction(917.0, 1000.0))   # 0.917
```

So about **92 %** of an ice cube sits below the surface. In sea water, at roughly 1025 kg per cubic metre, that drops \
to 89 %, which is why icebergs show a little more of themselves than [ice in a glass](https://example.org/ice):

1. Weigh the cube, and `measure` its edges.
2. Divide.
   - Fresh water: 0.917
   - Sea water: 0.895

| Liquid | kg per cubic metre | below the surface |
|---|--:|--:|
| Water | 1000 | 92 % |
| Sea water | 1025 | 89 % |

> A good estimate begins with two numbers that you can measure yourself."""
QUESTION = "Why does ice float, and how would I check it with numbers?"


@dataclass(frozen=True)
class Shot:
    name: str
    scene: str
    theme: str
    width: int
    height: int
    scale: float = 1.0


SHOTS = (
    *(
        Shot(f"chat-{theme}-{w}", "chat", theme, w, h)
        for theme in ("dark", "light")
        for w, h in ((1280, 800), (1440, 900), (2560, 1440))
    ),
    *(Shot(f"chat-{theme}-1280-at-150", "chat", theme, 1280, 800, 1.5) for theme in ("dark", "light")),
    *(Shot(f"top-{theme}", "top", theme, 1280, 800) for theme in ("dark", "light")),
    Shot("narrow-dark", "chat", "dark", 860, 700),
    Shot("narrow-dock-light", "narrow_dock", "light", 860, 700),
    Shot("no-dock-dark", "no_dock", "dark", 1440, 900),
    *(Shot(f"empty-{theme}", "empty", theme, 1280, 800) for theme in ("dark", "light")),
    Shot("no-model-light", "no_model", "light", 1280, 800),
    *(Shot(f"failed-{theme}", "failed", theme, 1280, 800) for theme in ("dark", "light")),
    *(Shot(f"popup-{theme}", "popup", theme, 1280, 800) for theme in ("dark", "light")),
    Shot("loading-dark", "loading", "dark", 1280, 800),
    Shot("selected-light", "selected", "light", 1280, 800),
    Shot("composer-dark-at-125", "composer", "dark", 1280, 800, 1.25),
    Shot("help-light", "help", "light", 1280, 800),
    *(Shot(f"outgrown-{theme}", "outgrown", theme, 1280, 800) for theme in ("dark", "light")),
    *(Shot(f"detached-{theme}", "detached", theme, 1280, 800) for theme in ("dark", "light")),
    Shot("without-dock-light", "without_dock", "light", 1280, 800),
    *(Shot(f"switches-{theme}", "switches", theme, 1280, 1400) for theme in ("dark", "light")),
    *(Shot(f"drafts-{theme}", "drafts", theme, 1280, 800) for theme in ("dark", "light")),
    *(Shot(f"clashes-{theme}", "clashes", theme, 1280, 800) for theme in ("dark", "light")),
    *(Shot(f"clashes-{theme}-at-150", "clashes", theme, 1280, 800, 1.5) for theme in ("dark", "light")),
    Shot("presets-dark", "presets", "dark", 1280, 800),
    *(Shot(f"preferences-{theme}", "preferences", theme, 1280, 800) for theme in ("dark", "light")),
    *(Shot(f"preferences-{theme}-at-150", "preferences", theme, 1280, 800, 1.5) for theme in ("dark", "light")),
    *(Shot(f"preferences-wrong-{theme}", "preferences_wrong", theme, 1280, 800) for theme in ("dark", "light")),
    Shot("preferences-end-dark", "preferences_end", "dark", 1280, 800),
)


def take(shot: Shot, folder: Path) -> None:
    """Build the window in this process, bring it into the scene, and save what it shows."""
    sys.path.insert(0, str(ROOT))
    from PySide6.QtTest import QTest
    from PySide6.QtWidgets import QApplication

    from app import theme
    from tests.app.scripted_service import Script
    from tests.app.window_parts import make_window

    app = QApplication([])
    theme.apply(app, shot.theme)  # type: ignore[arg-type]
    parts = make_window(Path(tempfile.mkdtemp(prefix="ridgeline-shot-")), Script(replies=(REPLY,)))
    parts.window.resize(shot.width, shot.height)
    parts.window.show()
    QTest.qWait(60)
    target = SCENES[shot.scene](parts) or parts.window
    QTest.qWait(350)
    target.grab().save(str(folder / f"{shot.name}.png"))
    parts.window.close()


def _chat(parts):
    from PySide6.QtTest import QTest

    parts.load()
    for title in ("Rewrite: release notes for the next version", "Postgres index advice"):
        parts.window.panel.send(title)
        parts.advance(3)
        parts.window.new_chat()
    parts.window.panel.send(QUESTION)
    for _ in range(24):
        parts.advance(6)
        QTest.qWait(30)


def _top(parts):
    _chat(parts)
    parts.window.panel.view.verticalScrollBar().setValue(0)


def _narrow_dock(parts):
    _chat(parts)
    parts.window.dock_place.toggle()


def _no_dock(parts):
    _chat(parts)
    parts.window.dock_place.toggle()


def _empty(parts):
    parts.load()


def _no_model(parts):
    parts.window.panel.composer.set_text("Hello")
    parts.window.panel.send("Hello")


def _failed(parts):
    from PySide6.QtCore import Qt
    from PySide6.QtTest import QTest

    parts.load()
    script = parts.service.script
    script.fail_reply = "Not enough memory for this conversation. The longest that fits here is 6,144 tokens."
    parts.window.panel.send(QUESTION)
    parts.run()
    script.fail_load = "mistral-7b.gguf is cut short: 1.2 of 4.1 GB. Download it again."
    parts.window.chooser.load("mistral-7b.gguf")
    parts.run()
    view = parts.window.panel.view
    view.setFocus()
    QTest.keyClick(view, Qt.Key.Key_Up, Qt.KeyboardModifier.AltModifier)


def _popup(parts):
    from types import SimpleNamespace

    parts.load()
    chooser = parts.window.chooser
    listed = [
        SimpleNamespace(
            name="starter", title="SmolLM2 135M Instruct", format="GGUF Q4_1", num_bytes=98_000_000, problem=""
        ),
        SimpleNamespace(name="gemma", title="Gemma 3 270M", format="GGUF Q4_K_M", num_bytes=253_000_000, problem=""),
        SimpleNamespace(
            name="broken", title="broken.gguf", format="", num_bytes=0, problem="The file is empty. Fetch it again."
        ),
    ]
    chooser.popup._list_models = lambda: listed
    chooser.popup.show_loading("Reading weights", 0.43)
    chooser.open()
    return chooser.popup


def _loading(parts):
    parts.window.chooser.load("starter")
    parts.window.panel.send(QUESTION)
    from engine.events import ModelLoading

    parts.bridge.model_loading.emit(ModelLoading("Reading weights", 0.43))


def _selected(parts):
    _top(parts)
    parts.window.panel.view.select_all()


def _composer(parts):
    _chat(parts)
    parts.window.panel.composer.set_text("\n".join(f"Line {i} of a longer question" for i in range(12)))


def _help(parts):
    from PySide6.QtWidgets import QDialog

    parts.window.show_help()
    return parts.window.findChild(QDialog)


def _outgrown(parts):
    parts.load()
    script = parts.service.script
    script.window = 520
    parts.load()
    for _ in range(4):
        parts.window.panel.send(QUESTION)
        parts.run()
    parts.window.panel.regenerate_last()
    parts.run()
    script.reply_tokens = 2000
    parts.window.panel.send("Go on.")
    parts.run()


def _detached(parts):
    _chat(parts)
    parts.window.dock_place.toggle_detached()
    return parts.window.dock_place.own_window


def _without_dock(parts):
    _detached(parts)


def _switches(parts):
    """The tab after a search, a draft model, a flip that made things slower, and a refusal."""
    _with_library(parts)
    parts.dock.show_tab(1)
    parts.dock.presets._search()
    parts.run()
    parts.dock.drafts.choose("small")
    parts.run()
    script = parts.service.script
    script.reply_tokens, script.step_seconds = 500, 0.02
    parts.window.panel.send(QUESTION)
    for seconds in (0.02, 0.05):
        for _ in range(24):
            parts.advance()
        script.step_seconds = seconds
        if seconds == 0.02:
            parts.dock.board.choose("attention", "reference")
            parts.advance()
            script.step_seconds = 0.05
    parts.dock.show_tab(1)


def _with_library(parts):
    from types import SimpleNamespace

    def model(name, title, problem=""):
        return SimpleNamespace(name=name, title=title, format="GGUF Q4_1", num_bytes=98_000_000, problem=problem)

    parts.load()
    parts.service.script.misfits = {
        "gemma": "Its vocabulary has 256,001 tokens, this model's has 49,152.",
        "big": "It is larger than this model: 1.71 B weights against 135 M.",
    }
    parts.dock.drafts._list_models = lambda: [
        model("starter", "SmolLM2 135M Instruct"),
        model("small", "SmolLM2 30M distilled"),
        model("gemma", "Gemma 3 270M"),
        model("big", "SmolLM2 1.7B Instruct"),
        model("broken", "broken.gguf", "The file is empty. Fetch it again."),
    ]


def _drafts(parts):
    from app.tuning.draft_row import DraftRow

    _with_library(parts)
    parts.dock.show_tab(1)
    row = parts.dock.switches.findChild(DraftRow)
    menu = row.make_menu()
    parts.run()
    menu.popup(row.mapToGlobal(row.rect().bottomLeft()))
    return menu


def _clashes(parts):
    parts.load()
    parts.dock.show_tab(1)
    parts.dock.board.choose("kv_cache", "off")
    parts.run()
    pill = parts.dock.switches.rows["sparse"].pill
    menu = pill.make_menu()
    menu.popup(pill.mapToGlobal(pill.rect().bottomLeft()))
    return menu


def _presets(parts):
    _with_library(parts)
    parts.dock.presets._search()
    parts.run()
    menu = parts.dock.presets.make_menu()
    menu.popup(parts.dock.mapToGlobal(parts.dock.rect().center()))
    return menu


def _preferences(parts):
    parts.load()
    parts.window.show_preferences()
    return parts.window._preferences


def _preferences_wrong(parts):
    dialog = _preferences(parts)
    row = dialog.rows["sampling.top_p"]
    row.editor.setFocus()
    row.editor.setText("1.5")
    row.edited.emit("1.5")
    return dialog


def _preferences_end(parts):
    from PySide6.QtTest import QTest
    from PySide6.QtWidgets import QScrollArea

    dialog = _preferences(parts)
    QTest.qWait(50)
    bar = dialog.findChild(QScrollArea).verticalScrollBar()
    bar.setValue(bar.maximum())
    return dialog


SCENES: dict[str, Callable] = {
    "chat": _chat,
    "top": _top,
    "narrow_dock": _narrow_dock,
    "no_dock": _no_dock,
    "empty": _empty,
    "no_model": _no_model,
    "failed": _failed,
    "popup": _popup,
    "loading": _loading,
    "selected": _selected,
    "composer": _composer,
    "help": _help,
    "outgrown": _outgrown,
    "detached": _detached,
    "without_dock": _without_dock,
    "switches": _switches,
    "drafts": _drafts,
    "clashes": _clashes,
    "presets": _presets,
    "preferences": _preferences,
    "preferences_wrong": _preferences_wrong,
    "preferences_end": _preferences_end,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if folder.is_relative_to(ROOT):
        parser.error("choose a folder outside the repository")
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        take(next(shot for shot in SHOTS if shot.name == arguments.one), folder)
        return 0
    for shot in SHOTS:
        if arguments.only not in shot.name:
            continue
        # One process each: Qt reads the scale factor once.
        environment = {**os.environ, "QT_SCALE_FACTOR": str(shot.scale)}
        environment.setdefault("QT_QPA_PLATFORM", "offscreen")
        subprocess.run([sys.executable, __file__, str(folder), "--one", shot.name], env=environment, check=True)
        print(folder / f"{shot.name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
