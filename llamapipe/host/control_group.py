"""Where Linux keeps the limits of this process's control group (a container's, a service's) and of those around it."""

from __future__ import annotations

from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def limit_files(
    controller: str, first: str, second: str, own: Path = _OWN, mounted: Path = _MOUNTED
) -> list[Path]:
    """Where a controller's limits would be, innermost first; ``first`` and ``second``: names in the two versions.

    Not all of them exist. ``own`` lists the groups of this process, which are folders somewhere in ``mounted``.
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
