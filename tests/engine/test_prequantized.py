"""GPTQ, AWQ and bitsandbytes folders, written here as their tools write them, come out as the weights they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import save_tiny
from torch import Tensor

from engine.weights.source import open_source

GROUP = 16
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = dict[str, Tensor]
Write = Callable[[str, Tensor, Parts], Tensor]


def grid(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in] on an asymmetric 4-bit grid: values [in, out], zeros and scales [groups, out]."""
    columns = weight.T.float()
    grouped = columns.unflatten(0, (-1, GROUP))
    scales = ((grouped.amax(1) - grouped.amin(1)) / 14).half()
    zeros = (-grouped.amin(1) / scales.float()).round().clamp(1, 15)
    values = (columns / scales.float().repeat_interleave(GROUP, 0)).round() + zeros.repeat_interleave(GROUP, 0)
    return values.clamp(0, 15).int(), zeros.int(), scales


def words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [rows, columns] -> eight columns per word, written bit by bit."""
    out = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for nibble, column in enumerate(order):
        out |= values[:, column::8].long() << (4 * nibble)
    return torch.where(out >= 2**31, out - 2**32, out).int()


def dequantized(values: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return ((values - zeros[groups]).float() * scales[groups].float()).T


def write_gptq(stem: str, weight: Tensor, parts: Parts, offset: int = 1) -> Tensor:
    values, zeros, scales = grid(weight)
    groups = (torch.arange(len(values)) // GROUP).flip(0)  # as if inputs had been reordered
    parts[f"{stem}.qweight"] = words(values.T.contiguous()).T.contiguous()
    parts[f"{stem}.qzeros"] = words(zeros - offset)
    parts[f"{stem}.scales"], parts[f"{stem}.g_idx"] = scales, groups.int()
    return dequantized(values, zeros, scales, groups)


def write_awq(stem: str, weight: Tensor, parts: Parts) -> Tensor:
    values, zeros, scales = grid(weight)
    parts[f"{stem}.qweight"], parts[f"{stem}.qzeros"] = words(values, AWQ_COLUMNS), words(zeros, AWQ_COLUMNS)
    parts[f"{stem}.scales"] = scales
    return dequantized(values, zeros, scales, torch.arange(len(values)) // GROUP)


def write_int8(stem: str, weight: Tensor, parts: Parts) -> Tensor:
    largest = weight.abs().amax(1)
    parts[f"{stem}.weight"] = (weight / largest[:, None] * 127).round().to(torch.int8)
    parts[f"{stem}.SCB"] = largest.float()
    return parts[f"{stem}.weight"].float() * largest[:, None] / 127


def write_nf4(stem: str, weight: Tensor, parts: Parts, nested: bool) -> Tensor:
    table = torch.linspace(-1, 1, 16)
    flat, name = weight.float().flatten(), f"{stem}.weight"
    absmax = flat.view(-1, 64).abs().amax(1)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape), "dtype": "float32"}
    stored = absmax
    if nested:
        codes = torch.linspace(-1, 1, 256)
        offset = float(absmax.mean())
        outer = (absmax - offset).view(-1, 16).abs().amax(1)
        scaled = (absmax - offset) / outer.repeat_interleave(16)
        stored = (scaled[:, None] - codes).abs().argmin(1).to(torch.uint8)
        absmax = codes[stored.long()] * outer.repeat_interleave(16) + offset
        parts[f"{name}.nested_absmax"], parts[f"{name}.nested_quant_map"] = outer, codes
        state |= {"nested_blocksize": 16, "nested_offset": offset}
    scales = absmax.repeat_interleave(64)
    values = (flat / scales).unsqueeze(1).sub(table).abs().argmin(1).to(torch.uint8)
    parts[name] = ((values[0::2] << 4) | values[1::2]).unsqueeze(1)
    parts[f"{name}.absmax"], parts[f"{name}.quant_map"] = stored, table
    parts[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return (table[values.long()] * scales).view(weight.shape)


METHODS: dict[str, tuple[dict[str, object], Write]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, write_gptq),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda stem, weight, parts: write_gptq(stem, weight, parts, offset=0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4}, write_awq),
    "llm_int8": ({"quant_method": "bitsandbytes"}, write_int8),
    "nf4": ({"quant_method": "bitsandbytes"}, lambda stem, weight, parts: write_nf4(stem, weight, parts, False)),
    "nf4_nested": ({"quant_method": "bitsandbytes"}, lambda stem, weight, parts: write_nf4(stem, weight, parts, True)),
}


def quantize_folder(folder: Path, config: dict[str, object], write: Write) -> dict[str, Tensor]:
    """Rewrite a saved model with every projection quantized; returns what each weight then stands for."""
    parts: Parts = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" in name:
            meant[name] = write(name.removesuffix(".weight"), tensor, parts)
        else:
            parts[name] = tensor
    save_file(parts, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**text, "quantization_config": config}), encoding="utf-8")
    return meant


@pytest.mark.parametrize("method", METHODS)
def test_every_matrix_is_what_its_parts_stand_for(method: str, tmp_path: Path) -> None:
    meant = quantize_folder(save_tiny("llama", tmp_path), *METHODS[method])
    source = open_source(tmp_path)
    layer = "model.layers.1."
    qkv = torch.cat([meant[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([meant[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    torch.testing.assert_close(source.read("layers.1.qkv"), qkv, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(source.read("layers.1.gate_up"), gate_up, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        source.read("layers.0.mlp_out"), meant["model.layers.0.mlp.down_proj.weight"], atol=1e-5, rtol=1e-5
    )
    assert source.stored_format == f"safetensors {METHODS[method][0]['quant_method']}"


def test_other_bits_are_refused_with_a_remedy(tmp_path: Path) -> None:
    quantize_folder(save_tiny("llama", tmp_path), {"quant_method": "gptq", "bits": 3}, write_gptq)
    with pytest.raises(ValueError, match=r"gptq at 3 bits.*GGUF"):
        open_source(tmp_path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    quantize_folder(save_tiny("llama", tmp_path), *METHODS["awq"])
    parts = load_file(tmp_path / "model.safetensors")
    del parts["model.layers.0.self_attn.o_proj.scales"]
    save_file(parts, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"o_proj\.scales is missing"):
        open_source(tmp_path).read("layers.0.attn_out")
