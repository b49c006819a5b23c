"""THE table of preferences: which settings a person can change, in which order. All else comes from the fields themselves.

Title, description, bounds and choices are read from the pydantic fields of ``app.settings``; the dialog is built from
this, and so is the check of what somebody types. Knows no Qt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from app.settings import Settings, SettingsStore

Kind = Literal["choice", "number", "text", "lines"]


@dataclass(frozen=True, slots=True)
class Preference:
    """One setting. ``path``: where it stands in Settings, e.g. ("sampling", "top_k").

    choices: (value, label) of a "choice". when_empty: what an empty number means, "" when it must not be empty.
    """

    path: tuple[str, ...]
    title: str
    description: str
    kind: Kind
    choices: tuple[tuple[str, str], ...] = ()
    when_empty: str = ""

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def value(self, settings: Settings) -> Any:
        value: Any = settings
        for name in self.path:
            value = getattr(value, name)
        return value

    def shown(self, settings: Settings) -> str:
        """The value as its editor shows it; `check` reads it back."""
        value = self.value(settings)
        if self.kind == "lines":
            return "\n".join(text.replace("\n", "\\n") for text in value)
        return "" if value is None else str(value).removesuffix(".0") if self.kind == "number" else str(value)

    def check(self, settings: Settings, shown: str) -> Any:
        """What ``shown`` means. ValueError, in plain words, when the setting cannot be that."""
        raw: Any = shown
        if self.kind == "lines":
            raw = tuple(line.replace("\\n", "\n") for line in shown.split("\n") if line)
        elif self.kind == "number":
            raw = shown.strip() or None
        try:
            return self.value(Settings.model_validate(_changed(settings, self.path, raw)))
        except ValidationError as error:
            raise ValueError(_in_plain_words(error)) from error

    def store(self, store: SettingsStore, value: Any) -> None:
        """Keep ``value``, which `check` returned."""
        store.update(**{self.path[0]: _changed(store.settings, self.path, value)[self.path[0]]})


@dataclass(frozen=True, slots=True)
class Section:
    """Preferences that stand together. ``note``: when a change of them takes effect."""

    title: str
    note: str
    preferences: tuple[Preference, ...]


def _changed(settings: Settings, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    data = settings.model_dump()
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return data


def _in_plain_words(error: ValidationError) -> str:
    """What is wrong and what would be right, after the first of pydantic's errors."""
    problem = error.errors(include_url=False)[0]
    bounds = problem.get("ctx", {})
    words = {
        "greater_than_equal": "It must be {ge} or more.",
        "greater_than": "It must be more than {gt}.",
        "less_than_equal": "It must be {le} or less.",
        "less_than": "It must be less than {lt}.",
        "float_parsing": "Write a number, such as 0.7.",
        "float_type": "Write a number, such as 0.7.",
        "finite_number": "Write a number, such as 0.7.",
        "int_parsing": "Write a whole number.",
        "int_parsing_size": "This number is too large.",
        "int_type": "Write a whole number.",
        "int_from_float": "Write a whole number.",
    }.get(problem["type"])
    return words.format(**{name: _figure(bound) for name, bound in bounds.items()}) if words else f"{problem['msg']}."


def _figure(bound: Any) -> str:
    if isinstance(bound, float) and bound.is_integer():
        bound = int(bound)
    return f"{bound:,}" if isinstance(bound, int) else str(bound)


def _preference(key: str) -> Preference:
    path = tuple(key.split("."))
    model: type[BaseModel] = Settings
    for name in path[:-1]:
        inner = model.model_fields[name].annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        model = inner
    field = model.model_fields[path[-1]]
    assert field.title, f"{key} has no title"
    assert field.description, f"{key} has no description"
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    labels = extra.get("labels")
    assert isinstance(labels, dict | None)
    return Preference(
        path=path,
        title=field.title,
        description=field.description,
        kind=_kind(field),
        choices=tuple((value, str((labels or {}).get(value, value))) for value in get_args(field.annotation))
        if _kind(field) == "choice"
        else (),
        when_empty=str(extra.get("when_empty", "")),
    )


def _kind(field: FieldInfo) -> Kind:
    if get_origin(field.annotation) is Literal:
        return "choice"
    if get_origin(field.annotation) is tuple:
        return "lines"
    return "text" if field.annotation is str else "number"


def _section(title: str, note: str, *keys: str) -> Section:
    return Section(title, note, tuple(_preference(key) for key in keys))


NEXT_REPLY = "A change counts from the next reply on."
SECTIONS: tuple[Section, ...] = (
    _section("Appearance", "A change shows at once.", "theme"),
    _section("Context", NEXT_REPLY, "context_policy"),
    _section(
        "Replies",
        NEXT_REPLY,
        *("system_prompt", "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p"),
        *("sampling.repetition_penalty", "sampling.max_tokens", "sampling.seed", "sampling.stop"),
    ),
)


def preferences() -> tuple[Preference, ...]:
    """All of them, in the order of the dialog."""
    return tuple(preference for section in SECTIONS for preference in section.preferences)
