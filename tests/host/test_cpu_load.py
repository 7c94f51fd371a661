"""What Linux tells of threads and cores, from files that are made here and from the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llamapipe.host import cpu_load as module
from llamapipe.host.cpu_load import CoreTimes, IdleCores, OtherWork, RunDelay, cpu_load

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's schedstat")


def counted_now() -> object:
    cores = IdleCores()
    cores.close()
    return cores.counted


def write_task(tasks: Path, thread_id: int, text: str) -> None:
    (tasks / str(thread_id)).mkdir(exist_ok=True)
    (tasks / str(thread_id) / "schedstat").write_text(text)


def test_run_delays_are_added_up_and_read_again(tmp_path: Path) -> None:
    write_task(tmp_path, 7, "1000000000 250000000 12\n")
    write_task(tmp_path, 8, "500000000 250000000 3\n")
    delay = RunDelay([7, 8], tmp_path)
    assert delay.read() == pytest.approx((1.5, 0.5))
    write_task(tmp_path, 8, "2500000000 1250000000 4\n")
    assert delay.read() == pytest.approx((3.5, 1.5))
    delay.close()
    delay.close()
    assert delay.read() == (0.0, 0.0)


def test_a_missing_thread_is_an_error_and_leaves_no_file_open(tmp_path: Path) -> None:
    write_task(tmp_path, 7, "1 2 3\n")
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        RunDelay([7, 8], tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == n_open


def test_only_cores_of_this_process_are_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(os, "getpriority", lambda which, who: 0)
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  0 0 0 9999 0 0 0 0 0 0\n"
        "cpu0 5 10 3 100 20 0 0 0 0 0\n"
        "cpu1 5 50 3 500 50 0 0 0 0 0\n"
        "cpu2 5 0 3 70 0 0 0 0 0 0\n"
        "intr 1 2 3\n"
    )
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    cores = IdleCores(stat)
    assert cores.read() == pytest.approx(
        200 * tick_s
    )  # idle, waiting for disks, and what niced processes have
    cores.close()
    monkeypatch.setattr(os, "getpriority", lambda which, who: 10)
    cores = IdleCores(stat)
    assert cores.read() == pytest.approx(190 * tick_s)  # a niced process is no better than others
    cores.close()
    cores.close()


def test_other_work_is_what_is_neither_idle_nor_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    now_s = iter([10.0, 12.0, 12.05, 14.05])
    ours_s = iter([1.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now_s))
    monkeypatch.setattr(time, "process_time", lambda: next(ours_s))
    hertz = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"

    def idle(seconds: float) -> None:
        stat.write_text(f"cpu0 0 0 0 {round(seconds * hertz):06} 0 0 0\ncpu1 0 0 0 000000 0 0 0\n")

    idle(0)
    others = OtherWork(stat)
    idle(1.5)  # of four seconds of two cores we ran for one: others had the remaining one and a half
    assert others.read() == pytest.approx(0.75)
    assert others.read() == 0  # too soon to tell
    idle(5.5)
    assert others.read() == 0
    others.close()


def test_the_newest_old_mark_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counted_now()
    marks = tuple((counted, CoreTimes(now_s, 2 * now_s, 0.0)) for now_s in (1.0, 5.0, 9.9))
    monkeypatch.setattr(module, "_marks", marks)
    earlier = []
    for now_s in (10.0, 10.1, 1.1, 300.0):  # at 1.1 no mark is old enough, at 300 all are stale
        monkeypatch.setattr(time, "perf_counter", lambda now_s=now_s: now_s)
        load = cpu_load()
        assert load is not None
        load.close()
        earlier.append(load.earlier and load.earlier.now_s)
        monkeypatch.setattr(module, "_marks", marks)
    assert earlier == [5.0, 9.9, 1.0, 300.0]


@pytest.mark.parametrize("change", ["os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])", "os.nice(1)"])
def test_marks_of_other_cores_or_another_priority_are_not_compared_with(change: str) -> None:
    program = (
        "import os, time\n"
        "from llamapipe.host.cpu_load import cpu_load\n"
        "time.sleep(0.2)\n"
        f"{change}\n"
        "now_s = time.perf_counter()\n"
        "print(cpu_load().earlier.now_s >= now_s)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_threads_mark_while_others_read() -> None:
    names = {name: getattr(module, name) for name in ("_APART_S", "_marks")}
    failures: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(300):
                module.mark_cores()
                module._recent_mark(None)
        except BaseException as e:
            failures.append(e)

    module._APART_S = 0.0
    try:
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for name, value in names.items():
            setattr(module, name, value)
    assert not failures


def test_the_real_files() -> None:
    load = cpu_load()
    assert load is not None
    assert load.earlier is not None
    assert load.earlier.idle_s <= load.idle_s()
    assert load.earlier.process_s <= load.process_s()
    try:
        load.watch([threading.get_native_id()])
        run_s, delay_s = load.run_and_delay_s()
        idle_s, process_s = load.idle_s(), load.process_s()
        sum(range(1_000_000))
        assert load.run_and_delay_s()[0] >= run_s
        assert load.run_and_delay_s()[1] >= delay_s
        assert load.idle_s() >= idle_s
        assert load.process_s() > process_s
        assert load.n_throttled() >= 0
    finally:
        load.close()
        load.close()


def test_a_system_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.RunDelay.__init__, "__defaults__", (tmp_path,))
    assert cpu_load() is None
    write_task(tmp_path, os.getpid(), "0 0 0\n")  # a kernel built without it
    assert cpu_load() is None
