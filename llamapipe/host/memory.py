"""How much memory this process could ever have: the machine's, or the limit of its control group."""

from __future__ import annotations

from pathlib import Path

from llamapipe.host.control_group import limit_files


def memory_limit() -> int | None:
    """Most bytes of memory and swap this process could ever have; None where that is not known."""
    try:
        limits = [_memory_and_swap(Path("/proc/meminfo").read_text())]
    except (OSError, ValueError, KeyError):
        return None
    for file in limit_files("memory", "memory.limit_in_bytes", "memory.max"):
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(limits)


def _memory_and_swap(meminfo: str) -> int:
    values = dict(line.split(":", 1) for line in meminfo.splitlines())
    return 1024 * sum(int(values[key].split()[0]) for key in ("MemTotal", "SwapTotal"))
