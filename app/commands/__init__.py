"""One module per command: ``add_to`` declares its arguments, ``run`` does it and returns the exit code."""

from __future__ import annotations

import argparse
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
