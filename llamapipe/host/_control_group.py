"""Finds the files in which Linux keeps the limits of this process's control groups.

A container or service has its own group inside others, and each of them may set a limit. Both versions of control
groups are supported, also when a system uses both.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def limit_files(
    controller: str, first: str, second: str, own: Path = _OWN, mounted: Path = _MOUNTED
) -> tuple[Path, ...]:
    """Return the readable files with a limit of a controller, of all groups around this process, innermost first.

    ``first`` and ``second``: the file's name in version 1 and version 2. ``own``: the file that lists the groups of
    this process. ``mounted``: the folder below which the groups are.
    """
    try:
        groups = own.read_text()
    except OSError:
        return ()
    return _files_of(groups, controller, first, second, mounted)


@lru_cache(maxsize=16)
def _files_of(groups: str, controller: str, first: str, second: str, mounted: Path) -> tuple[Path, ...]:
    """Find the files, once for the groups that a process is in: it may be moved to others."""
    files: list[Path] = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = mounted, second
        elif controller in controllers.split(","):
            root, name = mounted / controller, first
        else:
            continue
        inner = root / path.lstrip("/")
        files += [folder / name for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return tuple(file for file in files if os.access(file, os.R_OK))
