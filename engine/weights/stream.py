"""The two checks every weight passes on its way in: the file does not end early, and the number is finite."""

from __future__ import annotations

import math
from typing import BinaryIO

import torch
from torch import Tensor


def read_exactly(file: BinaryIO, out: memoryview, file_name: str, tensor_name: str) -> None:
    """Fill ``out`` from ``file``; ValueError when the file ends first (it was cut after it was opened) or the disk fails."""
    done = 0
    while done < len(out):
        try:
            count = file.readinto(out[done:])  # type: ignore[attr-defined]
        except OSError as error:
            raise ValueError(f"{file_name} cannot be read: {error.strerror or error}. Check the disk.") from error
        if not count:
            raise ValueError(
                f"{file_name} ended in the middle of tensor {tensor_name}. Did the file change? Download it again."
            )
        done += count


def check_finite(values: Tensor, file_name: str, tensor_name: str) -> None:
    """ValueError when a weight is NaN or infinite: such a model can only answer nonsense.

    A sum (in fp32: fp16 ends at 65504) meets every NaN and infinity in one pass without a copy; it may overflow on its own, so a bad sum is
    confirmed element by element.
    """
    if math.isfinite(float(values.float().sum())) or bool(torch.isfinite(values).all()):
        return
    raise ValueError(
        f"{file_name}: tensor {tensor_name} holds weights that are not numbers (NaN or infinite). "
        "The file is damaged or was converted badly; download it again or choose another conversion."
    )
