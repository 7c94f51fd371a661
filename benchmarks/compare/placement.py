"""Has the code of all sides read into memory anew, so that no program keeps its places from turn to turn.

Files stay where they are in memory while they are cached, whichever process maps them. Where the code of llama.cpp's
kernels lies makes up to 15 % of its speed: of byte-identical copies of one library, one stays slower than the others
(design/build.md). Without this a comparison would compare such places.
"""

from __future__ import annotations

import os
from pathlib import Path

from llamapipe.native.load import LIB_DIR


def forget_code(peers: Path) -> None:
    """Drops programs and libraries from the system's cache; does nothing to what is mapped, or not on Linux.

    Before each turn of processes: sides of one program share its places for that turn.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    files = [*LIB_DIR.parent.rglob("*.so*"), *peers.glob("bin/*"), *peers.rglob("*.so*")]
    for path in filter(Path.is_file, files):
        try:
            with path.open("rb") as file:
                os.fsync(file)  # what was just built is not written yet, and stays
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as e:
            print(f"{path.name} stays where it is: {e}")
