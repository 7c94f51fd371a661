"""Finds the files in which Linux keeps the limits of this process's control groups.

A container or service has its own group inside others, and each of them may set a limit. Both versions of control
groups are supported, also when a system uses both.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


@cache
def limit_files(
    controller: str, first: str, second: str, own: Path = _OWN, mounted: Path = _MOUNTED
) -> tuple[Path, ...]:
    """The readable files with a limit of a controller, of all groups around this process, innermost first.

    Found once per process: limits may change while it runs, its groups hardly do. ``first`` and ``second``: the file's
    name in version 1 and version 2. ``own``: the file that lists the groups of this process. ``mounted``: the folder
    below which the groups are.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return ()
    files: list[Path] = []
    for _, controllers, path in lines:
        if not controllers:
            root, name = mounted, second
        elif controller in controllers.split(","):
            root, name = mounted / controller, first
        else:
            continue
        inner = root / path.lstrip("/")
        files += [folder / name for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return tuple(file for file in files if os.access(file, os.R_OK))
