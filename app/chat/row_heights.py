"""Heights and offsets of rows. A row not seen yet has an estimate; what is in sight is measured. Knows no Qt."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class RowHeights:
    """Heights in pixels, top to bottom; offsets are summed lazily from the first row that changed."""

    def __init__(self) -> None:
        self._heights: list[float] = []
        self._measured = bytearray()
        self._offsets: list[float] = [0.0]  # offsets[i] = top of row i; valid up to len - 1

    def __len__(self) -> int:
        return len(self._heights)

    def splice(self, start: int, removed: int, estimates: Sequence[float]) -> None:
        self._heights[start : start + removed] = estimates
        self._measured[start : start + removed] = bytes(len(estimates))
        self._stale_from(start)

    def set_measured(self, row: int, height: float) -> bool:
        """Record the true height; returns whether it differs from what was assumed."""
        self._measured[row] = 1
        if self._heights[row] == height:
            return False
        self._heights[row] = height
        self._stale_from(row)
        return True

    def is_measured(self, row: int) -> bool:
        return bool(self._measured[row])

    def height(self, row: int) -> float:
        return self._heights[row]

    def top(self, row: int) -> float:
        """Top of ``row``; ``len(self)`` is allowed and gives the total."""
        self._sum()
        return self._offsets[row]

    @property
    def total(self) -> float:
        return self.top(len(self._heights))

    def row_at(self, y: float) -> int:
        """The row that covers ``y``, clamped to the first and last; -1 when there are no rows."""
        if not self._heights:
            return -1
        self._sum()
        return max(0, min(bisect_right(self._offsets, y) - 1, len(self._heights) - 1))

    def _stale_from(self, row: int) -> None:
        del self._offsets[row + 1 :]

    def _sum(self) -> None:
        offsets, heights = self._offsets, self._heights
        if len(offsets) > len(heights):
            return
        total = offsets[-1]
        for height in heights[len(offsets) - 1 :]:
            total += height
            offsets.append(total)
