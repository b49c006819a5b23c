"""GGUF files as a WeightSource: dequantized to fp32, a slice of rows at a time.

Data are read, not mapped: a map would keep touched pages in resident memory, pin the file on Windows, and turn a
file that shrinks while we read into a crash instead of a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from engine.model.spec_from_gguf import eos_token_ids, permutes_q_and_k, spec_from_gguf
from engine.ops.cpu.native import dequantize as native
from engine.weights.canonical import Naming, layout, stacked
from engine.weights.ggml_types import block_of, can_dequantize, dequantize_rows, file_type_name
from engine.weights.gguf_header import GgufHeader, TensorInfo, read_header
from engine.weights.source import TokenizerFiles, UnsupportedArchitecture
from engine.weights.stored import KEPT_TYPES, StoredRows
from engine.weights.stream import check_finite, read_exactly

# Dequantized at a time. Below torch's threshold for starting threads, whose barriers stall when other programs are busy.
SLICE_WEIGHTS = (1 << 15) - 1
_HALVES: Mapping[int, torch.dtype] = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_Q8_0 = 8
_NOTHING_KEPT = (
    "This file stores its weights in a form that no product here takes as it is. "
    "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K can be kept."
)

NAMING = Naming(
    top={"embed": "token_embd.weight", "head": "output.weight", "final_norm": "output_norm.weight"},
    layer={
        "attn_norm": (("blk.{i}.attn_norm.weight",),),
        "qkv": (
            ("blk.{i}.attn_q.weight", "blk.{i}.attn_k.weight", "blk.{i}.attn_v.weight"),
            ("blk.{i}.attn_qkv.weight",),
        ),
        "qkv_bias": (
            ("blk.{i}.attn_q.bias", "blk.{i}.attn_k.bias", "blk.{i}.attn_v.bias"),
            ("blk.{i}.attn_qkv.bias",),
        ),
        "q_norm": (("blk.{i}.attn_q_norm.weight",),),
        "k_norm": (("blk.{i}.attn_k_norm.weight",),),
        "attn_out": (("blk.{i}.attn_output.weight",),),
        "attn_out_bias": (("blk.{i}.attn_output.bias",),),
        "post_attn_norm": (("blk.{i}.post_attention_norm.weight",),),
        "mlp_norm": (("blk.{i}.ffn_norm.weight",),),
        # Phi-3 files keep gate and up stacked under the name of up alone.
        "gate_up": (("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight"), ("blk.{i}.ffn_up.weight",)),
        "gate_up_bias": (("blk.{i}.ffn_gate.bias", "blk.{i}.ffn_up.bias"), ("blk.{i}.ffn_up.bias",)),
        "mlp_out": (("blk.{i}.ffn_down.weight",),),
        "mlp_out_bias": (("blk.{i}.ffn_down.bias",),),
        "post_mlp_norm": (("blk.{i}.post_ffw_norm.weight",),),
    },
)


class GgufSource:
    """One opened GGUF file. See ``WeightSource``."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        _check_whole_model(path, header)
        self._path = path
        self._tensors = header.tensors
        shapes = {name: info.shape for name, info in header.tensors.items()}
        self.spec = spec_from_gguf(header.metadata, shapes, self._vector, path.stem)
        self._layout = layout(self.spec, NAMING, shapes, path.name)
        for piece in (piece for pieces in self._layout.values() for piece in pieces):
            _check_decodable(path.name, header.tensors[piece.stored])
        self._permuted = permutes_q_and_k(header.metadata)
        self.eos_token_ids = eos_token_ids(header.metadata)
        self.tokenizer_files = TokenizerFiles("gguf", metadata=header.metadata)
        is_kept = any(self._types_of(name) <= KEPT_TYPES for name in self._layout)
        self.not_stored_packed = "" if is_kept else _NOTHING_KEPT
        self.stored_format = f"GGUF {_format_name(header)}"

    def names(self) -> frozenset[str]:
        return frozenset(self._layout)

    def read(self, name: str) -> Tensor:
        pieces = self._layout[name]
        out = torch.empty(stacked(piece.shape for piece in pieces), dtype=torch.float32)
        row = 0
        with self._path.open("rb") as file:
            for piece in pieces:
                self._fill(out[row : row + piece.shape[0]], file, self._tensors[piece.stored])
                row += piece.shape[0]
        if self._permuted and name.rpartition(".")[2] in ("qkv", "qkv_bias"):
            self._undo_interleaving(out[: self.spec.q_size + self.spec.kv_size])
        return out

    def read_stored(self, name: str, types: frozenset[int]) -> tuple[StoredRows, ...] | None:
        pieces = self._layout[name]
        if not self._types_of(name) <= types:
            return None
        stored, row = [], 0
        num_turned = self.spec.q_size + self.spec.kv_size if self._permuted and name.endswith(".qkv") else 0
        with self._path.open("rb") as file:
            for piece in pieces:
                rows = self._read_blocks(file, self._tensors[piece.stored])
                self._undo_interleaving(rows.blocks[: max(0, num_turned - row)])
                stored.append(rows)
                row += piece.shape[0]
        return tuple(stored)

    def stores_numbers(self, name: str) -> bool:
        return self._types_of(name) <= _HALVES.keys()

    def _types_of(self, name: str) -> set[int]:
        return {self._tensors[piece.stored].ggml_type for piece in self._layout[name]}

    def _read_blocks(self, file: BinaryIO, info: TensorInfo) -> StoredRows:
        block = block_of(info.ggml_type)
        assert block is not None  # the header was checked
        num_rows, columns = info.shape
        blocks = torch.empty(num_rows, columns // block.elements * block.bytes, dtype=torch.uint8)
        file.seek(info.offset)
        read_exactly(file, blocks.numpy().data.cast("B"), self._path.name, info.name)
        return StoredRows(info.ggml_type, block.name, columns, blocks)

    def _vector(self, name: str) -> tuple[float, ...]:
        """A small tensor of the file (rope_freqs and its kin) as numbers."""
        info = self._tensors[name]
        _check_decodable(self._path.name, info)
        values = torch.empty(info.shape, dtype=torch.float32)
        with self._path.open("rb") as file:
            self._fill(values, file, info)
        return tuple(values.flatten().tolist())

    def _fill(self, out: Tensor, file: BinaryIO, info: TensorInfo) -> None:
        """Dequantize ``info`` into ``out`` (fp32, contiguous), checking that every weight is a finite number."""
        block = block_of(info.ggml_type)
        assert block is not None  # the header was checked
        columns = info.shape[-1]
        num_rows = info.num_elements // columns
        row_bytes = columns // block.elements * block.bytes
        target = out.view(num_rows, columns)
        step = max(1, SLICE_WEIGHTS // columns)
        buffer = torch.empty(min(step, num_rows), row_bytes, dtype=torch.uint8)
        file.seek(info.offset)
        for start in range(0, num_rows, step):
            rows = target[start : start + step]
            stored = buffer[: rows.shape[0]]
            read_exactly(file, stored.numpy().data.cast("B"), self._path.name, info.name)
            _dequantize(stored, info.ggml_type, rows)
            check_finite(rows, self._path.name, info.name)

    def _undo_interleaving(self, q_and_k: Tensor) -> None:
        """Put rows of q and k back, in place, head by head.

        For Llama models the converter reorders each head's rows from (2, D/2) to (D/2, 2), since ggml rotates
        neighbouring pairs there; the decoder always rotates halves.
        """
        head_dim = self.spec.head_dim
        for start in range(0, q_and_k.shape[0], head_dim):
            head = q_and_k[start : start + head_dim]
            head.copy_(torch.cat([head[0::2], head[1::2]]))


def _dequantize(stored: Tensor, ggml_type: int, out: Tensor) -> None:
    """Rows of blocks uint8 [rows, row_bytes] -> fp32 weights into ``out`` [rows, columns] (contiguous).

    What the C kernels decode, what torch converts by itself, and Q8_0 (a scale and 32 signed bytes: embeddings are often stored so) are
    several times faster than gguf.quants and give the same bits.
    """
    if native.can_dequantize(ggml_type):
        block = block_of(ggml_type)
        assert block is not None
        native.dequantize(stored, ggml_type, block.bytes, out)
    elif ggml_type in _HALVES:
        out.copy_(stored.view(_HALVES[ggml_type]))
    elif ggml_type == _Q8_0:
        blocks = stored.view(-1, 34)
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        torch.mul(blocks[:, 2:].view(torch.int8), scales, out=out.view(-1, 32))
    else:
        # One long row: gguf.quants cuts its input by rows, and rows of small models are too short to be quick.
        values = dequantize_rows(stored.numpy().reshape(1, -1), ggml_type)
        out.copy_(torch.from_numpy(values).view(out.shape))


def _check_whole_model(path: Path, header: GgufHeader) -> None:
    """Refuse a part of a model, naming the way out."""
    count = header.metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise ValueError(
            f"{path.name} is one of {count} parts of a split model. Merge the parts into one file first "
            "(llama-gguf-split --merge)."
        )
    if header.metadata.get("general.type", "model") not in ("model", ""):
        raise ValueError(
            f"{path.name} is of the type {header.metadata['general.type']!r}, not a whole model. Choose the model's own file."
        )


def _check_decodable(file_name: str, info: TensorInfo) -> None:
    if not can_dequantize(info.ggml_type):
        block = block_of(info.ggml_type)
        raise UnsupportedArchitecture(
            f"{file_name}: tensor {info.name} is stored as {block.name if block else info.ggml_type}, which cannot be "
            "decoded here. Get another quantization of the model, such as Q4_K_M or Q8_0."
        )


def _format_name(header: GgufHeader) -> str:
    """ "Q4_K_M" if the file says so, else the type that most of its bytes have."""
    named = header.metadata.get("general.file_type")
    if isinstance(named, int) and (name := file_type_name(named)):
        return name
    sizes: dict[int, int] = {}
    for info in header.tensors.values():
        sizes[info.ggml_type] = sizes.get(info.ggml_type, 0) + info.num_bytes
    block = block_of(max(sizes, key=lambda kind: sizes[kind]))
    assert block is not None
    return block.name
