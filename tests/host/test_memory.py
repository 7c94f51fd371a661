"""How much memory is free for this process: the machine's, or the rest of a control group's limit."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from support.run_script import run_script

from llamapipe.host._control_group import limit_files
from llamapipe.host.memory import free_memory, memory_limit

MIB = 2**20


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    """A machine with 8 MiB in all, of which 4 MiB are available."""
    path = tmp_path / "meminfo"
    path.write_text(
        "MemTotal:           8192 kB\nMemFree:            1024 kB\nMemAvailable:       4096 kB\n"
        "SwapTotal:             0 kB\nHugePages_Total:       0\n"
    )
    return path


def group(folder: Path, **files: str) -> Path:
    """A folder of a control group; returns the file of its limit."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    return folder / ("memory.max" if "max" in files else "memory.limit_in_bytes")


def test_without_a_control_group_the_machines_estimate_counts(meminfo: Path) -> None:
    assert free_memory(meminfo, []) == 4 * MIB


def test_a_group_leaves_its_limit_minus_its_usage(tmp_path: Path, meminfo: Path) -> None:
    second = group(tmp_path / "v2", max=f"{3 * MIB}\n", current=f"{2 * MIB}\n")
    first = group(tmp_path / "v1", limit_in_bytes=f"{3 * MIB}\n", usage_in_bytes=f"{2 * MIB}\n")
    assert free_memory(meminfo, [second]) == free_memory(meminfo, [first]) == MIB


def test_file_pages_that_can_be_dropped_count_as_free(tmp_path: Path, meminfo: Path) -> None:
    second = group(
        tmp_path / "v2", max=f"{3 * MIB}\n", current=f"{2 * MIB}\n", stat=f"anon 5\ninactive_file {MIB}\n"
    )
    first = group(
        tmp_path / "v1",
        limit_in_bytes=f"{3 * MIB}\n",
        usage_in_bytes=f"{2 * MIB}\n",
        stat=f"inactive_file 5\ntotal_inactive_file {MIB}\n",
    )
    assert free_memory(meminfo, [second]) == free_memory(meminfo, [first]) == 2 * MIB


def test_the_tightest_of_nested_groups_counts(tmp_path: Path, meminfo: Path) -> None:
    inner = group(tmp_path / "pod" / "container", max="max\n", current="5\n")
    outer = tmp_path / "pod" / "memory.max"
    outer.write_text(f"{2 * MIB}\n")
    outer.with_name("memory.current").write_text(f"{3 * MIB}\n")
    missing = tmp_path / "memory.max"
    assert free_memory(meminfo, [inner, missing]) == 4 * MIB
    assert free_memory(meminfo, [inner, outer, missing]) == 0


def test_a_machine_that_reports_nothing_gives_none(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "missing", []) is None
    (tmp_path / "meminfo").write_text("MemTotal: 8192 kB\n")
    assert free_memory(tmp_path / "meminfo", []) is None


def test_a_limit_above_the_machines_memory_is_none(tmp_path: Path, meminfo: Path) -> None:
    unlimited = group(tmp_path / "v1", limit_in_bytes="9223372036854771712\n", usage_in_bytes=f"{7 * MIB}\n")
    assert free_memory(meminfo, [unlimited]) == 4 * MIB


def test_the_files_of_a_process_follow_its_groups(tmp_path: Path) -> None:
    """They are looked up once for each place, and a process may be moved."""
    own = tmp_path / "cgroup"
    for name in ("a", "b"):
        (tmp_path / "groups" / name).mkdir(parents=True)
        (tmp_path / "groups" / name / "memory.max").write_text("max")

    def files_of(name: str) -> tuple[Path, ...]:
        own.write_text(f"0::/{name}\n")
        return limit_files("memory", "memory.limit_in_bytes", "memory.max", own, tmp_path / "groups")

    first = files_of("a")
    assert first == (tmp_path / "groups" / "a" / "memory.max",)
    assert files_of("b") == (tmp_path / "groups" / "b" / "memory.max",)
    assert files_of("a") is first


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="the system does not report its memory")
def test_this_machine_has_free_memory_within_its_limit() -> None:
    free, limit = free_memory(), memory_limit()
    assert free is not None
    assert limit is not None
    assert 0 < free <= limit


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries keep less, or cannot be asked"
)
def test_freed_memory_is_returned() -> None:
    """64 MiB in small blocks, of which one stays: glibc keeps the rest until it is asked."""
    out = run_script(
        """
import ctypes
from llamapipe.host.memory import return_freed_memory

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(4096) for _ in range(2**14)]
for block in blocks:
    ctypes.memset(block, 1, 4096)
used = resident()
for block in blocks[:-1]:
    libc.free(block)
freed = resident()
return_freed_memory()
say(used - freed < 8, freed - resident() > 48)
"""
    )
    assert out == "True True\n"
