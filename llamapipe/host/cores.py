"""How many cores this process may compute on.

llama.cpp's threads wait for each other by spinning behind every operation: with more of them than cores they are
several times slower than with fewer (docs/decisions.md, 2026-11-22, seventh part).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from llamapipe.host.control_group import limit_files


def usable_cores() -> int:
    """The cores this process may run on, or fewer where its control group has less time than all of them."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(limit_files("cpu", "cpu.cfs_quota_us", "cpu.max"))
    return n if quota is None else min(n, max(math.ceil(quota), 1))


def cpu_quota(files: list[Path]) -> float | None:
    """Seconds of cores a second that these limits leave, in Linux's formats; None where they set none."""
    quotas = []
    for file in files:
        try:
            text = file.read_text()
            if file.name == "cpu.cfs_quota_us":  # the first version has the period in a file of its own
                text += file.with_name("cpu.cfs_period_us").read_text()
            quota, period = map(int, text.split())
        except (OSError, ValueError):  # not there, or "max"
            continue
        if quota > 0 and period > 0:  # -1: no limit
            quotas.append(quota / period)
    return min(quotas, default=None)
