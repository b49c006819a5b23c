"""Drawing time plots into an array of pixels, a whole curve per operation. Knows no Qt.

Measured on two cores of a Sapphire Rapids Xeon, three plots of 332x90: pyqtgraph 0.14 with fixed ranges and one curve
each 1.9 ms (240 points) to 2.9 ms (600); three stacked layers each drawn this way 0.9 ms. The panel may take no more
than 2 % of the machine, so that decides. A pixel is 0xFFRRGGBB (Qt's Format_RGB32).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint32]
Floats = NDArray[np.float64]


NOWHERE = 30_000  # a row beyond any plot


def pixel(colour: str) -> int:
    """ "#RRGGBB" -> 0xFFRRGGBB."""
    return 0xFF000000 | int(colour[1:], 16)


def blend(over: str, under: str, share: float) -> str:
    """``over`` laid on ``under`` with opacity ``share``."""
    mixed = (round(share * int(over[i : i + 2], 16) + (1 - share) * int(under[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{channel:02X}" for channel in mixed)


def ramp(over: str, under: str, steps: int = 16) -> Pixels:
    """``steps`` pixels from ``under`` to ``over``, for soft edges."""
    return np.array([pixel(blend(over, under, i / (steps - 1))) for i in range(steps)], dtype=np.uint32)


class Raster:
    """[height, width] pixels, and a cached background that each drawing starts from."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.pixels: Pixels = np.zeros((height, width), dtype=np.uint32)
        self.background: Pixels = np.zeros((height, width), dtype=np.uint32)
        self._rows = np.arange(height, dtype=np.float32)[:, None]
        self._row_numbers = np.arange(height, dtype=np.int16)[:, None]

    def clear(self) -> None:
        np.copyto(self.pixels, self.background)

    def fill(self, top: Floats, bottom: Floats, colour: int) -> None:
        """Columns filled from y ``top`` to y ``bottom`` (arrays [width], pixels from above). NaN fills nothing."""
        first, last = _row_numbers(top, NOWHERE), _row_numbers(bottom, -NOWHERE)
        from_row, to_row = max(0, int(first.min())), min(self.height, int(last.max()))
        if from_row >= to_row:
            return
        rows = self._row_numbers[from_row:to_row]
        mask = rows >= first
        mask &= rows < last
        np.copyto(self.pixels[from_row:to_row], np.uint32(colour), where=mask)

    def line(self, y: Floats, thickness: float, colours: Pixels) -> None:
        """A curve through y [width] (NaN: a gap), joined between columns, its edges softened with ``colours``."""
        if np.isnan(y).all():
            return
        before = np.concatenate((y[:1], y[:-1]))
        before = np.where(np.isnan(before), y, before)
        upper = (np.minimum(y, before) - thickness / 2).astype(np.float32)
        lower = (np.maximum(y, before) + thickness / 2).astype(np.float32)
        first = max(0, int(np.nanmin(upper)))
        last = min(self.height, int(np.nanmax(lower)) + 1)
        rows = self._rows[first:last]
        covered = np.minimum(rows + 1, lower) - np.maximum(rows, upper)
        np.nan_to_num(covered, copy=False)
        np.clip(covered, 0.0, 1.0, out=covered)
        level = (covered * (len(colours) - 1)).astype(np.uint8)
        np.copyto(self.pixels[first:last], colours[level], where=level > 0)


def _row_numbers(y: Floats, nowhere: int) -> NDArray[np.int16]:
    """Rows as whole numbers; NaN becomes ``nowhere``."""
    return np.where(np.isnan(y), nowhere, np.clip(np.rint(y), -NOWHERE, NOWHERE)).astype(np.int16)
