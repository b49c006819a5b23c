"""Settings: one JSON file, read field by field, written atomically, migrated by number."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.commands import Overflow
from engine.params import SamplingParams

logger = logging.getLogger(__name__)

VERSION = 1
Json = dict[str, Any]

# Step k turns the raw data of version k into version k + 1. Fields that a step does not name pass through.
MIGRATIONS: tuple[Callable[[Json], Json], ...] = (
    lambda data: data,  # 0 (a file without a number, written by hand) -> 1
)


class SamplingSettings(BaseModel):
    """How replies are sampled; ranges and meaning as in ``engine.params.SamplingParams``."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    temperature: float = Field(
        default=0.7,
        ge=0,
        title="Temperature",
        description="0 always takes the likeliest word; higher values vary more.",
    )
    top_k: int = Field(
        default=0, ge=0, title="Top-k", description="Choose among this many of the likeliest tokens; 0 keeps all."
    )
    top_p: float = Field(
        default=1.0,
        ge=0,
        le=1,
        title="Top-p",
        description="Choose among the likeliest tokens that together reach this probability; 1 keeps all.",
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        title="Min-p",
        description="Leave out tokens less likely than this share of the likeliest one; 0 leaves out none.",
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        title="Repetition penalty",
        description="Above 1, tokens that were used before become less likely; 1 changes nothing.",
    )
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = Field(
        default=None,
        ge=0,
        le=2**63 - 1,
        title="Seed",
        description="The same number gives the same reply again. Empty: another one for each reply.",
        json_schema_extra={"when_empty": "random"},
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        title="Longest reply",
        description="In tokens. Empty: until the model ends it or its window is full.",
        json_schema_extra={"when_empty": "no limit"},
    )
    stop: tuple[str, ...] = Field(
        default=(),
        title="Stop strings",
        description="A reply ends just before any of these. One on each line; \\n stands for a line break.",
    )

    def to_params(self) -> SamplingParams:
        stop = tuple(text for text in self.stop if text)
        return SamplingParams(**{**self.model_dump(include=set(SamplingSettings.model_fields)), "stop": stop})


class Settings(BaseModel):
    """Everything the app remembers between starts, apart from chats. Fields it does not know are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    version: int = VERSION
    theme: Literal["system", "light", "dark"] = Field(
        default="system",
        title="Colours",
        description="The system's choice is followed when it changes.",
        json_schema_extra={"labels": {"system": "As the system", "light": "Light", "dark": "Dark"}},
    )
    model_source: str = "starter"
    options: dict[str, str] = Field(default_factory=dict)  # option key -> choice; the rest are defaults
    drafts: dict[str, str] = Field(default_factory=dict)  # model source -> the draft model chosen for it
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    system_prompt: str = Field(
        default="", title="System prompt", description="What the model is told at the beginning of every chat."
    )
    # A chat goes on by default: what is left out is said under each reply, and "stop" is one choice away.
    context_policy: Overflow = Field(
        default="drop_oldest",
        title="When a chat is longer than the window",
        description=(
            "The window is what a model can read at once. What is left out stays in the chat, each reply says how much "
            "it was, and the system prompt is always sent."
        ),
        json_schema_extra={"labels": {"drop_oldest": "Leave out the oldest messages", "stop": "Stop and say so"}},
    )
    window_geometry: str = ""  # base64 of QWidget.saveGeometry()
    dock_width: int = Field(default=372, ge=320, le=560)  # px
    dock_visible: bool = True
    dock_detached: bool = False
    dock_geometry: str = ""  # of its own window; base64 of QWidget.saveGeometry()
    sidebar_visible: bool = True
    last_chat: str = ""


class SettingsStore:
    """Holds the current Settings and keeps the file in step with them.

    ``message`` says in plain words what was wrong with the file when it was read or written; empty when nothing was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.message = ""
        self.settings = self._load()

    def update(self, **changes: Any) -> Settings:
        """Replace fields and write the file. ValueError for a value that a field cannot take."""
        data = {**self.settings.model_dump(), **changes}
        self.settings = Settings.model_validate(data)
        self._save()
        return self.settings

    def _load(self) -> Settings:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Settings()
        except (OSError, UnicodeDecodeError) as error:
            return self._set_aside(str(error))
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            return self._set_aside(str(error))
        if not isinstance(data, dict):
            return self._set_aside("it does not hold an object")
        return _validated(_migrated(data))

    def _set_aside(self, reason: str) -> Settings:
        kept = self.path.with_name(f"{self.path.stem}-unreadable-{time.strftime('%Y%m%d-%H%M%S')}{self.path.suffix}")
        logger.warning("Settings file %s is unreadable: %s", self.path, reason)
        try:
            self.path.replace(kept)
        except OSError as error:
            self.message = (
                f"The settings file {self.path} cannot be read ({error}). Settings start from their defaults."
            )
            return Settings()
        self.message = (
            f"The settings file was unreadable ({reason}), so settings start from their defaults. It is kept as {kept}."
        )
        return Settings()

    def _save(self) -> None:
        text = json.dumps(self.settings.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
        try:
            write_atomically(self.path, text)
        except OSError as error:
            self.message = (
                f"Settings could not be saved to {self.path}: {error.strerror or error}. "
                "They hold until Ridgeline closes; free some space or choose another folder with --data-dir."
            )
            logger.warning(self.message)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's content so that a crash at any moment leaves the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there; NTFS journals the rename itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _migrated(data: Json) -> Json:
    version = data.get("version", 0)
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        logger.warning("Settings: version %r is not a number; read as version 0", version)
        version = 0
    for step in MIGRATIONS[version:VERSION]:
        data = step(data)
    # A newer version's number is kept: its program must not migrate the file again.
    return {**data, "version": max(version, VERSION)}


def _validated(data: Json) -> Settings:
    """Settings from ``data``; a field that is null or impossible falls back to its default, one by one."""
    while True:
        try:
            return Settings.model_validate(data)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            location = [part for part in problem["loc"] if isinstance(part, (str, int))]
            logger.warning("Settings: %s is ignored: %s", ".".join(map(str, location)), problem["msg"])
            data = _without(data, location)


def _without(data: Json, location: list[str | int]) -> Json:
    """``data`` without the deepest part of ``location`` that is a key of an object; the key of a list goes whole."""
    key = location[0]
    inner = data.get(key) if isinstance(key, str) else None
    if isinstance(inner, dict) and len(location) > 1 and location[1] in inner:
        return {**data, str(key): _without(inner, location[1:])}
    return {name: value for name, value in data.items() if name != key}
