"""For the engine's tests."""

from __future__ import annotations

import tqdm

from engine.ops.cpu.native.build import build_in_place

tqdm.tqdm.monitor_interval = 0  # transformers' progress bars would leave a monitor thread behind

build_in_place(only_if_stale=True)  # before anything asks whether the C kernels are there
