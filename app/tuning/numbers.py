"""How figures are written: enough digits to tell apart, none to flicker, never an exponent, a dash for nothing. Knows no Qt."""

from __future__ import annotations

import math

NONE = "–"


def rate(value: float | None) -> str:
    """Tokens per second: 9.4, 118, 1,240."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.1f}" if abs(value) < 9.95 else f"{value:,.0f}"


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    """0.842 -> "84"; the sign is the unit and stands apart."""
    if share is None or not math.isfinite(share):
        return NONE
    hundredths = share * 100
    return f"{hundredths:.1f}" if 0 < abs(hundredths) < 0.95 else f"{hundredths:,.0f}"


def seconds(value: float | None) -> tuple[str, str]:
    """(number, unit): 87 ms, 0.21 s, 4.3 s, 75 s."""
    if value is None or not math.isfinite(value):
        return NONE, ""
    if value < 0.0995:
        return milliseconds(value), "ms"
    if value < 0.995:
        return f"{value:.2f}", "s"
    return (f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"), "s"


def milliseconds(value: float) -> str:
    """Seconds as milliseconds without a unit: 0.04, 8.9, 23, 1,204."""
    thousandths = value * 1e3
    if not math.isfinite(thousandths):
        return NONE
    if 0 < abs(thousandths) < 0.0995:
        return f"{thousandths:.2f}"
    return f"{thousandths:.1f}" if abs(thousandths) < 9.95 else f"{thousandths:,.0f}"


def data(num_bytes: float | None) -> str:
    """Bytes in decimal units: 640 B, 23 KB, 98 MB, 1.2 GB."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return NONE
    value, units = float(num_bytes), ("B", "KB", "MB", "GB", "TB")
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= 1000
    return f"{value:.1f} {unit}" if abs(value) < 9.95 and unit != "B" else f"{value:,.0f} {unit}"


def plural(number: int, one: str, many: str | None = None) -> str:
    """(1, "chat") -> "1 chat"; (3, "chat") -> "3 chats"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
