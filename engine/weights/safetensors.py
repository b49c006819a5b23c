"""A folder of safetensors (one file or shards) with its config.json as a WeightSource."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from engine.model.fields import UnsupportedArchitecture
from engine.model.spec_from_config import spec_from_config
from engine.weights.canonical import Naming, Piece, layout, stacked
from engine.weights.prequantized import find
from engine.weights.safetensors_header import FLOAT_BYTES, StoredTensor, read_header, read_json, shards_of
from engine.weights.source import TokenizerFiles
from engine.weights.stream import check_finite, read_exactly

SLICE_BYTES = 1 << 22  # read and checked at a time; stays in the processor's cache
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
# Where the language model may sit in a checkpoint: alone, or inside a model with a vision tower (old and new order).
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")


def _naming(prefix: str, head: str, is_gemma: bool) -> Naming:
    layer = f"{prefix}layers.{{i}}."
    attn, mlp = f"{layer}self_attn.", f"{layer}mlp."
    qkv, up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    return Naming(
        top={"embed": f"{prefix}embed_tokens.weight", "head": head, "final_norm": f"{prefix}norm.weight"},
        layer={
            "attn_norm": ((f"{layer}input_layernorm.weight",),),
            "qkv": (tuple(f"{attn}{p}.weight" for p in qkv), (f"{attn}qkv_proj.weight",)),
            "qkv_bias": (tuple(f"{attn}{p}.bias" for p in qkv), (f"{attn}qkv_proj.bias",)),
            "q_norm": ((f"{attn}q_norm.weight",),),
            "k_norm": ((f"{attn}k_norm.weight",),),
            "attn_out": ((f"{attn}o_proj.weight",),),
            "attn_out_bias": ((f"{attn}o_proj.bias",),),
            "post_attn_norm": ((f"{layer}post_attention_layernorm.weight",),),
            # What Llama calls post_attention_layernorm is the norm before the MLP; Gemma uses that name truthfully.
            "mlp_norm": ((f"{layer}{'pre_feedforward' if is_gemma else 'post_attention'}_layernorm.weight",),),
            "gate_up": (tuple(f"{mlp}{p}.weight" for p in up), (f"{mlp}gate_up_proj.weight",)),
            "gate_up_bias": (tuple(f"{mlp}{p}.bias" for p in up), (f"{mlp}gate_up_proj.bias",)),
            "mlp_out": ((f"{mlp}down_proj.weight",),),
            "mlp_out_bias": ((f"{mlp}down_proj.bias",),),
            "post_mlp_norm": ((f"{layer}post_feedforward_layernorm.weight",),),
        },
    )


class SafetensorsSource:
    """One opened folder. See ``WeightSource``."""

    def __init__(self, folder: Path) -> None:
        if (folder / "adapter_config.json").exists():
            raise ValueError(
                f"The folder {folder} holds an adapter (LoRA), which changes a model but is none. "
                "Choose the model it was made for, or a merged version."
            )
        if not (folder / "config.json").exists():
            raise ValueError(
                f"The folder {folder} has weights but no config.json, which says what model they make. "
                "Download config.json (and the tokenizer's files) into the same folder."
            )
        generation = folder / "generation_config.json"
        name = folder.resolve().name
        config = read_json(folder / "config.json")
        self.spec = spec_from_config(config, name, read_json(generation) if generation.exists() else None)
        self._tensors: dict[str, StoredTensor] = {}
        for shard in shards_of(folder):
            self._tensors |= read_header(shard)
        quantization = config.get("quantization_config") or {}
        self._quantized = find(self._tensors, quantization) if quantization else {}
        self._is_gemma = self.spec.family.startswith("gemma")
        self._layout = layout(
            self.spec,
            _naming(*self._prefix_and_head(), self._is_gemma),
            {stored: tensor.shape for stored, tensor in (self._tensors | self._quantized).items()},
            f"{name} (safetensors)",
        )
        self._check_dtypes(name)
        self.eos_token_ids = frozenset(self.spec.eos_token_ids)
        self.tokenizer_files = TokenizerFiles("hf", folder=folder)
        stored = self._layout["embed"][0].stored
        method = quantization["quant_method"] if self._quantized else _DTYPES[self._tensors[stored].dtype]
        self.not_stored_packed = (
            "This model is a safetensors folder. Only GGUF files store weights in blocks that can be kept."
        )
        self.stored_format = f"safetensors {str(method).removeprefix('torch.')}"

    def names(self) -> frozenset[str]:
        return frozenset(self._layout)

    def read(self, name: str) -> Tensor:
        pieces = self._layout[name]
        out = torch.empty(stacked(piece.shape for piece in pieces), dtype=self._dtype_of(pieces))
        row = 0
        for piece in pieces:
            self._fill(out[row : row + piece.shape[0]], piece.stored)
            row += piece.shape[0]
        if not name.endswith("norm"):
            return out
        # Gemma stores its norms as the distance from 1.
        return out.float() + 1 if self._is_gemma else out.float()

    def read_stored(self, name: str, types: frozenset[int]) -> None:
        """Nothing: safetensors hold numbers, or forms that only their own kernels multiply."""

    def stores_numbers(self, name: str) -> bool:
        return not any(piece.stored in self._quantized for piece in self._layout[name])

    def _prefix_and_head(self) -> tuple[str, str]:
        for prefix in _PREFIXES:
            if f"{prefix}embed_tokens.weight" in self._tensors:
                head = "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"
                return prefix, head
        return "model.", "lm_head.weight"

    def _check_dtypes(self, name: str) -> None:
        for piece in self._stored_pieces():
            if piece.stored in self._quantized:
                continue
            dtype = self._tensors[piece.stored].dtype
            if dtype not in FLOAT_BYTES:
                raise UnsupportedArchitecture(
                    f"{name}: tensor {piece.stored} is stored as {dtype}, a quantized format the decoder cannot read. "
                    "Get the original weights, or a GGUF file."
                )

    def _stored_pieces(self) -> Iterable[Piece]:
        return (piece for pieces in self._layout.values() for piece in pieces)

    def _dtype_of(self, pieces: tuple[Piece, ...]) -> torch.dtype:
        """The stored dtype; the widest one should stacked pieces differ. fp64 and what was quantized become fp32."""
        if any(piece.stored in self._quantized for piece in pieces):
            return torch.float32
        dtypes = {_DTYPES[self._tensors[piece.stored].dtype] for piece in pieces}
        return dtypes.pop() if len(dtypes) == 1 and torch.float64 not in dtypes else torch.float32

    def _fill(self, out: Tensor, stored: str) -> None:
        """Read one stored tensor into ``out`` (contiguous), checking that every weight is a finite number."""
        if stored in self._quantized:
            out.copy_(self._quantized[stored].read())
            check_finite(out, next(iter(self._tensors.values())).file.parent.name, stored)
            return
        tensor = self._tensors[stored]
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            self._stream(out.view(-1), file, tensor, stored)

    def _stream(self, flat: Tensor, file: BinaryIO, tensor: StoredTensor, stored: str) -> None:
        element_bytes = FLOAT_BYTES[tensor.dtype]
        step = SLICE_BYTES // element_bytes
        dtype = _DTYPES[tensor.dtype]
        buffer = torch.empty(0 if dtype == flat.dtype else min(step, flat.numel()), dtype=dtype)
        for start in range(0, flat.numel(), step):
            target = flat[start : start + step]
            landing = target if dtype == flat.dtype else buffer[: target.numel()]
            read_exactly(file, landing.view(torch.uint8).numpy().data, tensor.file.name, stored)
            if landing is not target:
                target.copy_(landing)
            check_finite(target, tensor.file.name, stored)
