"""Files that processes share: how they are opened, locks, and places."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from llamapipe.host import files

_HOLDER = """
import os, sys
from llamapipe.host import files
fd = files.open_file(sys.argv[1], os.O_RDWR)
files.lock(fd)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first = files.open_file(path, os.O_RDWR | os.O_CREAT)
    second = files.open_file(path, os.O_RDWR)
    try:
        files.lock(first)
        with pytest.raises(BlockingIOError):
            files.lock(second, wait=False)
        files.unlock(first)
        files.lock(second, wait=False)
    finally:
        os.close(first)
        os.close(second)


def test_a_lock_keeps_nobody_from_the_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = files.open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        files.lock(fd)
        assert files.write_at(fd, b"content", 0) == 7
        assert path.read_bytes() == b"content"
    finally:
        os.close(fd)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    command = [sys.executable, "-c", _HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        fd = files.open_file(path, os.O_RDWR)
        try:
            with pytest.raises(BlockingIOError):
                files.lock(fd, wait=False)
            holder.kill()
            holder.wait()
            files.lock(fd)
        finally:
            os.close(fd)


def test_reads_and_writes_at_a_place(tmp_path: Path) -> None:
    fd = files.open_file(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        assert files.write_at(fd, memoryview(b"\r\n\x1aend"), 5) == 6
        assert files.read_at(fd, 100, 0) == b"\0\0\0\0\0\r\n\x1aend"
        assert files.read_at(fd, 3, 8) == b"end"
        assert files.read_at(fd, 3, 11) == b""
    finally:
        os.close(fd)


def test_an_open_file_can_be_renamed_and_deleted(tmp_path: Path) -> None:
    path, renamed = tmp_path / "file", tmp_path / "renamed"
    fd = files.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        path.replace(renamed)
        assert files.has_name(fd, renamed)
        assert not files.has_name(fd, path)
        path.touch()
        assert not files.has_name(fd, path)
        renamed.unlink()
    finally:
        os.close(fd)
    assert not renamed.exists()


def test_what_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.open_file(tmp_path / "missing", os.O_RDONLY)
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(FileExistsError):
        files.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    link = tmp_path / "link"
    with suppress(OSError):  # on Windows few users may make one
        link.symlink_to(path)
    if not link.is_symlink():
        pytest.skip("symbolic links cannot be made here")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        files.open_file(link, os.O_RDONLY)


def test_programs_that_are_started_do_not_get_it(tmp_path: Path) -> None:
    fd = files.open_file(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows tells neither owners nor rights here")
def test_whose_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o600)
    status = path.stat()
    assert files.is_ours(status)
    assert not files.may_be_written_by_others(status)
    assert not files.may_be_used_by_others(status)
    path.chmod(0o620)
    assert files.may_be_written_by_others(path.stat())
    path.chmod(0o604)
    assert files.may_be_used_by_others(path.stat())
    assert not files.may_be_written_by_others(path.stat())
    fields = list(status)
    fields[4] = 123456  # st_uid
    other = os.stat_result(fields)
    assert not files.is_ours(other)
    assert files.is_ours(other, 0, 123456)
