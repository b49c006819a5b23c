"""What loading a model and answering really takes of this process's memory: run as a script, prints one JSON object.

    python memory_probe.py MODEL KV_BYTES DRAFT KEY=VALUE ...        (DRAFT: a path, or "-")

Counted is anonymous memory (RssAnon of /proc/self/status): code and files that are only mapped are nobody's decision. Everything
imported at start, and the machine's figures, came before the first look. Then every page of every cache is written, what was
freed is given back, the kernel's high-water mark (VmHWM) is set to what is there, and steps as large as the budget allows are
run, for the second time, so that what is made once has been made: the highest water, less what is mapped, is what the process takes, scratch and all. The error: Python modules imported while the model loads, the allocator's rounding and caches of torch's own, which come
to 5 to 10 MB whatever the model (seen by loading one of a few kB).
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from engine.engine import Engine
from engine.memory import expected
from engine.options import parse_settings
from engine.params import SamplingParams
from engine.process_memory import settled_bytes
from engine.roofline import machine


def status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found
    return int(found[1]) * 1024


def touch(engine: Engine) -> None:
    """Write every page of the engine's cache, and of the one that guesses."""
    caches = [engine._cache]
    if engine._speculator is not None and hasattr(engine._speculator.proposer, "_cache"):
        caches.append(engine._speculator.proposer._cache)
    for kv in caches:
        for layer in kv._layers:
            for part in layer.keys + layer.values:
                part.zero_()


def run(engine: Engine) -> None:
    """Steps as large as the budget allows, then a batch that decodes long enough for all that batches bring about."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    engine.forget()
    engine.generate([tuple(range(5, 705))], params)
    engine.generate([tuple(range(5 + first, 45 + first)) for first in range(8)], params)


def main(path: str, kv_bytes: str, draft: str, *pairs: str) -> None:
    torch.set_num_threads(1)
    machine.measured_once(machine.default_cache())
    settled_bytes()
    before = status("RssAnon")
    engine = Engine.load(
        path, parse_settings(pairs), kv_bytes=int(kv_bytes), find=Path, draft=None if draft == "-" else draft
    )
    touch(engine)
    run(engine)
    settled_bytes()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    run(engine)
    use = engine.info.memory
    foretold = expected(engine._loaded.spec, engine.options, int(kv_bytes), Path(path).stat().st_size)
    measured = status("VmHWM") - status("RssFile") - before
    print(
        json.dumps(
            {
                "measured": measured,
                "in_use": use.total_bytes,
                "expected": foretold.total_bytes,
                "parts": asdict(use),
                "expected_parts": asdict(foretold),
                "pool": engine.pool_bytes,
            }
        )
    )
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
