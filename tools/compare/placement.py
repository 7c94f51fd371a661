"""Has the code of all sides read into memory anew, so that each process gets places of its own.

Files stay where they are in memory for as long as they are cached, whoever maps them, and where the code of llama.cpp's
kernels lies makes up to 15 % of its speed: of byte-identical copies of one library, one stays slower than the others
(docs/decisions.md, 2026-11-22, sixth part). Without this a comparison would compare such places.
"""

from __future__ import annotations

import os
from pathlib import Path

from llamapipe.native.load import LIB_DIR


def forget_code(peers: Path) -> None:
    """Drops programs and libraries from the system's cache; does nothing to what is mapped, or not on Linux."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in [*LIB_DIR.parent.rglob("*.so*"), *peers.glob("bin/*"), *peers.rglob("*.so*")]:
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)  # what was just built is not written yet, and stays
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
