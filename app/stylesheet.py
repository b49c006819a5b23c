"""The one stylesheet, built from a Theme. Widgets ask for a look by object name or by the ``look`` property."""

from __future__ import annotations

from app.theme import Theme


def stylesheet(theme: Theme) -> str:
    """Qt style sheet for the whole application in ``theme``'s colours."""
    return "\n".join((_grounds(theme), _buttons(theme), _inputs(theme), _popups(theme), _scrolling(theme)))


def _grounds(t: Theme) -> str:
    return f"""
    QMainWindow, QWidget#centre {{ background: {t.background}; }}
    QWidget#sidebar, QWidget#dock_holder {{ background: {t.panel}; }}
    QWidget#dock_holder[overlay="true"] {{ border-left: 1px solid {t.line}; }}
    QWidget#topbar {{ background: {t.background}; border-bottom: 1px solid {t.line}; }}
    QSplitter::handle {{ background: {t.line}; }}
    QLabel[look="muted"] {{ color: {t.muted}; }}
    QLabel[look="title"] {{ font-size: 20px; font-weight: 600; }}
    QLabel[look="strong"] {{ font-weight: 600; }}
    QLabel[look="error"] {{ color: {t.error_text}; }}
    QLabel[look="heading"] {{ font-size: 16px; font-weight: 600; }}
    QLabel[look="small"] {{ color: {t.muted}; font-size: 12px; }}
    QFrame[look="line"] {{ background: {t.line}; border: 0; }}
    QDialog#preferences, QWidget#preferencesPage, QScrollArea#preferencesScroll {{ background: {t.background}; border: 0; }}
    QFrame#notice {{ background: {t.error_ground}; border: 0; border-bottom: 1px solid {t.line}; }}
    QFrame[look="card"] {{ background: {t.raised}; border: 1px solid {t.line}; border-radius: 10px; }}
    """


def _buttons(t: Theme) -> str:
    return f"""
    QPushButton {{ background: {t.raised}; color: {t.text}; border: 1px solid {t.line}; border-radius: 8px;
        padding: 5px 12px; }}
    QPushButton:hover {{ background: {t.hover}; }}
    QPushButton:focus {{ border: 1px solid {t.accent}; }}
    QPushButton:disabled {{ color: {t.muted}; background: transparent; }}
    QPushButton[look="primary"] {{ background: {t.accent}; color: {t.on_accent}; border: 1px solid {t.accent};
        font-weight: 600; }}
    QPushButton[look="primary"]:focus {{ border: 1px solid {t.text}; }}
    QPushButton[look="primary"]:disabled {{ background: {t.hover}; color: {t.muted}; border: 1px solid {t.line}; }}
    QPushButton[look="pill"] {{ border-radius: 14px; padding: 4px 12px; text-align: left; }}
    QPushButton[look="row"] {{ border: 0; background: transparent; text-align: left; padding: 7px 10px; }}
    QPushButton[look="row"]:hover, QPushButton[look="row"]:focus {{ background: {t.hover}; }}
    QPushButton[look="example"] {{ text-align: left; padding: 11px 14px; border-radius: 10px; }}
    QToolButton {{ background: transparent; color: {t.muted}; border: 1px solid transparent; border-radius: 6px;
        padding: 3px 7px; }}
    QToolButton:hover {{ background: {t.hover}; color: {t.text}; }}
    QToolButton:focus {{ border: 1px solid {t.accent}; color: {t.text}; }}
    QToolButton:checked {{ color: {t.text}; }}
    QToolButton:disabled {{ color: {t.line}; }}
    QWidget#topbar QToolButton {{ padding: 4px; }}
    QToolButton::menu-indicator {{ image: none; }}
    """


def _inputs(t: Theme) -> str:
    return f"""
    QFrame#composer {{ background: {t.raised}; border: 1px solid {t.line}; border-radius: 12px; }}
    QFrame#composer[focused="true"] {{ border: 1px solid {t.focus_line}; }}
    QFrame#composer QPlainTextEdit {{ background: transparent; border: 0; selection-background-color: {t.selection};
        selection-color: {t.text}; }}
    QLineEdit {{ background: {t.raised}; border: 1px solid {t.line}; border-radius: 8px; padding: 6px 10px;
        selection-background-color: {t.selection}; selection-color: {t.text}; }}
    QLineEdit:focus {{ border: 1px solid {t.accent}; }}
    QLineEdit:disabled {{ color: {t.muted}; }}
    QPlainTextEdit[look="field"], QComboBox {{ background: {t.raised}; border: 1px solid {t.line}; border-radius: 8px;
        selection-background-color: {t.selection}; selection-color: {t.text}; }}
    QPlainTextEdit[look="field"] {{ padding: 3px 6px; }}
    QComboBox {{ padding: 5px 30px 5px 12px; }}
    QComboBox:hover {{ background: {t.hover}; }}
    QPlainTextEdit[look="field"]:focus, QComboBox:focus {{ border: 1px solid {t.accent}; }}
    QLineEdit[wrong="true"], QPlainTextEdit[wrong="true"] {{ border: 1px solid {t.error_text}; }}
    QComboBox::drop-down {{ border: 0; width: 26px; }}
    QComboBox QAbstractItemView {{ background: {t.raised}; border: 1px solid {t.line}; padding: 4px;
        selection-background-color: {t.hover}; selection-color: {t.text}; outline: 0; }}
    QProgressBar {{ background: {t.line}; border: 0; border-radius: 2px; max-height: 4px; min-height: 4px; }}
    QProgressBar::chunk {{ background: {t.accent}; border-radius: 2px; }}
    QProgressBar[full="true"]::chunk {{ background: {t.attention}; }}
    """


def _popups(t: Theme) -> str:
    return f"""
    QFrame#popup {{ background: {t.raised}; border: 1px solid {t.line}; border-radius: 10px; }}
    QMenu {{ background: {t.raised}; border: 1px solid {t.line}; border-radius: 8px; padding: 5px; }}
    QMenu::item {{ padding: 6px 22px 6px 12px; border-radius: 5px; }}
    QMenu::item:selected {{ background: {t.hover}; }}
    QMenu::item:disabled {{ color: {t.muted}; }}
    QMenu::separator {{ height: 1px; background: {t.line}; margin: 5px 8px; }}
    QToolTip {{ background: {t.raised}; color: {t.text}; border: 1px solid {t.line}; padding: 5px 7px; }}
    """


def _scrolling(t: Theme) -> str:
    return f"""
    QAbstractScrollArea#transcript {{ background: {t.background}; border: 0; }}
    QScrollBar:vertical {{ background: transparent; width: 11px; margin: 0; }}
    QScrollBar:horizontal {{ background: transparent; height: 11px; margin: 0; }}
    QScrollBar::handle {{ background: {t.line}; border-radius: 3px; margin: 2px; min-height: 28px; min-width: 28px; }}
    QScrollBar::handle:hover {{ background: {t.muted}; }}
    QScrollBar::add-line, QScrollBar::sub-line {{ width: 0; height: 0; }}
    QScrollBar::add-page, QScrollBar::sub-page {{ background: transparent; }}
    """
