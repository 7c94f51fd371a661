"""What a process holds at a quiet moment, and how fast it grows."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from llamapipe.native.not_copyable import NotCopyable

# 97.5th percentiles of Student's t for 1 to 14 degrees of freedom
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)
_N_BLOCKS = 12


@dataclass(frozen=True)
class Level:
    """What the process holds when no request runs."""

    hours: float
    n_requests: int
    rss_mb: float
    malloc_mb: float  # in use, as glibc's malloc counts; 0 with another one
    n_python_blocks: int  # in use, as Python's own allocator counts
    n_descriptors: int
    n_threads: int  # of Python and of C++
    n_owners: int  # Python objects that own native memory
    n_objects: int  # Python objects that the garbage collector knows


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2``; ``uordblks`` are bytes in use in all arenas, ``hblkhd`` those that were mapped."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def level(hours: float, n_requests: int) -> Level:
    """Measures this process. Garbage is collected, and glibc gives free pages back, so that samples are comparable."""
    for _ in range(3):
        gc.collect()
    libc = ctypes.CDLL(None)
    malloc_mb = 0.0
    if hasattr(libc, "mallinfo2"):
        libc.malloc_trim(0)
        libc.mallinfo2.restype = _MallInfo
        info = libc.mallinfo2()
        malloc_mb = (info.uordblks + info.hblkhd) / 1e6
    objects = gc.get_objects()
    return Level(
        hours,
        n_requests,
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6,
        malloc_mb,
        sys.getallocatedblocks(),
        sum(1 for _ in Path("/proc/self/fd").iterdir()),
        max(threading.active_count(), sum(1 for _ in Path("/proc/self/task").iterdir())),
        sum(isinstance(item, NotCopyable) for item in objects),
        len(objects),
    )


def types() -> Counter[str]:
    """How many objects of each type the garbage collector knows."""
    kinds = Counter(type(item) for item in gc.get_objects())
    return Counter({f"{kind.__module__}.{kind.__qualname__}": n for kind, n in kinds.items()})


@dataclass(frozen=True)
class Slope:
    """Growth per hour, with a 95 % interval of ± ``error``."""

    per_hour: float
    error: float

    def is_above(self, limit: float) -> bool:
        """Whether the growth is above ``limit`` beyond doubt."""
        return self.per_hour - self.error > limit

    def __str__(self) -> str:
        return f"{self.per_hour:+.2f} ± {self.error:.2f} an hour"


def slope(hours: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares over the medians of up to 12 blocks: neighbouring samples are not independent."""
    if len(values) < 3:
        raise ValueError(f"a slope needs 3 samples or more, not {len(values)}")
    n = min(_N_BLOCKS, len(values))
    edges = [i * len(values) // n for i in range(n + 1)]
    x = [statistics.median(hours[a:b]) for a, b in pairwise(edges)]
    y = [statistics.median(values[a:b]) for a, b in pairwise(edges)]
    line = statistics.linear_regression(x, y)
    middle = statistics.fmean(x)
    spread = sum((a - middle) ** 2 for a in x)
    left = sum((b - line.intercept - line.slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return Slope(line.slope, _T[n - 3] * (left / (n - 2) / spread) ** 0.5)
