"""Whether this processor has the features that the native library was compiled for.

A library for this machine's own instructions ends the process with SIGILL on a processor that lacks one of them. pip
keeps wheels that it built from a source archive or a commit, and does not ask on which processor that was.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_CHUNK_BYTES = 4096  # the kernel writes a record of one core at a time: a small read does not ask all cores


def missing_features(required: Iterable[str], cpuinfo: str = "/proc/cpuinfo") -> list[str]:
    """The features among ``required`` that this processor lacks, sorted. Names are those of Linux's ``cpuinfo``.

    Empty where the system does not list them (macOS, some containers). Takes about 0.1 ms.
    """
    listed = _listed(cpuinfo)
    return [] if listed is None else sorted(set(required) - listed)


def _listed(cpuinfo: str) -> set[str] | None:
    """The features of the first core; None: they cannot be read."""
    text = b""
    try:
        file = os.open(cpuinfo, os.O_RDONLY)
    except OSError:
        return None
    try:
        while chunk := os.read(file, _CHUNK_BYTES):
            text += chunk
            *lines, _ = text.split(b"\n")
            for line in lines:
                key, _, names = line.partition(b":")
                if key.strip() in (b"flags", b"Features"):
                    return set(names.decode("ascii", "replace").split())
    except OSError:
        return None
    finally:
        os.close(file)
    return None
