"""Reports how much memory this process could have at most, and how much is free for it now.

Each figure is the lowest of the machine's and those of the process's control groups. Only Linux reports them;
elsewhere the functions return None.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from llamapipe.host._control_group import limit_files

_MEMINFO = Path("/proc/meminfo")


def memory_limit() -> int | None:
    """Return the maximum bytes of memory and swap that this process could have; None if unknown. Any thread."""
    try:
        values = _meminfo(_MEMINFO)
        limits = [values["MemTotal"] + values["SwapTotal"]]
    except (OSError, ValueError, KeyError):
        return None
    limits += [limit for limit in map(_number, _limit_files()) if limit is not None]
    return min(limits)


def free_memory(meminfo: Path = _MEMINFO, limits: Sequence[Path] | None = None) -> int | None:
    """Return the bytes that this process can still take without swapping; None if unknown. Any thread.

    The result is the lowest of the kernel's estimate (``MemAvailable``) and each control group's limit minus its usage.
    File pages that the kernel can drop count as free. Other processes can change the figure at any time. ``meminfo``
    and ``limits`` are the files to read; the defaults are this machine's.
    """
    try:
        machine = _meminfo(meminfo)
        free, total = [machine["MemAvailable"]], machine["MemTotal"]
    except (OSError, ValueError, KeyError):
        return None
    for file in _limit_files() if limits is None else limits:
        limit = _number(file)
        if limit is None or limit >= total:  # version 1 reports a large number if there is no limit
            continue
        first_version = file.name == "memory.limit_in_bytes"
        usage = _number(file.with_name("memory.usage_in_bytes" if first_version else "memory.current"))
        if usage is not None:
            cached = _inactive_file(file.with_name("memory.stat"), first_version)
            free.append(max(limit - max(usage - cached, 0), 0))
    return min(free)


def resident_bytes(pid: int) -> int:
    """Return the resident set size of a process in bytes; 0 if unknown. Any thread."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):  # Windows has no sysconf
        return 0


def return_freed_memory() -> None:
    """Return to the system the freed memory that the C library keeps for later (glibc only). Any thread."""
    import ctypes  # imported here: nothing else in this module needs it

    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library
        return
    trim(0)


def _limit_files() -> tuple[Path, ...]:
    return limit_files("memory", "memory.limit_in_bytes", "memory.max")


def _meminfo(path: Path) -> dict[str, int]:
    """Return the entries of a ``meminfo`` file in bytes, by name; entries without a unit are left out."""
    lines = (line.split(":", 1) for line in path.read_text().splitlines())
    return {name: 1024 * int(value.split()[0]) for name, value in lines if value.endswith("kB")}


def _inactive_file(stat: Path, first_version: bool) -> int:
    """Return the size in bytes of the cached file pages that the kernel drops first; 0 if not reported."""
    name = "total_inactive_file" if first_version else "inactive_file"
    try:
        return int(dict(line.split(" ", 1) for line in stat.read_text().splitlines())[name])
    except (OSError, ValueError, KeyError):
        return 0


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # the file is gone, or holds "max"
        return None
