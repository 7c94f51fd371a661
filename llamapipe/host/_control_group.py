"""Finds the files in which Linux keeps the limits of this process's control groups.

A container or service has its own group inside others, and each of them may set a limit. Both versions of control
groups are supported, also when a system uses both.
"""

from __future__ import annotations

from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def limit_files(
    controller: str, first: str, second: str, own: Path = _OWN, mounted: Path = _MOUNTED
) -> list[Path]:
    """Paths of a controller's limit in all groups around this process, innermost first; some may not exist.

    ``first`` and ``second``: the file's name in version 1 and version 2. ``own``: the file that lists the groups of
    this process. ``mounted``: the folder below which the groups are.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    files = []
    for _, controllers, path in lines:
        if not controllers:
            root, name = mounted, second
        elif controller in controllers.split(","):
            root, name = mounted / controller, first
        else:
            continue
        inner = root / path.lstrip("/")
        files += [folder / name for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return files
