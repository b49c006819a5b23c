"""What this machine can do, measured once: read bandwidth, matrix throughput per dtype, the cost of a small call.

The roofline model (Williams 2009) needs exactly these. Figures are the best of several tries, since anything else that
runs can only slow a try down. They are kept as JSON with the date; a file from another machine, another number of
threads, another version of this module, or one that cannot be read is measured again. The bandwidth, which everything else
is judged by, is measured again after a day, and the larger figure stays: a machine that was busy once is not slow for good.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path

import platformdirs
import psutil
import torch
import torch.nn.functional as F

from engine.events import MachineFigures
from engine.ops.cpu import CpuOps
from engine.ops.cpu.arena import Arena

_VERSION = 3  # raised when the way of measuring changes
_log = logging.getLogger(__name__)

_READ_BUFFER_BYTES = 512 << 20  # beyond the largest last-level caches (a server Xeon has 300 MB)
_LEAST_READ_BUFFER_BYTES = 64 << 20
_READ_TRIES = 4  # of each way of reading
_BANDWIDTH_STANDS = timedelta(days=1)
_PRODUCT_ROWS = 512
_PRODUCT_SIZE = 1024
_PRODUCT_TRIES = 5
_CALLS = 300
_BEST_OF = 5


def default_cache() -> Path:
    """Where this user's figures are kept."""
    return platformdirs.user_cache_path("ridgeline", appauthor=False) / "machine.json"


def measured_once(cache: Path | None = None, device: str = "cpu") -> MachineFigures:
    """The figures kept in ``cache`` if they are this machine's, else measured now (about 2 s) and kept there."""
    kept = None if cache is None else cached(cache, device)
    if kept is not None and not _is_old(kept):
        return kept
    figures = measure(device) if kept is None else _with_bandwidth_now(kept)
    if cache is not None:
        _keep(figures, cache)
    return figures


def measure(device: str = "cpu") -> MachineFigures:
    """Measure now, with the threads torch is set to. ValueError for a device other than "cpu"."""
    if device != "cpu":
        raise ValueError(f"Cannot measure device {device!r}: this version measures cpu only.")
    threads = torch.get_num_threads()
    with torch.inference_mode():
        return MachineFigures(
            device=device,
            name=_title(threads),
            threads=threads,
            read_bytes_per_second=_read_bandwidth(),
            flops_per_second=_throughputs(),
            launch_seconds=_small_call_seconds(),
            measured_at=_now(),
        )


def cached(cache: Path, device: str = "cpu") -> MachineFigures | None:
    """Figures kept in ``cache`` when they are of this machine, device and number of threads; else None."""
    try:
        kept = json.loads(cache.read_text(encoding="utf-8"))
        figures = _from_json(kept)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.info("Measuring this machine again: %s cannot be used (%s).", cache.name, error)
        return None
    threads = torch.get_num_threads()
    is_ours = (figures.device, figures.name, figures.threads) == (device, _title(threads), threads)
    return figures if is_ours else None


def cpu_name() -> str:
    """The processor's own name for itself, e.g. "Intel(R) Xeon(R) Processor"."""
    listing = Path("/proc/cpuinfo")  # Linux
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def this_machine() -> str:
    """The name that figures measured now would carry (``MachineFigures.name``)."""
    return _title(torch.get_num_threads())


def _title(threads: int) -> str:
    return f"{cpu_name()}, {threads} {'thread' if threads == 1 else 'threads'}"


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _is_old(figures: MachineFigures) -> bool:
    age = datetime.now().astimezone() - datetime.fromisoformat(figures.measured_at)
    return not timedelta(0) <= age < _BANDWIDTH_STANDS  # a clock that was set back makes no figure young for ever


def _with_bandwidth_now(figures: MachineFigures) -> MachineFigures:
    with torch.inference_mode():
        bandwidth = max(figures.read_bytes_per_second, _read_bandwidth())
    return replace(figures, read_bytes_per_second=bandwidth, measured_at=_now())


def _read_bandwidth() -> float:
    """Bytes per second of reading a buffer that no cache holds, with all threads, in huge pages as weights lie.

    The faster of two ways: which one the processor's prefetchers like better differs.
    """
    free = psutil.virtual_memory().available
    num_bytes = max(_LEAST_READ_BUFFER_BYTES, min(_READ_BUFFER_BYTES, free // 4))
    buffer = Arena().new(num_bytes).view(torch.float32).fill_(1.0)
    first, second = buffer.chunk(2)
    readers: tuple[Callable[[], object], ...] = (buffer.sum, lambda: torch.dot(first, second))
    return num_bytes / min(_best_seconds(reader, _READ_TRIES) for reader in readers)


def _throughputs() -> dict[str, float]:
    """Operations (2 per weight and row) per second of large products, by the paths the CPU backend takes for many rows.

    Without the C kernels int8 counts unpacking too, since torch's paths multiply int8 weights in the dense dtype.
    """
    x = torch.ones(_PRODUCT_ROWS, _PRODUCT_SIZE)
    weight = torch.full((_PRODUCT_SIZE, _PRODUCT_SIZE), 0.5)
    ops = CpuOps()
    packed, integer_x = ops.pack(weight, None, "int8"), x.to(ops.activation_dtype("int8"))
    narrow_x, narrow_weight = x.bfloat16(), weight.bfloat16()
    products: Mapping[str, Callable[[], object]] = {
        "fp32": lambda: F.linear(x, weight),
        "bf16": lambda: F.linear(narrow_x, narrow_weight),
        "int8": lambda: ops.linear(integer_x, packed),
    }
    operations = 2 * _PRODUCT_ROWS * weight.numel()
    return {dtype: operations / _best_seconds(product, _PRODUCT_TRIES) for dtype, product in products.items()}


def _small_call_seconds() -> float:
    """Seconds of one torch call on a row so small that only the call counts."""
    row = torch.ones(1, 64)

    def run() -> None:
        for _ in range(_CALLS):
            row.mul_(1.0)

    return _best_seconds(run, _BEST_OF) / _CALLS


def _best_seconds(run: Callable[[], object], tries: int) -> float:
    run()  # first touch, thread pool, kernel choice
    best = float("inf")
    for _ in range(tries):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def _keep(figures: MachineFigures, cache: Path) -> None:
    """Write whole or not at all; figures that cannot be kept are still good for this run."""
    text = json.dumps({"version": _VERSION, **asdict(figures), "flops_per_second": dict(figures.flops_per_second)})
    part = cache.with_name(cache.name + ".part")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(cache)
    except OSError as error:
        _log.warning("This machine's figures could not be kept in %s: %s", cache, error)


def _from_json(kept: Mapping[str, object]) -> MachineFigures:
    """ValueError, KeyError, TypeError or AttributeError for anything but what ``_keep`` wrote."""
    fields = dict(kept)
    if fields.pop("version") != _VERSION:
        raise ValueError("it was written by another version")
    figures = MachineFigures(**fields)  # type: ignore[arg-type]
    datetime.fromisoformat(figures.measured_at).astimezone()
    rates = [figures.read_bytes_per_second, figures.launch_seconds, *figures.flops_per_second.values()]
    if set(figures.flops_per_second) != {"fp32", "bf16", "int8"} or not all(0 < rate < 1e18 for rate in rates):
        raise ValueError("its figures are not plausible")
    return figures
