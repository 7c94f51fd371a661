"""Counts the cores that this process may compute on, and divides cores among several processes.

llama.cpp's compute threads busy-wait for each other after every operation. With more threads than cores they are
several times slower than with fewer (design/cpu.md). Memory on another NUMA node is slower, and two processes on the
hyperthreads of one core slow each other down. So a process gets whole NUMA nodes if there are enough, and otherwise
whole physical cores of one node.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llamapipe.host._control_group import limit_files

T = TypeVar("T")
_TRIES = 20
YIELDS_BY = 11  # nice levels: such a thread gets 8 % of a core that another thread wants, too
_most: int | None = None


def limit_cores(n: int) -> None:
    """Limit this process to computing on ``n`` cores, its part of a quota that it shares with other processes.

    Call it before creating an engine.
    """
    global _most
    _most = n


def usable_cores() -> int:
    """Return how many cores this process may run on, or fewer if its control group has a smaller quota of CPU time.

    ``limit_cores`` can lower the number.
    """
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(limit_files("cpu", "cpu.cfs_quota_us", "cpu.max"))
    if quota is not None:
        n = min(n, max(math.ceil(quota), 1))
    return n if _most is None else min(n, _most)


def yielding(function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, called in a thread that leaves the cores to other threads that need them.

    Threads that the function starts inherit this. On systems other than Linux, where threads have no priorities of
    their own, this is an ordinary call.
    """
    if sys.platform != "linux":
        return function(*arguments)
    results: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        thread_id = threading.get_native_id()
        os.setpriority(
            os.PRIO_PROCESS, thread_id, min(os.getpriority(os.PRIO_PROCESS, thread_id) + YIELDS_BY, 19)
        )
        try:
            results.append(function(*arguments))
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run, name="llamapipe-yielding")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return results[0]


def set_group_nice(pid: int, yields: bool) -> None:
    """Lower the priority of a process's session by ``YIELDS_BY`` nice levels, or reset it if not ``yields``.

    Linux with autogroups divides the cores among sessions, whatever priorities their threads have. Does nothing without
    autogroups, as in containers and services.
    """
    for _ in range(_TRIES):
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(YIELDS_BY if yields else 0))
        except BlockingIOError:  # the kernel accepts one change per 0.1 s
            time.sleep(0.1)
        except OSError:
            return
        else:
            return


def cpu_quota(files: Sequence[Path]) -> float | None:
    """Return the smallest quota in limit files, in cores (CPU seconds per second); None if there is no quota."""
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


_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class CoreShare:
    """One process's share of the cores.

    ``cores``: the numbers of its cores; empty if the system cannot pin processes. ``n_threads``: how many threads may
    compute at the same time, fewer than ``cores`` if a quota of CPU time allows less. ``nodes``: the NUMA nodes of its
    cores.
    """

    cores: tuple[int, ...]
    n_threads: int
    nodes: tuple[int, ...] = ()


@contextmanager
def pin_thread(cores: Sequence[int]) -> Iterator[None]:
    """Pin this thread to cores until the block ends; a process started in the block stays pinned.

    Does nothing if ``cores`` is empty. Raises OSError if the process may not use any of the cores.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def core_shares(n: int) -> list[CoreShare]:
    """Divide the cores that this process may use into ``n`` shares. Raises ValueError if there are fewer cores."""
    quota = cpu_quota(limit_files("cpu", "cpu.cfs_quota_us", "cpu.max"))
    if hasattr(os, "sched_getaffinity"):
        return divide_cores(n, os.sched_getaffinity(0), quota, _SYSTEM)
    n_cores = os.cpu_count() or 1
    _check(n, n_cores)
    return [CoreShare((), part) for part in _parts(n_cores, n)]


def n_numa_nodes() -> int:
    """Return the number of NUMA nodes that have cores this process may use; at least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return max(len(_nodes(allowed, _SYSTEM)), 1)


def divide_cores(n: int, allowed: set[int], quota: float | None, system: Path) -> list[CoreShare]:
    """Divide the ``allowed`` cores into ``n`` disjoint shares; see ``core_shares``. ``quota``: see ``cpu_quota``.

    ``system``: the folder that contains ``node`` and ``cpu``. Raises ValueError if there are fewer than ``n`` cores.
    """
    _check(n, len(allowed))
    nodes = _nodes(allowed, system)
    per_share: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # cores, nodes
    if n <= len(nodes):
        numbers = iter(nodes)
        for size in _parts(len(nodes), n):
            own = tuple(next(numbers) for _ in range(size))
            per_share.append((tuple(sorted(core for node in own for core in nodes[node])), own))
    else:
        n_shares = dict.fromkeys(nodes, 0)
        for _ in range(n):  # the next share goes to the node where it is largest
            n_shares[max(nodes, key=lambda node: len(nodes[node]) / (n_shares[node] + 1))] += 1
        for node, cores in nodes.items():
            per_share += [(part, (node,)) for part in _split(cores, n_shares[node], system)]
    n_all = len(allowed) if quota is None else min(len(allowed), max(math.ceil(quota), 1))
    if n_all == len(allowed):
        return [CoreShare(cores, len(cores), own) for cores, own in per_share]
    limits = [max(part, 1) for part in _parts(n_all, n)]
    return [
        CoreShare(cores, min(limit, len(cores)), own)
        for (cores, own), limit in zip(per_share, limits, strict=True)
    ]


def _check(n: int, n_cores: int) -> None:
    if n > n_cores:
        raise ValueError(
            f"{n} processes need {n} cores, and this process may use {n_cores}; start at most {n_cores}"
        )


def _parts(n: int, n_parts: int) -> list[int]:
    """Return the sizes of nearly equal parts of ``n``, the larger ones first."""
    return [n // n_parts + (i < n % n_parts) for i in range(n_parts)]


def _nodes(allowed: set[int], system: Path) -> dict[int, tuple[int, ...]]:
    """Return the allowed cores of each NUMA node; node 0 has all cores if the system reports no nodes."""
    nodes: dict[int, tuple[int, ...]] = {}
    for folder in (system / "node").glob("node[0-9]*"):
        cores = _read_ranges(folder / "cpulist") & allowed
        if cores:  # a node may have memory only
            nodes[int(folder.name.removeprefix("node"))] = tuple(sorted(cores))
    if set().union(*nodes.values()) != allowed:
        return {0: tuple(sorted(allowed))}
    return dict(sorted(nodes.items()))


def _split(cores: Sequence[int], n: int, system: Path) -> list[tuple[int, ...]]:
    """Split a node's cores into ``n`` parts, without dividing physical cores if there are at least ``n`` of them."""
    physical: dict[tuple[int, ...], list[int]] = {}
    for core in cores:
        topology = system / "cpu" / f"cpu{core}" / "topology"
        siblings = _read_ranges(topology / "core_cpus_list") or _read_ranges(
            topology / "thread_siblings_list"
        )
        physical.setdefault(tuple(sorted(siblings or {core})), []).append(core)
    units = list(physical.values())
    if len(units) < n:
        units = [[core] for core in cores]
    parts = []
    for size in _parts(len(units), n):
        parts.append(tuple(sorted(core for unit in units[:size] for core in unit)))
        units = units[size:]
    return parts


def _read_ranges(file: Path) -> set[int]:
    """Return the numbers in a file with text such as ``0-3,8-11``; an empty set if the file cannot be read."""
    try:
        text = file.read_text().strip()
        numbers: set[int] = set()
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
        return numbers
    except (OSError, ValueError):
        return set()
