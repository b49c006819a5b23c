"""Colours keep their contrast, the stylesheet follows the theme, and listeners hear of a change."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QFontInfo, QGuiApplication, QPalette
from PySide6.QtWidgets import QApplication

from app import theme
from app.theme import DARK, LIGHT, Theme, contrast

GROUNDS = ("background", "panel", "raised", "user_bubble", "code_background", "hover", "selection")
ON_CODE = ("code_keyword", "code_name", "code_string", "code_number", "code_comment")


@pytest.fixture
def app(qapp: QApplication):
    yield qapp
    theme.apply(qapp, "dark")


def text_on_ground_pairs(colours: Theme) -> list[tuple[str, str]]:
    pairs = [("text", ground) for ground in GROUNDS]
    pairs += [("muted", ground) for ground in ("background", "panel", "raised", "code_background", "hover")]
    pairs += [("accent", ground) for ground in ("background", "panel", "raised")]
    pairs += [(name, "code_background") for name in ON_CODE]
    pairs += [("error_text", "error_ground"), ("error_text", "background"), ("on_accent", "accent")]
    return pairs


@pytest.mark.parametrize("colours", [DARK, LIGHT], ids=["dark", "light"])
def test_text_has_contrast_of_at_least_four_and_a_half(colours: Theme) -> None:
    too_low = {
        (text, ground): round(contrast(getattr(colours, text), getattr(colours, ground)), 2)
        for text, ground in text_on_ground_pairs(colours)
        if contrast(getattr(colours, text), getattr(colours, ground)) < 4.5
    }
    assert too_low == {}


def test_contrast_of_black_on_white_is_twenty_one() -> None:
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21.0)
    assert contrast("#777777", "#777777") == 1.0


def test_measures_mean_the_same_colour_in_both_themes() -> None:
    for name in ("memory", "compute", "overhead", "good", "attention", "chats"):
        assert getattr(DARK, name) == getattr(LIGHT, name)


def test_apply_sets_palette_stylesheet_and_tells_listeners(app: QApplication) -> None:
    heard: list[Theme] = []
    theme.notifier().theme_changed.connect(heard.append)
    try:
        assert theme.apply(app, "light") is LIGHT
        assert theme.current() is LIGHT
        assert app.palette().color(QPalette.ColorRole.Window).name().upper() == LIGHT.background
        assert LIGHT.panel in app.styleSheet()
        theme.apply(app, "dark")
    finally:
        theme.notifier().theme_changed.disconnect(heard.append)
    assert heard == [LIGHT, DARK]


def test_the_system_mode_follows_the_desktop(app: QApplication, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = QGuiApplication.styleHints().colorSchemeChanged
    theme.apply(app, "system")
    for is_dark, expected in ((True, DARK), (False, LIGHT)):
        monkeypatch.setattr(theme, "desktop_is_dark", lambda is_dark=is_dark: is_dark)
        changed.emit(Qt.ColorScheme.Unknown)
        assert theme.current() is expected
    theme.apply(app, "dark")
    changed.emit(Qt.ColorScheme.Light)
    assert theme.current() is DARK  # the user's own choice wins


def test_an_unknown_mode_names_the_ones_that_exist(app: QApplication) -> None:
    with pytest.raises(ValueError, match="system, light or dark"):
        theme.apply(app, "sepia")  # type: ignore[arg-type]


def test_base_font_is_the_asked_height_and_monospace_is_monospace(app: QApplication) -> None:
    theme.apply(app, "dark")
    assert QFontInfo(app.font()).pixelSize() in (13, 14)
    assert QFontInfo(theme.font(mono=True)).fixedPitch()
