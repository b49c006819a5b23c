"""How long ago a chat was used, in the few words a chat list has room for. Local time; knows no Qt."""

from __future__ import annotations

from datetime import datetime, timedelta

GROUPS = ("Today", "Yesterday", "Previous 7 days", "Older")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def group_of(then: datetime, now: datetime) -> str:
    """The heading a chat stands under. What lies in the future (a clock set back) counts as today."""
    days = (now.date() - then.date()).days
    if days <= 0:
        return GROUPS[0]
    if days == 1:
        return GROUPS[1]
    return GROUPS[2] if days <= 7 else GROUPS[3]


def age_text(then: datetime, now: datetime) -> str:
    """ "now", "2 min", "5 h", then the weekday, then "12 Nov", then "Nov 2025"."""
    elapsed = now - then
    if elapsed < timedelta(minutes=1):
        return "now"
    if elapsed < timedelta(hours=1):
        return f"{int(elapsed.total_seconds() // 60)} min"
    days = (now.date() - then.date()).days
    if days <= 0:
        return f"{int(elapsed.total_seconds() // 3600)} h"
    if days < 7:
        return _DAYS[then.weekday()]
    month = _MONTHS[then.month - 1]
    return f"{then.day} {month}" if then.year == now.year else f"{month} {then.year}"
