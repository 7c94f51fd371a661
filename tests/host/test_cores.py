"""How many cores a process takes by default: those it may run on, or those that its control group has time for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamapipe.host._control_group import limit_files
from llamapipe.host.cores import cpu_quota

GROUPS = Path("/sys/fs/cgroup")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def quota_below(root: Path) -> float | None:
    """What a process gets whose groups are listed in ``root/own`` and mounted at ``root/groups``."""
    files = limit_files("cpu", "cpu.cfs_quota_us", "cpu.max", root / "own", root / "groups")
    return cpu_quota(files)


@pytest.mark.parametrize(
    ("inner", "outer", "quota"),
    [
        ("max 100000", "max 100000", None),
        ("150000 100000", "max 100000", 1.5),
        ("max 100000", "50000 100000", 0.5),
        ("400000 100000", "200000 100000", 2.0),
        ("150000 50000", None, 3.0),
        (None, None, None),
        ("", "nonsense 5", None),
        ("100000 0", None, None),
        ("-5 100000", None, None),
    ],
)
def test_the_second_version(
    tmp_path: Path, inner: str | None, outer: str | None, quota: float | None
) -> None:
    write(tmp_path / "own", "0::/pod/container\n")
    for folder, text in (("pod/container", inner), ("pod", outer)):
        if text is not None:
            write(tmp_path / "groups" / folder / "cpu.max", text + "\n")
    assert quota_below(tmp_path) == quota


@pytest.mark.parametrize(
    ("controllers", "quota", "period", "expected"),
    [
        ("cpu", "150000", "100000", 1.5),
        ("cpu,cpuacct", "150000", "50000", 3.0),
        ("cpu", "-1", "100000", None),
        ("cpuacct", "150000", "100000", None),
        ("cpu", "150000", None, None),
    ],
)
def test_the_first_version(
    tmp_path: Path, controllers: str, quota: str, period: str | None, expected: float | None
) -> None:
    write(tmp_path / "own", f"4:memory:/elsewhere\n3:{controllers}:/a:b\n")
    folder = tmp_path / "groups" / "cpu" / "a:b"
    write(folder / "cpu.cfs_quota_us", quota + "\n")
    if period is not None:
        write(folder / "cpu.cfs_period_us", period + "\n")
    assert quota_below(tmp_path) == expected


def test_a_container_sees_its_own_group_as_the_outermost(tmp_path: Path) -> None:
    """Docker with the first version: the group is listed as the host sees it, and mounted by itself."""
    write(tmp_path / "own", "3:cpu:/docker/0123\n")
    write(tmp_path / "groups" / "cpu" / "cpu.cfs_quota_us", "200000\n")
    write(tmp_path / "groups" / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert quota_below(tmp_path) == 2.0


def test_no_groups_at_all(tmp_path: Path) -> None:
    assert quota_below(tmp_path) is None


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """The list of processes of a group that has half of a core's time."""
    first = (GROUPS / "cpu").is_dir()
    folder = GROUPS / ("cpu" if first else "") / f"llamapipe-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as e:
        pytest.skip(f"no control group can be made here: {e}")
    try:
        if first:
            (folder / "cpu.cfs_quota_us").write_text("50000")
        else:
            (folder / "cpu.max").write_text("50000 100000")
        yield folder / "cgroup.procs"
    except OSError as e:
        pytest.skip(f"a control group's limit cannot be set here: {e}")
    finally:
        folder.rmdir()


def test_a_process_with_less_time_than_cores(half_a_core: Path) -> None:
    script = (
        f"open({str(half_a_core)!r}, 'w').write('0')\n"
        "import llamapipe as lp\n"
        "from llamapipe.llama import Context\n"
        "with lp.Model.demo() as model, Context(model, n_ctx=64) as context:\n"
        "    print(context.n_threads, context.n_threads_batch)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("1 1\n", "")
