"""The KV page map: a cell per page in its owner's colour. One pixmap, of which only changed cells are painted again."""

from __future__ import annotations

import math
from collections.abc import Callable

from PySide6.QtCore import QEvent, QPoint, QRect, QSize, Qt
from PySide6.QtGui import QColor, QHelpEvent, QPainter, QPaintEvent, QPixmap, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app import theme
from app.tuning.pace import Meter
from app.tuning.plots import page_colour
from app.tuning.raster import blend
from engine.events import PageMap

FREE, CACHED, PADDING, SHARED = 0, -1, -2, -3
LARGEST_CELL, SMALLEST_CELL = 8, 4  # px, gap included
MAX_HEIGHT = 80

# How one cell looks: (colours of its owners, is it stranded)
Look = tuple[tuple[str, ...], bool]


class PageGrid:
    """How pages are laid out in ``width`` px: cells of ``cell`` px, ``pages_per_cell`` pages in each. Knows no Qt."""

    def __init__(self, num_pages: int, width: int) -> None:
        self.num_pages = num_pages
        self.pages_per_cell = 1
        for cell in range(LARGEST_CELL, SMALLEST_CELL - 1, -1):
            self.cell, self.columns = cell, max(1, (width + 1) // cell)
            if self.num_rows * cell <= MAX_HEIGHT:
                return
        most = self.columns * (MAX_HEIGHT // self.cell)
        self.pages_per_cell = math.ceil(num_pages / most)

    @property
    def num_cells(self) -> int:
        return math.ceil(self.num_pages / self.pages_per_cell)

    @property
    def num_rows(self) -> int:
        return math.ceil(self.num_cells / self.columns)

    @property
    def height(self) -> int:
        return max(self.cell, self.num_rows * self.cell)

    def place(self, index: int) -> tuple[int, int]:
        """Top left corner of cell ``index``."""
        row, column = divmod(index, self.columns)
        return column * self.cell, row * self.cell

    def index_at(self, x: int, y: int) -> int | None:
        column = x // self.cell
        index = (y // self.cell) * self.columns + column
        return index if 0 <= column < self.columns and 0 <= index < self.num_cells else None


class PageMapView(QWidget):
    """Shows a PageMap. ``colour_of`` and ``name_of`` say which colour and chat stand behind a request id.

    Attributes:
        num_painted: cells painted by the last `show_map`; tests count it.
    """

    def __init__(
        self,
        colour_of: Callable[[int], str],
        name_of: Callable[[int], str],
        meter: Meter,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.num_painted = 0
        self._colour_of, self._name_of, self._meter = colour_of, name_of, meter
        self._map: PageMap | None = None
        self._drawn: PageMap | None = None
        self._grid = PageGrid(0, 1)
        self._looks: list[Look] = []
        self._pixmap = QPixmap()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(LARGEST_CELL)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setAccessibleName("KV page map")

    # ---- what it shows

    def show_map(self, pages: PageMap | None) -> None:
        """Take ``pages`` (page 0 is padding and left out) and paint the cells that differ from the last."""
        self._map = pages
        num_pages = max(0, len(pages.owners) - 1) if pages else 0
        if num_pages != self._grid.num_pages or self._pixmap.isNull():
            self._lay_out(num_pages)
        self._paint_changes()

    def restyle(self) -> None:
        self._lay_out(self._grid.num_pages)
        self._paint_changes()

    def look_of(self, page: int) -> Look:
        """Colours of the owners of ``page`` (or of what it is), and whether it is reserved but empty."""
        assert self._map is not None
        owner = self._map.owners[page]
        stranded = page in self._map.stranded
        if owner == SHARED:
            sharers = self._map.sharers.get(page, ())
            colours = list(dict.fromkeys(self._colour_of(request) for request in sharers))[:3]
            if len(colours) < 2:  # not told by whom, or one chat's own requests: a mark of its own
                return (colours[0] if colours else page_colour("shared"), theme.current().text), stranded
            return tuple(colours), stranded
        if owner > 0:
            return (self._colour_of(owner),), stranded
        return (page_colour("cached" if owner == CACHED else "free"),), stranded

    def words_for(self, page: int) -> str:
        """What the tooltip says of ``page``."""
        assert self._map is not None
        owner = self._map.owners[page]
        if owner == SHARED:
            names = dict.fromkeys(self._name_of(request) for request in self._map.sharers.get(page, ()))
            held = f"shared by {' and '.join(names)}" if names else "shared by several chats"
        elif owner > 0:
            held = f"held by {self._name_of(owner)}"
        else:
            held = "cached: kept for a prompt that begins the same way" if owner == CACHED else "free"
        empty = ", reserved but still empty" if page in self._map.stranded else ""
        return f"Page {page}: {held}{empty}"

    # ---- painting

    def _lay_out(self, num_pages: int) -> None:
        self._grid = PageGrid(num_pages, max(1, self.width()))
        self._looks = []
        self._drawn = None
        ratio = self.devicePixelRatioF()
        size = QSize(max(1, self.width()), self._grid.height)
        self._pixmap = QPixmap(size * ratio)
        self._pixmap.setDevicePixelRatio(ratio)
        self._pixmap.fill(QColor(theme.current().panel))
        self.setFixedHeight(self._grid.height)
        self.update()

    def _paint_changes(self) -> None:
        self.num_painted = 0
        if self._map is None or self._grid.num_pages == 0 or self._same_as_drawn():
            return
        looks = self._new_looks()
        changed = [i for i, look in enumerate(looks) if i >= len(self._looks) or self._looks[i] != look]
        if not changed:
            return
        painter = QPainter(self._pixmap)
        region = QRect()
        for index in changed:
            x, y = self._grid.place(index)
            cell = QRect(x, y, self._grid.cell - 1, self._grid.cell - 1)
            _paint_cell(painter, cell, looks[index])
            region = region.united(cell)
        painter.end()
        self._looks, self.num_painted = looks, len(changed)
        self.update(region)

    def _same_as_drawn(self) -> bool:
        same = self._map == self._drawn
        self._drawn = self._map
        return same

    def _new_looks(self) -> list[Look]:
        """One look per cell; a cell of several pages looks like the busiest kind among them."""
        assert self._map is not None
        known: dict[tuple[int, bool], Look] = {}
        looks: list[Look] = []
        owners, stranded, per_cell = self._map.owners, self._map.stranded, self._grid.pages_per_cell
        for first in range(1, len(owners), per_cell):
            page = first if per_cell == 1 else max(range(first, min(first + per_cell, len(owners))), key=self._weight)
            if owners[page] == SHARED:
                looks.append(self.look_of(page))
                continue
            key = (owners[page], page in stranded)
            if key not in known:
                known[key] = self.look_of(page)
            looks.append(known[key])
        return looks

    def _weight(self, page: int) -> int:
        assert self._map is not None
        owner = self._map.owners[page]
        return {FREE: 0, PADDING: 0, CACHED: 1, SHARED: 3}.get(owner, 2)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        with self._meter:
            painter = QPainter(self)
            if self._pixmap.isNull():
                painter.fillRect(self.rect(), QColor(theme.current().panel))
            painter.drawPixmap(0, 0, self._pixmap)
            painter.end()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._lay_out(self._grid.num_pages)
            self._paint_changes()

    def sizeHint(self) -> QSize:  # noqa: N802
        return QSize(280, self._grid.height)

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            words = self._words_at(event.pos())
            if words:
                QToolTip.showText(event.globalPos(), words, self)
                return True
        return super().event(event)

    def _words_at(self, place: QPoint) -> str:
        index = self._grid.index_at(place.x(), place.y())
        if index is None or self._map is None:
            return ""
        return self.words_for(1 + index * self._grid.pages_per_cell)


def _paint_cell(painter: QPainter, cell: QRect, look: Look) -> None:
    """One colour fills the cell; several share it as stripes; stranded cells are hatched."""
    colours, stranded = look
    part = cell.height() / len(colours)
    for i, colour in enumerate(colours):
        top = cell.top() + round(i * part)
        bottom = cell.top() + round((i + 1) * part)
        painter.fillRect(QRect(cell.left(), top, cell.width(), bottom - top), QColor(colour))
    if stranded:
        ground = theme.current().panel
        painter.fillRect(cell, QColor(blend(colours[0], ground, 0.3)))
        painter.setPen(QColor(colours[0]))
        painter.drawLine(cell.bottomLeft(), cell.topRight())
        painter.drawLine(cell.left(), cell.center().y(), cell.center().x(), cell.top())
        painter.drawLine(cell.center().x(), cell.bottom(), cell.right(), cell.center().y())
