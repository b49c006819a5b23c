"""Integer weights for the C kernels: int4 with a scale and a minimum per 32, 64 or 128 weights, int8 with a scale per 32.

Activations come and go in fp32; inside a product they are int8 with a scale per 32 (dynamic quantization, as in llama.cpp's Q8_1). A row's
result is the same alone and in a batch. The layout is described in linear.h.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.ops.cpu import native
from engine.ops.cpu.arena import Arena
from engine.ops.interface import Packed
from engine.weights.quantize import INT4_GROUPS, has_short_grids

SCHEMES = {"none": 1, "int4": 4, "int4_g64": 5, "int4_g128": 6, "int8": 8}  # scheme -> enum rl_kind
_PRECISE, _LIKELY = 64, 128  # RL_PRECISE and RL_LIKELY of linear.h
DAMAGED = "A weight matrix holds NaN or infinite values. The model file is damaged; download it again."
_arena = Arena()


@dataclass(frozen=True, slots=True)
class NativePacked(Packed):
    """``Packed`` whose ``data`` is one uint8 tensor in the C kernels' layout, with what a call passes made once.

    kind: how the weights lie; product_kind: the same for rl_linear, with whether activations keep 16 bits.
    """

    kind: int
    product_kind: int
    weights: int  # address of data[0], or of a table of the parts
    bias_address: int | None
    parts: tuple[NativePacked, ...] = ()  # where stretches of rows are packed in different ways: each of them
    table: object = None  # kept alive with the parts

    @property
    def num_passes(self) -> int:
        return 2 if self.product_kind & _PRECISE else 1


@cache
def _entry(name: str) -> Any:
    types = {
        "rl_linear": (c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
        "rl_pack": (c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p),
        "rl_rows": (c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p),
        "rl_packed_bytes": (c_int64, c_int64, c_int64),
    }
    return native.function(name, *types[name])


def path(scheme: str, sensitive: bool = False) -> str:
    activations = "fp32" if scheme == "none" else "int16" if sensitive else "int8"
    return f"{scheme}: C kernel ({native.isa()}), {activations} activations"


def pack(weight: Tensor, bias: Tensor | None, scheme: str, sensitive: bool = False) -> NativePacked:
    """Lay weight [out, in], any float dtype, out for the kernels. ``sensitive``: activations beside integers keep 16 bits, not 8.

    ValueError when it holds NaN or infinity.
    """
    weight = weight.float().contiguous()
    out_features, in_features = weight.shape
    kind = SCHEMES[scheme]
    sensitive = sensitive and scheme != "none"
    packed = new_packed(kind, out_features, in_features)
    search = scheme in INT4_GROUPS and has_short_grids(weight, INT4_GROUPS[scheme])
    if _entry("rl_pack")(kind, weight.data_ptr(), out_features, in_features, int(search), packed.data_ptr()) < 0:
        raise ValueError(DAMAGED)
    matrix = NativePacked(
        scheme,
        out_features,
        in_features,
        (packed,),
        None,
        packed.nbytes,
        path(scheme, sensitive),
        kind,
        kind,
        packed.data_ptr(),
        None,
    )
    return complete(matrix, bias, sensitive)


def new_packed(kind: int, out_features: int, in_features: int) -> Tensor:
    """Uninitialized room for a matrix of this kind (enum rl_kind)."""
    return _arena.new(_entry("rl_packed_bytes")(kind, out_features, in_features))


def complete(packed: NativePacked, bias: Tensor | None, sensitive: bool) -> NativePacked:
    """``packed`` with the bias its products add, and its activations in 16 bits where they are sensitive."""
    kind = packed.kind | (_PRECISE if sensitive else 0)
    if bias is None:
        return replace(packed, product_kind=kind)
    bias = bias.float().contiguous()
    num_bytes = packed.num_bytes + bias.nbytes
    return replace(packed, product_kind=kind, bias=bias, bias_address=bias.data_ptr(), num_bytes=num_bytes)


def for_logits(packed: NativePacked) -> NativePacked:
    """The same matrix as a head: what is fed to its products keeps 16 bits where the outcome is a likely token, 8 elsewhere."""
    if packed.kind == SCHEMES["none"]:
        return packed
    return replace(packed, product_kind=packed.kind | _LIKELY, path=f"{packed.path}, int16 for likely tokens")


def unpack(packed: NativePacked) -> Tensor:
    """The weights that ``packed`` stands for, fp32 [out, in]."""
    if packed.parts:
        return torch.cat([unpack(part) for part in packed.parts])
    out = torch.empty(packed.out_features, packed.in_features)
    _entry("rl_rows")(packed.kind, packed.weights, packed.in_features, None, packed.out_features, out.data_ptr())
    return out


def rows(packed: NativePacked, ids: Tensor) -> Tensor:
    """Rows ids [T] (int64) of the matrix: fp32 [T, in]. ValueError for an id that is no row."""
    ids = ids.contiguous()
    values = ids.tolist()
    if values and not (min(values) >= 0 and max(values) < packed.out_features):
        raise ValueError(f"Row ids must be between 0 and {packed.out_features - 1}.")
    out = torch.empty(ids.shape[0], packed.in_features)
    if packed.parts:
        first = 0
        for part in packed.parts:
            its = (ids >= first) & (ids < first + part.out_features)
            out[its] = rows(part, ids[its] - first)
            first += part.out_features
        return out
    _entry("rl_rows")(packed.kind, packed.weights, packed.in_features, ids.data_ptr(), ids.shape[0], out.data_ptr())
    return out


def linear(x: Tensor, packed: NativePacked, residual: Tensor | None = None) -> Tensor:
    """x [N, in] @ weight.T + bias (+ residual fp32 [N, out]) -> fp32 [N, out]."""
    x = x.float().contiguous()
    num_rows = x.shape[0]
    assert x.shape[1] == packed.in_features
    out = torch.empty(num_rows, packed.out_features)
    residual_address = None
    if residual is not None:
        residual = residual.float().contiguous()
        residual_address = residual.data_ptr()
    code = _entry("rl_linear")(
        packed.product_kind,
        packed.weights,
        packed.out_features,
        packed.in_features,
        x.data_ptr(),
        num_rows,
        packed.bias_address,
        residual_address,
        out.data_ptr(),
    )
    if code < 0:
        raise MemoryError(f"No memory for the activations of {num_rows} rows.")
    return out
