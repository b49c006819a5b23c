"""Colours and type of the window, after the meaning they carry: the same colour means the same thing everywhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours as #RRGGBB. memory, compute, overhead, good and attention keep their meaning in every plot and label."""

    is_dark: bool
    background: str
    panel: str
    raised: str
    line: str
    text: str
    muted: str
    accent: str
    user_bubble: str
    code_background: str
    memory: str = "#56B4E9"
    compute: str = "#E69F00"
    overhead: str = "#8A93A0"
    good: str = "#009E73"
    attention: str = "#D55E00"
    chats: tuple[str, ...] = ("#56B4E9", "#CC79A7", "#009E73", "#F0E442", "#0072B2", "#D55E00")


DARK = Theme(
    is_dark=True,
    background="#15171B",
    panel="#1A1D22",
    raised="#22262D",
    line="#2E333C",
    text="#E7E9ED",
    muted="#98A1AE",
    accent="#56B4E9",
    user_bubble="#232F44",
    code_background="#101215",
)
LIGHT = Theme(
    is_dark=False,
    background="#FFFFFF",
    panel="#F6F7F9",
    raised="#FFFFFF",
    line="#DFE3E8",
    text="#1B1F24",
    muted="#5D6673",
    accent="#0072B2",
    user_bubble="#E8F0FA",
    code_background="#F2F3F5",
)
