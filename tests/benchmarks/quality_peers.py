"""Quality at equal bits: our int4 and llama.cpp against fp32 of the same file, over the same tokens of the same text:

    python -m tests.benchmarks.quality_peers MODEL.gguf --llama-python PYTHON [--tokens 1000] [--threads 2] [--json FILE]

PYTHON is an interpreter with llama-cpp-python. llama.cpp reads the file as it is, and requantized to Q4_0 (its repacked
fast path), in a process of its own that writes its logits to a file; ours run in this process. The reference is our fp32 of
the file's own, dequantized values (``weights=none``), which the engine's tests hold against transformers. Tokens are ours,
handed over as ids, so that no tokenizer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.engine import Engine
from engine.quality import Quality, fixed_tokens, full_precision, quality, read, reference_rows

OURS = {
    "int4, 16-bit activations": {"weights": "int4", "activations": "none"},
    "int4, 8-bit activations": {"weights": "int4", "activations": "int8"},
    "int8": {"weights": "int8"},
}
PEERS = {"llama.cpp, file as it is": "", "llama.cpp, Q4_0": "q4_0"}


def main() -> None:
    args = _arguments()
    reference = Engine.load(str(args.model), full_precision(), find=Path)
    tokens = fixed_tokens(reference, args.tokens)
    rows = reference_rows(reference, tokens)
    reference.close()
    found: dict[str, Quality] = {}
    for name, settings in OURS.items():
        engine = Engine.load(str(args.model), settings, find=Path)
        found[f"ridgeline, {name}"] = quality(rows, read(engine, tokens), tokens)
        engine.close()
    for name, form in PEERS.items():
        found[name] = quality(rows, _llama_rows(args, form, tokens, rows[0].shape[0]), tokens)
    print(f"{'':42}{'mean KL':>10}{'same token':>12}{'perplexity':>12}")
    for name, its in found.items():
        print(f"{name:42}{its.mean_kl:10.5f}{its.token_agreement:12.1%}{its.perplexity:12.3f}")
    print(f"{'fp32 of the file (reference)':42}{0:10.5f}{1:12.1%}{its.reference_perplexity:12.3f}")
    if args.json:
        report = {"tokens": len(tokens), "found": {name: asdict(its) for name, its in found.items()}}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _llama_rows(args: argparse.Namespace, form: str, tokens: list[int], vocab_size: int) -> Iterator[Tensor]:
    """llama.cpp's logits of every position, fp32 [vocab] each."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "ids.json", Path(folder) / "logits.bin"
        asked.write_text(json.dumps(tokens), encoding="utf-8")
        script = Path(__file__).with_name("llama_logits.py")
        command = [args.llama_python, str(script), str(args.model), str(asked), str(answer), str(args.threads), form]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"llama.cpp failed:\n{done.stderr[-2000:]}")
        logits = np.memmap(answer, np.float32, "r").reshape(len(tokens), -1)
        assert logits.shape[1] >= vocab_size
        for row in logits:
            yield torch.from_numpy(row[:vocab_size].copy())


if __name__ == "__main__":
    sys.exit(main())
