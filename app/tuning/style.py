"""The dock's own look, on top of the application's stylesheet."""

from __future__ import annotations

from app.theme import Theme


def dock_stylesheet(t: Theme) -> str:
    """Style sheet for the dock in ``t``'s colours."""
    return f"""
    QWidget#dock, QWidget#dockPage, QScrollArea#dockScroll {{ background: {t.panel}; border: 0; }}
    QFrame#rule {{ background: {t.line}; border: 0; max-height: 1px; min-height: 1px; }}
    QPushButton[look="tab"] {{ background: transparent; border: 0; border-bottom: 2px solid transparent;
        border-radius: 0; padding: 14px 2px 13px 2px; color: {t.muted}; }}
    QPushButton[look="tab"]:hover {{ color: {t.text}; }}
    QPushButton[look="tab"]:focus {{ border-bottom: 2px solid {t.muted}; }}
    QPushButton[look="tab"]:checked {{ color: {t.text}; font-weight: 600; border-bottom: 2px solid {t.accent}; }}
    QPushButton[look="value"] {{ background: transparent; border: 1px solid {t.line}; border-radius: 7px;
        padding: 3px 9px; color: {t.muted}; font-size: 12px; min-width: 26px; }}
    QPushButton[look="value"][tone="on"] {{ border: 1px solid {t.accent}; color: {t.accent}; }}
    QPushButton[look="value"]:hover {{ background: {t.hover}; }}
    QPushButton[look="value"]:focus {{ background: {t.hover}; }}
    QPushButton[look="value"]:disabled {{ border: 1px solid {t.line}; color: {t.muted}; }}
    QPushButton[look="link"] {{ background: transparent; border: 0; padding: 0; text-align: left; color: {t.text};
        font-size: 13px; }}
    QPushButton[look="link"]:hover, QPushButton[look="link"]:focus {{ color: {t.accent}; background: transparent; }}
    QLabel[part="pile"] {{ color: {t.muted}; font-size: 11.5px; padding: 14px 0 5px 0;
        border-bottom: 1px solid {t.line}; }}
    QLabel[part="title"] {{ color: {t.text}; font-size: 13px; }}
    QWidget#switch {{ border-bottom: 1px solid {t.line}; }}
    QLabel[part="kind"] {{ color: {t.muted}; font-size: 10.5px; }}
    QLabel[part="explanation"] {{ color: {t.text}; font-size: 12px; padding: 4px 0 6px 0; }}
    QLabel[part="status"][tone="note"] {{ color: {t.muted}; font-size: 11px; }}
    QLabel[part="status"][tone="refusal"] {{ color: {t.error_text}; font-size: 11px; }}
    """
