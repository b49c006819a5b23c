"""llama.cpp's logits of given tokens, for quality_peers; needs llama-cpp-python and nothing of ours:

    python llama_logits.py MODEL.gguf IDS.json OUT.bin THREADS [FORM]

IDS.json is a list of token ids. Written are their logits, fp32 [len, vocab]. Three quarters are computed as a prompt is, 64
tokens at a time, the rest one by one, as a chat does. FORM: a format that the model is requantized to first, e.g. q4_0.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

FORMS = {"q4_0": 2, "q4_1": 3, "q8_0": 7}
CHUNK = 64  # tokens


def main(model_path: str, ids_path: str, out_path: str, threads: str, form: str = "") -> None:
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        model = _load(_requantized(model_path, form, folder) if form else model_path)
    token_ids = json.loads(Path(ids_path).read_text(encoding="utf-8"))
    context = _context(model, len(token_ids), int(threads))
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    num_prefill = round(len(token_ids) * 0.75)
    starts = [*range(0, num_prefill, CHUNK), *range(num_prefill, len(token_ids))]
    with Path(out_path).open("wb") as out:
        for start, end in zip(starts, [*starts[1:], len(token_ids)], strict=True):
            for row in _logits(context, token_ids[start:end], start, vocab_size):
                out.write(row.tobytes())


def _load(path: str) -> object:
    params = llama_cpp.llama_model_default_params()
    params.use_mmap = False  # a requantized file is gone once it is read
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    return model


def _requantized(path: str, form: str, folder: str) -> str:
    target = str(Path(folder) / f"{form}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FORMS[form], True
    if llama_cpp.llama_model_quantize(path.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"Requantizing {path} to {form} failed.")
    return target


def _context(model: object, num_tokens: int, threads: int) -> object:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = num_tokens + CHUNK, threads, threads
    params.n_batch = params.n_ubatch = CHUNK
    return llama_cpp.llama_init_from_model(model, params)


def _logits(context: object, token_ids: list[int], start: int, vocab_size: int) -> np.ndarray:
    """Logits [len, vocab] of tokens at positions from ``start`` on."""
    batch = llama_cpp.llama_batch_init(len(token_ids), 0, 1)
    batch.n_tokens = len(token_ids)
    for index, token_id in enumerate(token_ids):
        batch.token[index], batch.pos[index], batch.n_seq_id[index] = token_id, start + index, 1
        batch.seq_id[index][0], batch.logits[index] = 0, 1
    if llama_cpp.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    rows = [
        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, index), (vocab_size,)).copy()
        for index in range(len(token_ids))
    ]
    llama_cpp.llama_batch_free(batch)
    return np.stack(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
