"""Weights as GGUF's 4-bit types hold them: 16 points per row and group of 32 columns, made of numbers of 16 bits."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from engine.weights.quantize import INT4_GROUP


def as_stored_in_4_bits(weight: Tensor, kind: Literal["q4_1", "q4_0"]) -> Tensor:
    """``weight`` [rows, in] rounded to such points, fp32; in is a multiple of 32.

    q4_1: a group's points reach from its smallest to its largest weight. q4_0: from -8 to 7 steps, whatever they are.
    """
    part = weight.unflatten(1, (-1, INT4_GROUP))
    if kind == "q4_1":
        minimum = part.amin(2, keepdim=True).half().float()
        step = ((part.amax(2, keepdim=True) - minimum) / 15).half().float()
    else:
        step = (part.abs().amax(2, keepdim=True) / 8).half().float()
        minimum = -8 * step
    return (minimum + ((part - minimum) / step).round().clamp(0, 15) * step).flatten(1)
