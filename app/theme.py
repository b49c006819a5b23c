"""Colours and type of the window, after the meaning they carry: the same colour means the same thing everywhere.

`Theme` values know nothing of Qt's state; `apply` puts one on the application and `notifier().theme_changed` tells
widgets that paint with their own colours. With mode "system" the desktop's light or dark choice is followed live.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QColor, QFont, QGuiApplication, QPalette
from PySide6.QtWidgets import QApplication

Mode = Literal["system", "light", "dark"]

BASE_PIXELS = 13.5
INTERFACE_FAMILIES = ("Inter", "Segoe UI", "Noto Sans", "DejaVu Sans")
MONOSPACE_FAMILIES = ("JetBrains Mono", "Cascadia Mono", "Cascadia Code", "DejaVu Sans Mono", "monospace")


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours as #RRGGBB. memory, compute, overhead, good and attention keep their meaning in every plot and label.

    The code_* colours and error_text are for text: at least 4.5:1 on the grounds they stand on (a test computes it).
    on_accent is text on an accent-filled button; hover is the ground of a row or button under the pointer; focus_line frames the message box in use;
    selection is the ground of selected text.
    """

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
    on_accent: str
    hover: str
    focus_line: str
    selection: str
    error_text: str
    error_ground: str
    code_keyword: str
    code_name: str
    code_string: str
    code_number: str
    code_comment: str
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
    on_accent="#0C1116",
    hover="#2A2F37",
    focus_line="#4A515D",
    selection="#2B506B",
    error_text="#FF9A5C",
    error_ground="#2A1F18",
    code_keyword="#D78BB4",
    code_name="#63B9EA",
    code_string="#58C79F",
    code_number="#E69F00",
    code_comment="#98A1AE",
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
    on_accent="#FFFFFF",
    hover="#ECEFF3",
    focus_line="#B4BCC7",
    selection="#BBDDF5",
    error_text="#A34500",
    error_ground="#FDF1E8",
    code_keyword="#9B3C72",
    code_name="#00629A",
    code_string="#00694C",
    code_number="#8A5200",
    code_comment="#5D6673",
)


class ThemeNotifier(QObject):
    """Says that the colours changed.

    Signals:
        theme_changed: the new Theme.
    """

    theme_changed = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self.theme: Theme = DARK
        self.mode: Mode = "system"

    def follow(self, app: QApplication) -> None:
        """Listen to the desktop's light or dark choice."""
        app.styleHints().colorSchemeChanged.connect(self._on_scheme_changed)

    def _on_scheme_changed(self, _scheme: Qt.ColorScheme) -> None:
        app = QApplication.instance()
        if self.mode == "system" and isinstance(app, QApplication):
            _put_on(app, self)


_notifier: ThemeNotifier | None = None


def notifier() -> ThemeNotifier:
    """The one notifier; made on first use."""
    global _notifier
    if _notifier is None:
        _notifier = ThemeNotifier()
    return _notifier


def current() -> Theme:
    """The theme in force; dark before `apply` was called."""
    return _notifier.theme if _notifier else DARK


def apply(app: QApplication, mode: Mode = "system") -> Theme:
    """Put the theme for ``mode`` on ``app``: style, palette, font, stylesheet; then tell the listeners.

    Raises ValueError for a mode that does not exist.
    """
    if mode not in ("system", "light", "dark"):
        raise ValueError(f"There is no theme {mode!r}. Choose system, light or dark.")
    tell = notifier()
    tell.mode = mode
    if app.property("ridgeline_styled") is None:
        app.setProperty("ridgeline_styled", True)
        app.setStyle("Fusion")
        tell.follow(app)
    _tell_desktop(mode)
    _put_on(app, tell)
    return tell.theme


def _tell_desktop(mode: Mode) -> None:
    """Title bars and native dialogs follow the choice too (Qt 6.8 and newer)."""
    scheme = Qt.ColorScheme
    wanted = {"system": scheme.Unknown, "light": scheme.Light, "dark": scheme.Dark}[mode]
    QGuiApplication.styleHints().setColorScheme(wanted)


def _put_on(app: QApplication, tell: ThemeNotifier) -> None:
    from app.stylesheet import stylesheet

    theme = theme_for(tell.mode)
    tell.theme = theme
    app.setFont(font())
    app.setPalette(palette(theme))
    sheet = stylesheet(theme)
    if app.styleSheet() != sheet:  # setting it again would polish every widget again
        app.setStyleSheet(sheet)
    tell.theme_changed.emit(theme)


def theme_for(mode: Mode) -> Theme:
    """The Theme that ``mode`` means now; "system" is light unless the desktop says dark."""
    if mode == "system":
        return DARK if desktop_is_dark() else LIGHT
    return DARK if mode == "dark" else LIGHT


def desktop_is_dark() -> bool:
    return QGuiApplication.styleHints().colorScheme() == Qt.ColorScheme.Dark


def points(pixels: float) -> float:
    """Point size that shows as ``pixels`` device-independent pixels on the primary screen."""
    screen = QGuiApplication.primaryScreen()
    dots_per_inch = screen.logicalDotsPerInch() if screen else 96.0
    return pixels * 72.0 / dots_per_inch


def font(pixels: float = BASE_PIXELS, weight: QFont.Weight = QFont.Weight.Normal, mono: bool = False) -> QFont:
    """Interface (or monospace) font of ``pixels`` height, with figures of equal width where the font has them."""
    made = QFont(list(MONOSPACE_FAMILIES if mono else INTERFACE_FAMILIES))
    made.setPointSizeF(points(pixels))
    made.setWeight(weight)
    made.setHintingPreference(QFont.HintingPreference.PreferNoHinting)  # even strokes at every scale factor
    if mono:
        made.setStyleHint(QFont.StyleHint.Monospace)
        made.setFixedPitch(True)
    elif hasattr(made, "setFeature"):  # Qt 6.7 and newer
        made.setFeature(QFont.Tag("tnum"), 1)
    return made


def palette(theme: Theme) -> QPalette:
    """Fusion's palette roles in ``theme``'s colours."""
    role = QPalette.ColorRole
    made = QPalette()
    for key, colour in (
        (role.Window, theme.background),
        (role.WindowText, theme.text),
        (role.Base, theme.raised),
        (role.AlternateBase, theme.panel),
        (role.Text, theme.text),
        (role.PlaceholderText, theme.muted),
        (role.Button, theme.raised),
        (role.ButtonText, theme.text),
        (role.BrightText, theme.error_text),
        (role.ToolTipBase, theme.raised),
        (role.ToolTipText, theme.text),
        (role.Highlight, theme.selection),
        (role.HighlightedText, theme.text),
        (role.Link, theme.accent),
        (role.LinkVisited, theme.accent),
        (role.Light, theme.raised),
        (role.Midlight, theme.hover),
        (role.Mid, theme.line),
        (role.Dark, theme.line),
        (role.Shadow, theme.line),
        (role.Accent, theme.accent),
    ):
        made.setColor(key, QColor(colour))
    for key in (role.WindowText, role.Text, role.ButtonText):
        made.setColor(QPalette.ColorGroup.Disabled, key, QColor(theme.muted))
    return made


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two #RRGGBB colours, 1 to 21 (WCAG 2.1 relative luminance)."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
