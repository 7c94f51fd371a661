"""llamapipe's folders on the user's disk: a cache of files that can be recreated, and private folders of a process."""

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

    ``LLAMAPIPE_CACHE_DIR`` sets it. By default it is ``llamapipe`` in ``XDG_CACHE_HOME`` if that is set, else in
    ``~/Library/Caches`` on macOS, ``%LOCALAPPDATA%`` on Windows, ``~/.cache`` elsewhere. Raises RuntimeError if there
    is no home folder.
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
    """Create a folder in ``kind`` of the user's cache that only the user can read; delete it when the block ends.

    This also deletes folders that killed processes left behind, whose locks nobody holds. Raises OSError if the folder
    cannot be created, RuntimeError if there is no home folder.
    """
    parent = cache_folder() / kind
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (parent / "lock").open("w") as everyone:
        # Held until the new folder is locked. Otherwise another process could take it for a folder left behind.
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
    finally:  # after the lock's file is closed: Windows deletes no open file
        shutil.rmtree(folder, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    with suppress(FileNotFoundError), (folder / "lock").open("w") as lock:
        try:
            files.lock(lock.fileno(), wait=False)
        except BlockingIOError:
            return True
    return False
