"""Weights that a safetensors folder stores already quantized: GPTQ, AWQ and bitsandbytes (NF4 and LLM.int8), 4 or 8 bits.

Each quantized matrix is stored as several tensors beside where ``X.weight`` would stand; here it is one again, dequantized to fp32
when it is read, so that the rest of loading knows nothing of it and packs it as the ``weights`` switch says.

    GPTQ  X.qweight int32 [in / 8, out], eight values of a column per word; X.qzeros [groups, out / 8]; X.scales [groups, out]; X.g_idx [in]
    AWQ   X.qweight int32 [in, out / 8], eight columns per word, interleaved; X.qzeros, X.scales as above
    NF4   X.weight uint8 [numel / 2, 1], two values per byte, the first one high; X.weight.absmax per block, and a JSON of its shape
    int8  X.weight int8 [out, in]; X.SCB fp32 [out], the largest magnitude of each row
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.spec_from_config import READABLE_QUANTIZATIONS
from engine.weights.safetensors_header import StoredTensor
from engine.weights.stream import read_exactly

_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that nibble i of a word holds
_NF4_STATE = ".quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, slots=True)
class Quantized:
    """One matrix. shape: [out, in]; ``read`` gives it in fp32."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def find(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, Quantized]:
    """Name of the weight -> the quantized matrix that stands for it.

    config: the model's ``quantization_config``. ValueError for a method or a number of bits that cannot be read.
    """
    method = str(config.get("quant_method", ""))
    if method == "bitsandbytes":
        return {**_nf4_matrices(tensors), **_int8_matrices(tensors)}
    bits = config.get("bits", 4)
    if method not in READABLE_QUANTIZATIONS or bits != 4:
        raise ValueError(
            f"These weights are quantized with {method or 'an unnamed method'} at {bits} bits; 4-bit GPTQ and AWQ and bitsandbytes can be "
            "read. Get the original weights, or a GGUF file."
        )
    stems = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    if method == "awq":
        return {f"{stem}.weight": _awq(tensors, stem) for stem in stems}
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1  # the first version stores zeros less one
    return {f"{stem}.weight": _gptq(tensors, stem, offset) for stem in stems}


def _gptq(tensors: Mapping[str, StoredTensor], stem: str, offset: int) -> Quantized:
    rows, out = tensors[f"{stem}.qweight"].shape

    def read() -> Tensor:
        values = _nibbles(_load(tensors, f"{stem}.qweight")).permute(0, 2, 1).reshape(rows * 8, out)
        zeros = _nibbles(_load(tensors, f"{stem}.qzeros")).flatten(1) + offset
        scales = _load(tensors, f"{stem}.scales").float()
        groups = _groups(tensors, stem, rows * 8, len(scales))
        return ((values - zeros[groups]).float() * scales[groups]).T

    return Quantized((out, rows * 8), read)


def _groups(tensors: Mapping[str, StoredTensor], stem: str, num_inputs: int, num_groups: int) -> Tensor:
    """The group of each input: stored where inputs were reordered, else in stretches of equal length."""
    if f"{stem}.g_idx" in tensors:
        return _load(tensors, f"{stem}.g_idx").long()
    return torch.arange(num_inputs) // (num_inputs // num_groups)


def _awq(tensors: Mapping[str, StoredTensor], stem: str) -> Quantized:
    num_inputs, words = tensors[f"{stem}.qweight"].shape

    def read() -> Tensor:
        values, zeros = (_in_awq_order(_load(tensors, f"{stem}.{part}")) for part in ("qweight", "qzeros"))
        scales = _load(tensors, f"{stem}.scales").float()
        groups = torch.arange(num_inputs) // (num_inputs // len(scales))
        return ((values - zeros[groups]).float() * scales[groups]).T

    return Quantized((words * 8, num_inputs), read)


def _in_awq_order(words: Tensor) -> Tensor:
    return _nibbles(words)[:, :, torch.tensor(_AWQ_ORDER).argsort()].flatten(1)


def _nibbles(words: Tensor) -> Tensor:
    """int32 [a, b] -> the eight 4-bit values of each word, lowest first, int32 [a, b, 8]."""
    return (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15


def _nf4_matrices(tensors: Mapping[str, StoredTensor]) -> dict[str, Quantized]:
    found = {}
    for name in (name.removesuffix(_NF4_STATE) for name in tensors if name.endswith(_NF4_STATE)):
        state = json.loads(bytes(_load(tensors, name + _NF4_STATE).tolist()))
        found[name] = _nf4(tensors, name, state)
    return found


def _nf4(tensors: Mapping[str, StoredTensor], name: str, state: Mapping[str, Any]) -> Quantized:
    shape = tuple(state["shape"])

    def read() -> Tensor:
        packed = _load(tensors, name).flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten().long()
        values = _load(tensors, f"{name}.quant_map").float()[codes][: shape[0] * shape[1]]
        scales = _absmax(tensors, name, state)
        block = torch.arange(values.numel()) // int(state["blocksize"])
        return (values * scales[block]).view(shape)

    return Quantized(shape, read)


def _absmax(tensors: Mapping[str, StoredTensor], name: str, state: Mapping[str, Any]) -> Tensor:
    """The scale of each block; with double quantization they are codes with scales of their own."""
    stored = _load(tensors, f"{name}.absmax")
    if f"{name}.nested_absmax" not in tensors:
        return stored.float()
    outer = _load(tensors, f"{name}.nested_absmax").float()
    block = torch.arange(stored.numel()) // int(state["nested_blocksize"])
    return _load(tensors, f"{name}.nested_quant_map").float()[stored.long()] * outer[block] + state["nested_offset"]


def _int8_matrices(tensors: Mapping[str, StoredTensor]) -> dict[str, Quantized]:
    names = [name.removesuffix(".SCB") + ".weight" for name in tensors if name.endswith(".SCB")]
    return {name: _int8(tensors, name) for name in names}


def _int8(tensors: Mapping[str, StoredTensor], name: str) -> Quantized:
    def read() -> Tensor:
        scales = _load(tensors, name.removesuffix(".weight") + ".SCB").float() / 127
        return _load(tensors, name).float() * scales.unsqueeze(1)

    return Quantized(tensors[name].shape, read)


def _load(tensors: Mapping[str, StoredTensor], name: str) -> Tensor:
    """One stored tensor as it is. ValueError where it is missing or of a dtype that no method uses."""
    stored = tensors.get(name)
    if stored is None or stored.dtype not in _DTYPES:
        what = "is missing" if stored is None else f"is stored as {stored.dtype}"
        raise ValueError(f"The quantized weights are incomplete: {name} {what}. Download the model again.")
    out = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
    with stored.file.open("rb") as file:
        file.seek(stored.offset)
        read_exactly(file, out.view(-1).view(torch.uint8).numpy().data, stored.file.name, name)
    return out
