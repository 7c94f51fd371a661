"""Keeps locks and finished results in the user's cache. A result is complete or absent, even during other builds."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "result.json"


@contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Create ``path`` and hold an exclusive lock on it. Report a wait for another process with ``say``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":  # not supported yet; msvcrt.locking would go here
        yield
        return
    import fcntl

    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another build is using the same folder: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        # Closing the file releases the lock, as does the end of a killed process.
        yield


def key_of(parts: dict[str, Any]) -> str:
    """Return a short name for a set of options; equal parts give equal keys."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def publish(files: dict[str, Path], about: dict[str, Any], target: Path) -> None:
    """Copy ``files`` (name → path) and a manifest into the new folder ``target``, which appears atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix="new-"))
    try:
        sums = {}
        for name, path in files.items():
            shutil.copyfile(path, scratch / name)
            shutil.copymode(path, scratch / name)
            sums[name] = _sum(scratch / name)
        manifest = {**about, "files": sums}
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def lookup(target: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished result; None if there is none, or if one of its files is missing or damaged."""
    try:
        manifest: dict[str, Any] = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest["files"].items():
            if _sum(target / name) != expected:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return manifest


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
