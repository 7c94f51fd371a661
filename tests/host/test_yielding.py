"""Work that leaves the cores to others, and how long."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from llamapipe.host.cores import YIELDS_BY, set_group_nice, yielding

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux only")


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux_only
def test_a_call_yields_and_so_do_its_threads() -> None:
    def inner() -> int:
        priorities: list[int] = []
        thread = threading.Thread(target=lambda: priorities.append(priority()))
        thread.start()
        thread.join()
        return priorities[0]

    before = priority()
    assert yielding(inner) == yielding(priority) == min(before + YIELDS_BY, 19)
    assert priority() == before


def test_results_and_errors_are_those_of_the_function() -> None:
    assert yielding(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        yielding(lambda: 1 // 0)


def test_a_session_without_a_group_is_left_alone() -> None:
    set_group_nice(2**22 + 1, yields=True)  # there is no such process


@linux_only
def test_a_session_yields_and_ends_it() -> None:
    autogroup = Path("/proc/self/autogroup")
    if not autogroup.exists() or not autogroup.read_text().startswith("/autogroup"):
        pytest.skip("the kernel has no autogroups here")
    set_group_nice(os.getpid(), yields=True)
    try:
        assert autogroup.read_text().split()[-1] == str(YIELDS_BY)
    finally:
        set_group_nice(os.getpid(), yields=False)
    assert autogroup.read_text().split()[-1] == "0"
