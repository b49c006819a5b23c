"""Loading peaks at the final size plus one tensor: weights stream, are packed one by one, and nothing else is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: a peak cannot be taken back. VmHWM belongs to the process image, unlike ru_maxrss, which
# remembers the parent's size.
_SCRIPT = """
import sys
from pathlib import Path
import torch
from engine.model.load import build_decoder
from engine.ops.cpu import CpuOps
from engine.weights.source import open_source

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
source = open_source(Path(sys.argv[1]))
ops = CpuOps()
warm = torch.randn(64, 64)
for scheme in ("none", "int8", "int4"):  # kernels and their scratch are loaded before the count begins
    ops.linear(warm.to(ops.activation_dtype(scheme)), ops.pack(warm, None, scheme))
source.read("layers.0.attn_norm")
before = status("VmRSS")
decoder = build_decoder(source, {True: ops}, sys.argv[2])
largest = source.spec.vocab_size * source.spec.hidden_size * 4
print(status("VmHWM") - before, decoder.weight_bytes, largest)
"""
_SLACK_BYTES = 40 << 20  # what the allocator keeps, a slice being quantized, the file's buffers


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
def test_loading_peaks_at_the_final_size_plus_one_tensor(starter_path: Path, scheme: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(starter_path), scheme], capture_output=True, text=True, check=True
    )
    peak, final, largest = map(int, run.stdout.split())
    assert final > 60 << 20, "the model must be large enough for the bound to mean something"
    assert peak <= final + largest + _SLACK_BYTES, (peak, final, largest)
