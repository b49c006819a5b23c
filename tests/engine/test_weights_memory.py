"""Loading peaks at the final size plus one tensor: measured from outside, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from gguf import GGUFWriter
from safetensors.torch import save_file

HIDDEN, INNER, VOCAB, NUM_LAYERS, HEADS = 1024, 2816, 16384, 4, 16
SLACK_BYTES = 24e6  # slices, the allocator's rounding, modules imported on the first read
_SIZES = {
    "q": (HIDDEN, HIDDEN),
    "k": (HIDDEN // 2, HIDDEN),
    "v": (HIDDEN // 2, HIDDEN),
    "output": (HIDDEN, HIDDEN),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}

# Keeps every tensor (the final size is theirs) and prints how far the resident memory went beyond what was there
# before the first read. VmHWM is the kernel's own high-water mark; writing 5 to clear_refs starts it afresh.
_LOADER = """
import json, re, sys
from pathlib import Path
import torch
from engine.weights.source import open_source
def status(key):
    return int(re.search(rf"{key}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
source = open_source(Path(sys.argv[1]))
source.read("final_norm")  # imports done, allocator warm
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
kept = {name: source.read(name) for name in sorted(source.names())}
sizes = [tensor.nbytes for tensor in kept.values()]
print(json.dumps({"peak": status("VmHWM") - before, "final": sum(sizes), "largest": max(sizes)}))
"""

# The same for a whole decoder: each matrix is packed before the next is read. What was there before is the source,
# the modules and the first use of the packing.
_PACKER = """
import json, re, sys
from pathlib import Path
import torch
from engine.model.load import build_decoder
from engine.ops.cpu import CpuOps
from engine.weights.source import open_source
def status(key):
    return int(re.search(rf"{key}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
ops = CpuOps()
ops.pack(torch.randn(64, 64), None, "int4")
source = open_source(Path(sys.argv[1]))
source.read("final_norm")
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
decoder = build_decoder(source, {True: ops, False: ops}, "int4")
largest = source.spec.vocab_size * source.spec.hidden_size * 4
print(json.dumps({"peak": status("VmHWM") - before, "final": decoder.weight_bytes, "largest": largest}))
"""


def _write_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-6)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, np.ones((rows, columns // 32 * 34), np.uint8), raw_dtype=GgmlType.Q8_0)

    matrix("token_embd.weight", VOCAB, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for index in range(NUM_LAYERS):
        for name, (rows, columns) in _SIZES.items():
            block = "attn" if name in ("q", "k", "v", "output") else "ffn"
            matrix(f"blk.{index}.{block}_{name}.weight", rows, columns)
        writer.add_tensor(f"blk.{index}.attn_norm.weight", np.ones(HIDDEN, np.float32))
        writer.add_tensor(f"blk.{index}.ffn_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_folder(folder: Path) -> None:
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = {"output": "self_attn.o_proj"} | {n: f"self_attn.{n}_proj" for n in "qkv"}
    names |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    tensors = {"model.embed_tokens.weight": torch.ones(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for index in range(NUM_LAYERS):
        for name, shape in _SIZES.items():
            tensors[f"model.layers.{index}.{names[name]}.weight"] = torch.ones(shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{index}.{norm}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, folder / "model.safetensors")


def _run(code: str, path: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark of memory"
)


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_reading_all_tensors_peaks_at_their_size_plus_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("model.gguf" if kind == "gguf" else "model")
    (_write_gguf if kind == "gguf" else _write_folder)(path)
    measured = _run(_LOADER, path)
    assert measured["final"] > 200e6
    # The slack is well below the largest tensor, so a second copy of it (or a mapped file) would show.
    assert measured["largest"] > 2 * SLACK_BYTES
    assert measured["final"] * 0.95 < measured["peak"] <= measured["final"] + SLACK_BYTES


def test_packing_to_int4_peaks_at_the_packed_size_plus_one_tensor(tmp_path: Path) -> None:
    """The weights as fp32 would be six times the packed size: they are never there together."""
    path = tmp_path / "model.gguf"
    _write_gguf(path)
    measured = _run(_PACKER, path)
    assert 30e6 < measured["final"] < 50e6
    assert measured["peak"] <= measured["final"] + measured["largest"] + SLACK_BYTES
