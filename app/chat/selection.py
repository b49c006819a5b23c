"""Text selected over many rows, and the plain text of it. Knows no widget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.chat.blocks import Row, Splice
from app.chat.markdown import BlockKind

END = 1 << 30  # "to the end of the row", whatever its length becomes


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A place between two characters of a row's document."""

    row: int
    position: int


@dataclass(frozen=True, slots=True)
class Selection:
    """From where the drag began to where it is now; either may come first."""

    anchor: Point
    head: Point

    @property
    def first(self) -> Point:
        return min(self.anchor, self.head)

    @property
    def last(self) -> Point:
        return max(self.anchor, self.head)

    @property
    def is_empty(self) -> bool:
        return self.anchor == self.head

    def span(self, row: int) -> tuple[int, int] | None:
        """The selected document positions of ``row``, or None."""
        first, last = self.first, self.last
        if self.is_empty or not first.row <= row <= last.row:
            return None
        return first.position if row == first.row else 0, last.position if row == last.row else END

    def after(self, splice: Splice) -> Selection | None:
        """The selection when rows were replaced: rows that only grew keep it, rows below move along."""
        anchor, head = _moved(self.anchor, splice), _moved(self.head, splice)
        return Selection(anchor, head) if anchor is not None and head is not None else None


def _moved(point: Point, splice: Splice) -> Point | None:
    if point.row < splice.start:
        return point
    if point.row >= splice.start + splice.removed:
        return Point(point.row + splice.inserted - splice.removed, point.position)
    if point.row - splice.start < splice.inserted:
        return point
    return None


def text_of(rows: Sequence[Row], selection: Selection, plain: Callable[[Row, int, int], str]) -> str:
    """The selected text, messages and blocks set apart by empty lines.

    plain: text of a row's document between two positions.
    """
    parts: list[str] = []
    before: Row | None = None
    for index in range(selection.first.row, selection.last.row + 1):
        row, span = rows[index], selection.span(index)
        if span is None or not row.is_selectable:
            continue
        piece = _piece(row, span, plain)
        if before is not None:
            parts.append(_separator(before, row))
        parts.append(piece)
        before = row
    return "".join(parts)


def _piece(row: Row, span: tuple[int, int], plain: Callable[[Row, int, int], str]) -> str:
    block = row.block
    is_whole = span[0] == 0 and span[1] == END
    if block is not None and block.kind is BlockKind.RULE:
        return "---"
    text = block.text if block is not None and is_whole and block.text else plain(row, *span)
    if block is not None and block.marker and span[0] == 0:
        text = f"{'   ' * (block.indent - 1)}{block.marker} {text}"
    return text


def _separator(before: Row, row: Row) -> str:
    a, b = before.block, row.block
    if a is None or b is None or before.message_id != row.message_id:
        return "\n\n"
    if b.continues and b.kind in (BlockKind.CODE, BlockKind.PLAIN):
        return "\n"
    if b.continues:
        return " "
    return "\n" if a.indent and b.marker else "\n\n"
