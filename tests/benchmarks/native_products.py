"""The C products by the number of rows: python -m tests.benchmarks.native_products [--threads N] [--json]

Prints per instruction set, scheme and shape: microseconds, thousand million weights a second, and the share of this machine's read
bandwidth that those weights are. The weights rotate through more memory than the caches hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from engine.ops.cpu import native
from engine.ops.cpu.native import linear as native_linear
from engine.roofline.machine import measure

SHAPES = ((4096, 4096), (3072, 576), (49152, 576))
ROWS = (1, 2, 4, 8, 16, 64, 512)
ROTATED_BYTES = 64 << 20
TRIES = 9


def microseconds(packed: list[native_linear.NativePacked], x: torch.Tensor) -> float:
    """Median of some calls, each with the next of the matrices."""
    taken = []
    for index in range(TRIES + 2):
        started = time.perf_counter()
        native_linear.linear(x, packed[index % len(packed)])
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native.set_threads(arguments.threads)
    bandwidth = measure("cpu").read_bytes_per_second
    results = []
    for scheme in native_linear.SCHEMES:
        for out_features, in_features in SHAPES:
            weight = torch.randn(out_features, in_features)
            first = native_linear.pack(weight, None, scheme)
            packed = [first] + [
                native_linear.pack(weight, None, scheme) for _ in range(ROTATED_BYTES // first.num_bytes)
            ]
            for isa in native.ISAS[1:]:
                if not native.set_isa(isa):
                    continue
                for num_rows in ROWS:
                    taken = microseconds(packed, torch.randn(num_rows, in_features))
                    row = {
                        "isa": isa,
                        "scheme": scheme,
                        "shape": f"{out_features}x{in_features}",
                        "rows": num_rows,
                        "microseconds": round(taken, 1),
                        "weights_per_second": weight.numel() / taken * 1e6,
                        "bandwidth_share": first.num_bytes / taken * 1e6 / bandwidth,
                        "operations_per_second": 2 * num_rows * weight.numel() / taken * 1e6,
                    }
                    results.append(row)
                    if not arguments.json:
                        print(
                            f"{isa:<11} {scheme} {row['shape']:>10} M={num_rows:<4}{taken:9.0f} us"
                            f"{weight.numel() / taken / 1e3:7.1f} G weights/s {row['bandwidth_share']:6.0%} of read bandwidth"
                            f"{2 * num_rows * weight.numel() / taken / 1e3:7.0f} GOP/s"
                        )
    if arguments.json:
        print(
            json.dumps(
                {"threads": arguments.threads, "read_bytes_per_second": bandwidth, "products": results}, indent=1
            )
        )


if __name__ == "__main__":
    main()
