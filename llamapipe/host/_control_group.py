"""Finds the files that hold the limits of this process's control groups on Linux.

A container or service has its own group inside others, and each group may set a limit. Both versions of control groups
are supported, even on a system that uses both.
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
    """Return a controller's readable limit files in all groups around this process, innermost first.

    ``first`` and ``second``: the file's name in version 1 and version 2. ``own``: the file that lists the groups of
    this process. ``mounted``: the folder that contains the groups.
    """
    try:
        groups = own.read_text()
    except OSError:
        return ()
    return _files_of(groups, controller, first, second, mounted)


@lru_cache(maxsize=16)
def _files_of(groups: str, controller: str, first: str, second: str, mounted: Path) -> tuple[Path, ...]:
    """Return the files, cached by ``groups``, because the process may be moved to other groups."""
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
