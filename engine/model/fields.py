"""Reading numbers from a model's configuration, field by field: a missing or null optional field is its default,
a wrong one is a ValueError that names it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# No model is near these sizes; beyond them the file is damaged.
MAX_COUNT = 1 << 31
MAX_LAYERS = 4096


class UnsupportedArchitecture(ValueError):  # noqa: N818 (a fact about the model; the caller may still have a way)
    """The files are sound but the decoder does not know this kind of model; transformers may."""


class Fields:
    """A mapping with typed access. ``where`` names the file in messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def raw(self, key: str) -> Any:
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, at_most: int = MAX_COUNT) -> int:
        """A positive whole number; ValueError if it is missing without a default, beyond ``at_most``, or anything else."""
        value = self._optional(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= at_most:
            raise self.wrong(key, value, f"a positive whole number up to {at_most}")
        return value

    def optional_count(self, key: str) -> int | None:
        """A positive whole number, or None when missing, null or 0."""
        return self.count(key) if self.values.get(key) not in (None, 0) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number greater than 0."""
        value = self._optional(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, value, "a number greater than 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number greater than 0, or None when missing, null or 0."""
        return self.number(key) if self.values.get(key) not in (None, 0, 0.0) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._optional(key, default)
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise self.wrong(key, value, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._optional(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, value, "a name")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers greater than 0."""
        value = self._optional(key, None)
        if not isinstance(value, list | tuple) or not value:
            raise self.wrong(key, value, "a list of numbers")
        items = Fields({str(i): item for i, item in enumerate(value)}, f"{self.where}, {key}")
        return tuple(items.number(str(i)) for i in range(len(value)))

    def mapping(self, key: str) -> Fields:
        """A nested object; empty when missing or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return Fields(value or {}, f"{self.where}, {key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when missing or null."""
        value = self.values.get(key)
        items = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.wrong(key, value, "a token id or a list of them")
        return tuple(item for item in items if item >= 0)

    def wrong(self, key: str, value: Any, wanted: str) -> ValueError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        if value is None:
            return ValueError(f"{self.where} does not say {key!r}. The file is incomplete; download it again.")
        return ValueError(f"{self.where}: {key!r} is {shown}, but should be {wanted}. Download the file again.")

    def _optional(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value
