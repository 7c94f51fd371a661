"""Flags that avoid known compiler bugs, chosen by testing the compiler instead of comparing its version."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from native_build.paths import cache_dir

_HEADER = Path(__file__).with_name("amx_tileconfig.h")
_MARK = "23130"
# A program with a store that only ldtilecfg reads. If the compiler drops the store, the assembly lacks the mark.
_PROGRAM = f"""#include <immintrin.h>
struct config {{ unsigned char head[16]; unsigned short colsb[16]; unsigned char rows[16]; }};
void load(void) {{ struct config c = {{{{1}}, {{0}}, {{0}}}}; c.colsb[7] = {_MARK}; _tile_loadconfig(&c); }}
"""


def workaround_flags(cxx: Sequence[str]) -> tuple[str, ...]:
    """Return flags for C and C++; empty if the compiler needs none."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not _loses_tile_configuration(cxx):
        return ()
    # The header is copied to a path that is the same for every clone, so that all clones share one build in the cache.
    text = _HEADER.read_bytes()
    copy = cache_dir() / "include" / f"amx_tileconfig-{hashlib.sha256(text).hexdigest()[:12]}.h"
    copy.parent.mkdir(parents=True, exist_ok=True)
    if not copy.is_file():
        with tempfile.NamedTemporaryFile(dir=copy.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(copy)
    return ("-include", str(copy))


def _loses_tile_configuration(cxx: Sequence[str]) -> bool:
    command = [*cxx, "-O2", "-mamx-tile", "-S", "-o", "-", "-x", "c++", "-"]
    done = subprocess.run(command, input=_PROGRAM, capture_output=True, text=True, check=False)
    return done.returncode == 0 and _MARK not in done.stdout
