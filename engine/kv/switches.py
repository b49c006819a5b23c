"""What the switches that concern the KV cache say, as numbers."""

from __future__ import annotations

from collections.abc import Mapping


def user_window(options: Mapping[str, str]) -> int | None:
    """Tokens of the user's own window; None when each layer keeps the model's."""
    return None if options["window"] == "model" else int(options["window"])


def sparse_pages(options: Mapping[str, str]) -> int | None:
    """Pages that a decoding token reads per KV head; None when it reads all it sees."""
    return None if options["sparse"] == "off" else int(options["sparse"])
