"""GGUF's blocks for the C kernels: put in another order at load, at the bits and values they are stored with."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

from torch import Tensor

from engine.ops.cpu import native
from engine.ops.cpu.native import linear
from engine.ops.cpu.native.linear import NativePacked
from engine.weights.stored import StoredRows

MOST_PARTS = 4  # RL_MOST_PARTS of linear.h
_PARTS = 32  # RL_PARTS


class _Part(ctypes.Structure):
    _fields_ = (("kind", c_int64), ("out_features", c_int64), ("weights", c_void_p))


class _Parts(ctypes.Structure):
    """rl_parts of linear.h."""

    _fields_ = (("count", c_int64), ("part", _Part * MOST_PARTS))


@cache
def _entry(name: str) -> Any:
    types = {
        "rl_stored_kind": (c_int64,),
        "rl_repack": (c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    }
    return native.function(name, *types[name])


def pack(stored: Sequence[StoredRows], bias: Tensor | None, scheme: str, sensitive: bool = False) -> NativePacked:
    """The matrix whose rows ``stored`` holds, one stretch below the other. scheme: what it is called.

    Nothing is rounded: ``linear.unpack`` gives the bits of the gguf package's decoders. ``sensitive`` as for ``linear.pack``.
    ValueError when a scale is NaN or infinite.
    """
    names = " + ".join(dict.fromkeys(rows.type_name for rows in stored))
    path = linear.path(f"{scheme} {names}" if scheme == "as_stored" else scheme, sensitive)
    parts = tuple(_pack_alike(alike, scheme, path) for alike in _alike(stored))
    if len(parts) == 1:
        return linear.complete(parts[0], bias, sensitive)
    assert len(parts) <= MOST_PARTS
    table = _Parts(len(parts), tuple((part.kind, part.out_features, part.weights) for part in parts))
    whole = NativePacked(
        scheme,
        sum(part.out_features for part in parts),
        parts[0].in_features,
        tuple(tensor for part in parts for tensor in part.data),
        None,
        sum(part.num_bytes for part in parts),
        path,
        _PARTS,
        _PARTS,
        ctypes.addressof(table),
        None,
        parts,
        table,
    )
    return linear.complete(whole, bias, sensitive)


def _alike(stored: Sequence[StoredRows]) -> list[list[StoredRows]]:
    """Neighbours of the same type together."""
    found: list[list[StoredRows]] = []
    for rows in stored:
        if found and found[-1][0].ggml_type == rows.ggml_type:
            found[-1].append(rows)
        else:
            found.append([rows])
    return found


def _pack_alike(stored: Sequence[StoredRows], scheme: str, path: str) -> NativePacked:
    """Rows of one type as one matrix."""
    in_features = stored[0].in_features
    kind = int(_entry("rl_stored_kind")(stored[0].ggml_type))
    out_features = sum(rows.num_rows for rows in stored)
    packed = linear.new_packed(kind, out_features, in_features).zero_()
    first_row = 0
    for rows in stored:
        assert rows.blocks.is_contiguous()
        arguments = (rows.blocks.data_ptr(), rows.num_rows, in_features, first_row, packed.data_ptr())
        code = _entry("rl_repack")(rows.ggml_type, *arguments)
        assert code != -2, f"{rows.type_name} with {in_features} inputs is not kept"
        if code < 0:
            raise ValueError(linear.DAMAGED)
        first_row += rows.num_rows
    return NativePacked(
        scheme, out_features, in_features, (packed,), None, packed.nbytes, path, kind, kind, packed.data_ptr(), None
    )
