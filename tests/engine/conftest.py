"""For the engine's tests."""

from __future__ import annotations

import tqdm

tqdm.tqdm.monitor_interval = 0  # transformers' progress bars would leave a monitor thread behind
