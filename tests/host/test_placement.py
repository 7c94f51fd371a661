"""Dividing cores among processes, with systems made of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamapipe.host.cores import (
    CoreShare,
    core_shares,
    divide_cores,
    limit_cores,
    n_numa_nodes,
    pin_thread,
    usable_cores,
)


def system(folder: Path, nodes: dict[int, str], siblings: dict[int, str] | None = None) -> Path:
    """A folder like /sys/devices/system with these lists of cores."""
    for node, cores in nodes.items():
        place = folder / "node" / f"node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cores + "\n")
    for core, cores in (siblings or {}).items():
        place = folder / "cpu" / f"cpu{core}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(cores + "\n")
    return folder


TWO_NODES = {0: "0-3,8-11", 1: "4-7,12-15"}
SIBLINGS = {core: f"{core % 8},{core % 8 + 8}" for core in range(16)}


class TestDivided:
    def test_a_worker_gets_a_node(self, tmp_path: Path) -> None:
        shares = divide_cores(2, set(range(16)), None, system(tmp_path, TWO_NODES))
        assert shares == [
            CoreShare((0, 1, 2, 3, 8, 9, 10, 11), 8, (0,)),
            CoreShare((4, 5, 6, 7, 12, 13, 14, 15), 8, (1,)),
        ]

    def test_fewer_workers_than_nodes_get_several(self, tmp_path: Path) -> None:
        nodes = {node: f"{2 * node}-{2 * node + 1}" for node in range(3)}
        shares = divide_cores(2, set(range(6)), None, system(tmp_path, nodes))
        assert [share.nodes for share in shares] == [(0, 1), (2,)]
        assert shares[0].cores == (0, 1, 2, 3)

    def test_hyperthreads_of_a_core_stay_together(self, tmp_path: Path) -> None:
        shares = divide_cores(4, set(range(16)), None, system(tmp_path, TWO_NODES, SIBLINGS))
        assert [share.cores for share in shares] == [
            (0, 1, 8, 9),
            (2, 3, 10, 11),
            (4, 5, 12, 13),
            (6, 7, 14, 15),
        ]

    def test_more_workers_than_physical_cores_share_them(self, tmp_path: Path) -> None:
        shares = divide_cores(3, {0, 1, 8, 9}, None, system(tmp_path, {0: "0-15"}, SIBLINGS))
        assert sorted(core for share in shares for core in share.cores) == [0, 1, 8, 9]
        assert [share.n_threads for share in shares] == [2, 1, 1]

    def test_the_larger_node_gets_more_workers(self, tmp_path: Path) -> None:
        shares = divide_cores(3, set(range(6)), None, system(tmp_path, {0: "0-1", 1: "2-5"}))
        assert [share.nodes for share in shares] == [(0,), (1,), (1,)]

    def test_only_allowed_cores_are_used(self, tmp_path: Path) -> None:
        shares = divide_cores(2, {1, 2, 5}, None, system(tmp_path, TWO_NODES))
        assert [share.cores for share in shares] == [(1, 2), (5,)]

    def test_a_quota_limits_threads_not_cores(self, tmp_path: Path) -> None:
        shares = divide_cores(2, set(range(16)), 2.5, system(tmp_path, TWO_NODES))
        assert [len(share.cores) for share in shares] == [8, 8]
        assert [share.n_threads for share in shares] == [2, 1]

    @pytest.mark.parametrize("nodes", [{}, {0: "0-1"}, {0: "no list"}])
    def test_a_system_that_tells_no_nodes_has_one(self, tmp_path: Path, nodes: dict[int, str]) -> None:
        shares = divide_cores(2, {0, 1, 2, 3}, None, system(tmp_path, nodes))
        assert [share.cores for share in shares] == [(0, 1), (2, 3)]

    def test_too_many_workers_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="5 processes need 5 cores, and this process may use 4"):
            divide_cores(5, {0, 1, 2, 3}, None, tmp_path)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
class TestThisMachine:
    def test_shares_cover_the_cores_of_this_process(self) -> None:
        allowed = os.sched_getaffinity(0)
        assert {core for share in core_shares(len(allowed)) for core in share.cores} == allowed
        assert 1 <= n_numa_nodes() <= len(allowed)

    def test_a_process_is_pinned_from_its_start_and_this_one_is_not(self) -> None:
        allowed = os.sched_getaffinity(0)
        last = max(allowed)
        with pin_thread((last,)):
            program = "import os; print(*os.sched_getaffinity(0))"
            child = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, text=True)
        assert os.sched_getaffinity(0) == allowed
        assert child.communicate()[0].split() == [str(last)]

    def test_a_part_of_a_quota_limits_the_usable_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llamapipe.host.cores._most", None)
        limit_cores(1)
        assert usable_cores() == 1
