"""Keys and values in fewer bits: one scale per head and token, so that a token is written once and never touched again.

int8  symmetric: code = round(x / scale), scale = largest |x| / 127.
int4  asymmetric: code = round((x - minimum) / scale). Values have 4 bits. Keys have 6: their rounding passes through the
      softmax and moves the text an order of magnitude more than that of values (KVTuner, Li 2025, finds the same).

Channels that are always large would take the whole range of codes for themselves. Two remedies, neither of which changes
attention: channels are divided by a size known from the weights (``ChannelScales``), and under int4 heads are rotated by
a Hadamard matrix, which spreads what is large over all channels (QuaRot, Ashkboos 2024). Whoever reads codes multiplies
the query by the sizes and rotates it too: (q s H) . (k / s H) = q . k, since H is orthogonal; and turns what attention
gives back the other way.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kv.layout import reason_against

Parts = tuple[Tensor, ...]  # of one token's head: codes, then scale (and minimum); each [..., its size]
_SMALLEST_SCALE = 1e-7  # fp16 has no smaller; a head of zeros has codes of zero, whatever its scale


class ChannelScales(NamedTuple):
    """How large each channel of a layer's keys and values is, relative to the others: fp32 [K, D] each."""

    keys: Tensor
    values: Tensor


class Codec(Protocol):
    """How one head's key or value is stored. ``parts``: (size, dtype) of each tensor that holds it.

    rotates: what is encoded are rotated heads.
    """

    parts: tuple[tuple[int, torch.dtype], ...]
    rotates: bool

    def encode(self, x: Tensor) -> Parts:
        """x [..., D] -> what is stored of it."""
        ...

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The x [..., D] that ``parts`` stand for."""
        ...


class KvCodec(NamedTuple):
    keys: Codec
    values: Codec


class Native:
    """Kept as computed."""

    rotates = False

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        self.parts: tuple[tuple[int, torch.dtype], ...] = ((head_dim, dtype),)

    def encode(self, x: Tensor) -> Parts:
        return (x,)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)


class Int8:
    rotates = False

    def __init__(self, head_dim: int) -> None:
        self.parts: tuple[tuple[int, torch.dtype], ...] = ((head_dim, torch.int8), (1, torch.float16))

    def encode(self, x: Tensor) -> Parts:
        x = x.float()
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(_SMALLEST_SCALE).half()
        codes = (x / scale.float()).round_().clamp_(-127, 127).to(torch.int8)
        return codes, scale

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        codes, scale = parts
        return (codes.float() * scale.float()).to(dtype)


class FewBits:
    """Codes of 4 or 6 bits; scale and minimum lie side by side.

    Byte i of D / 2 holds the lower 4 bits of channel i and, above them, those of channel i + D / 2. With 6 bits D / 4
    bytes follow, whose byte i holds the upper 2 bits of channels i, i + D / 4, i + D / 2, i + 3 D / 4, lowest first. So a
    kernel that loads neighbouring bytes has neighbouring channels, whatever it shifts out.
    """

    rotates = True

    def __init__(self, head_dim: int, bits: int) -> None:
        assert bits in (4, 6), bits
        assert head_dim % 4 == 0, head_dim
        self._half, self._quarter = head_dim // 2, head_dim // 4 if bits == 6 else 0
        self._largest = 2**bits - 1
        self.parts: tuple[tuple[int, torch.dtype], ...] = (
            (self._half + self._quarter, torch.uint8),
            (2, torch.float16),
        )

    def encode(self, x: Tensor) -> Parts:
        x = x.float()
        low, high = x.amin(-1, keepdim=True).half(), x.amax(-1, keepdim=True)
        scale = ((high - low.float()) / self._largest).clamp_min(_SMALLEST_SCALE).half()
        codes = ((x - low.float()) / scale.float()).round_().clamp_(0, self._largest).to(torch.uint8)
        first, second = (codes & 15).chunk(2, dim=-1)
        stored = [first | (second << 4)]
        if self._quarter:
            a, b, c, d = (codes >> 4).chunk(4, dim=-1)
            stored.append(a | (b << 2) | (c << 4) | (d << 6))
        return torch.cat(stored, dim=-1), torch.cat((scale, low), dim=-1)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        packed, (scale, low) = parts[0], parts[1].float().split(1, dim=-1)
        lower = packed[..., : self._half]
        codes = torch.cat((lower & 15, lower >> 4), dim=-1)
        if self._quarter:
            upper = packed[..., self._half :]
            codes = codes | torch.cat([((upper >> shift) & 3) << 4 for shift in (0, 2, 4, 6)], dim=-1)
        return torch.addcmul(low, codes.float(), scale).to(dtype)


def codec_for(kv_dtype: str, head_dim: int, native: torch.dtype) -> KvCodec:
    """The codecs of a ``kv_dtype`` switch value; ValueError for another word, or a head that it cannot hold."""
    reason = reason_against(kv_dtype, head_dim)
    if reason:
        raise ValueError(reason)
    match kv_dtype:
        case "native":
            return KvCodec(Native(head_dim, native), Native(head_dim, native))
        case "int8":
            return KvCodec(Int8(head_dim), Int8(head_dim))
        case "int4":
            return KvCodec(FewBits(head_dim, 6), FewBits(head_dim, 4))
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
