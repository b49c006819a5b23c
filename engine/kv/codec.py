"""Keys and values in 8 or 4 bits: one scale per head and token, so that a token is written once and never touched again.

int8  symmetric: code = round(x / scale), scale = largest |x| / 127.
int4  asymmetric: code = round((x - minimum) / scale), 0 to 15, two codes to a byte (even channel low).

Channels that are always large would take the whole range of codes for themselves. Two remedies, neither of which changes
attention: channels are divided by a size known from the weights (``ChannelScales``), and 4-bit keys are rotated by a
Hadamard matrix, which spreads what is large over all channels (QuaRot, Ashkboos 2024). Whoever reads codes multiplies
the query by the sizes and rotates it too: (q s H) . (k / s H) = q . k, since H is orthogonal.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]  # of one token's head: codes, then scale, then minimum; each [..., its size]
_SMALLEST_SCALE = 1e-7  # fp16 has no smaller; a head of zeros has codes of zero, whatever its scale


class ChannelScales(NamedTuple):
    """How large each channel of a layer's keys and values is, relative to the others: fp32 [K, D] each."""

    keys: Tensor
    values: Tensor


class Codec(Protocol):
    """How one head's key or value is stored. ``parts``: (size, dtype) of each tensor that holds it."""

    parts: tuple[tuple[int, torch.dtype], ...]
    rotates_keys: bool

    def encode(self, x: Tensor) -> Parts:
        """x [..., D] -> what is stored of it."""
        ...

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The x [..., D] that ``parts`` stand for."""
        ...


class Native:
    """Kept as computed."""

    rotates_keys = False

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        self.parts: tuple[tuple[int, torch.dtype], ...] = ((head_dim, dtype),)

    def encode(self, x: Tensor) -> Parts:
        return (x,)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)


class Int8:
    rotates_keys = False

    def __init__(self, head_dim: int) -> None:
        self.parts: tuple[tuple[int, torch.dtype], ...] = ((head_dim, torch.int8), (1, torch.float16))

    def encode(self, x: Tensor) -> Parts:
        x = x.float()
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(_SMALLEST_SCALE).half()
        codes = (x / scale.float()).round_().clamp_(-127, 127).to(torch.int8)
        return codes, scale

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        codes, scale = parts
        return codes.to(dtype) * scale.to(dtype)


class Int4:
    rotates_keys = True

    def __init__(self, head_dim: int) -> None:
        assert head_dim % 2 == 0, head_dim
        self.parts: tuple[tuple[int, torch.dtype], ...] = (
            (head_dim // 2, torch.uint8),
            (1, torch.float16),
            (1, torch.float16),
        )

    def encode(self, x: Tensor) -> Parts:
        x = x.float()
        low, high = x.amin(-1, keepdim=True).half(), x.amax(-1, keepdim=True)
        scale = ((high - low.float()) / 15).clamp_min(_SMALLEST_SCALE).half()
        codes = ((x - low.float()) / scale.float()).round_().clamp_(0, 15).to(torch.uint8)
        return codes[..., 0::2] | (codes[..., 1::2] << 4), scale, low

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        packed, scale, low = parts
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        return torch.addcmul(low.to(dtype), codes.to(dtype), scale.to(dtype))


def codec_for(kv_dtype: str, head_dim: int, native: torch.dtype) -> Codec:
    """The codec of a ``kv_dtype`` switch value; ValueError for another word."""
    match kv_dtype:
        case "native":
            return Native(head_dim, native)
        case "int8":
            return Int8(head_dim)
        case "int4":
            return Int4(head_dim)
    raise ValueError(f"Keys and values cannot be kept as {kv_dtype!r}. Choose native, int8 or int4.")


def rotate(x: Tensor) -> Tensor:
    """x [..., D] times a Hadamard matrix, orthonormal and its own inverse: a head whose size is no power of two turns in
    blocks of the largest power of two that divides it."""
    block = x.shape[-1] & -x.shape[-1]
    matrix = _hadamard(block, x.dtype)
    return (x.unflatten(-1, (-1, block)) @ matrix).flatten(-2)


@functools.cache
def _hadamard(size: int, dtype: torch.dtype) -> Tensor:
    """Sylvester's construction, [size, size], rows of unit length."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix * size**-0.5).to(dtype)
