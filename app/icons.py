"""Small line icons, drawn at four times their size, for any screen."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QIcon, QPainter, QPixmap

# Lines of each shape on a grid of 18, as x, y, width, height.
_SHAPES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "menu": ((3, 4, 12, 1), (3, 8, 12, 1), (3, 12, 12, 1)),
    # a frame whose right part is set off
    "dock": ((2, 3, 14, 1), (2, 14, 14, 1), (2, 3, 1, 12), (15, 3, 1, 12), (10, 3, 1, 12)),
    # a frame in front of another one
    "detach": (
        *((6, 3, 10, 1), (6, 10, 10, 1), (6, 3, 1, 8), (15, 3, 1, 8)),
        *((2, 7, 3, 1), (2, 14, 10, 1), (2, 7, 1, 8), (11, 12, 1, 3)),
    ),
}


def line_icon(shape: str, colour: str) -> QIcon:
    """ "menu": three lines; "dock": the panel at the right; "detach": two windows. ``colour`` is #RRGGBB."""
    pixmap = QPixmap(72, 72)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.scale(4, 4)
    for rect in _SHAPES[shape]:
        painter.fillRect(*rect, QColor(colour))
    painter.end()
    return QIcon(pixmap)
