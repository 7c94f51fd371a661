"""How many cores this process may compute on.

llama.cpp's compute threads busy-wait for each other after every operation. With more threads than cores they are
several times slower than with fewer (docs/design/cpu.md).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from llamapipe.host.control_group import limit_files

_most: int | None = None


def limit_cores(n: int) -> None:
    """Lets this process compute on at most ``n`` cores: its part of a quota that it shares with others.

    Call it before an engine is made.
    """
    global _most
    _most = n


def usable_cores() -> int:
    """The number of cores this process may run on, or fewer if its control group has a smaller quota of CPU time.

    At most as many as ``limit_cores`` allows.
    """
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(limit_files("cpu", "cpu.cfs_quota_us", "cpu.max"))
    if quota is not None:
        n = min(n, max(math.ceil(quota), 1))
    return n if _most is None else min(n, _most)


def cpu_quota(files: list[Path]) -> float | None:
    """The smallest quota in these limit files, in cores (seconds of CPU time per second); None without a quota."""
    quotas = []
    for file in files:
        try:
            text = file.read_text()
            if file.name == "cpu.cfs_quota_us":  # version 1 keeps the period in a separate file
                text += file.with_name("cpu.cfs_period_us").read_text()
            quota, period = map(int, text.split())
        except (OSError, ValueError):  # the file does not exist, or holds "max"
            continue
        if quota > 0 and period > 0:  # -1: no limit
            quotas.append(quota / period)
    return min(quotas, default=None)
