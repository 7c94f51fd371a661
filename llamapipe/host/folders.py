"""llamapipe's folders on the user's disk: one for files that can be recreated, and private ones for a process."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llamapipe.host import files


def cache_folder() -> Path:
    """Return llamapipe's folder in the user's cache, which may not exist yet. It may be deleted at any time.

    ``LLAMAPIPE_CACHE_DIR`` sets it; else it is ``llamapipe`` in ``XDG_CACHE_HOME``, ``~/Library/Caches`` on macOS,
    ``%LOCALAPPDATA%`` on Windows, ``~/.cache`` elsewhere. Raises RuntimeError if there is no home folder.
    """
    if own := os.environ.get("LLAMAPIPE_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    # The XDG specification says to ignore relative paths.
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
        return Path(xdg) / "llamapipe"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llamapipe"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "llamapipe"
    return Path.home() / ".cache" / "llamapipe"


@contextmanager
def private_folder(kind: str) -> Iterator[Path]:
    """Create a folder in the user's cache that only the user can read; it is deleted when the block ends.

    Folders left behind by killed processes are deleted as well, recognized by a lock that nobody holds. Raises OSError,
    RuntimeError if there is no home folder.
    """
    parent = cache_folder() / kind
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (parent / "lock").open("w") as everyone:
        # Held until the new folder is locked: another process would take it for one that was left behind.
        files.lock(everyone.fileno())
        for old in parent.iterdir():
            if old.is_dir() and not _is_in_use(old):
                shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=parent))
        own = (folder / "lock").open("w")
        files.lock(own.fileno())
    try:
        with own:
            yield folder
    finally:  # once the lock's file is closed: Windows deletes none that is open
        shutil.rmtree(folder, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    with suppress(FileNotFoundError), (folder / "lock").open("w") as lock:
        try:
            files.lock(lock.fileno(), wait=False)
        except BlockingIOError:
            return True
    return False
