"""Whether this machine has AMX for bfloat16, and its system lets processes use it."""

from __future__ import annotations

import ctypes
import sys

import pytest

from llamapipe.native.load import missing_features

_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


def have_tiles() -> bool:
    """Asks the system, as the kernels do."""
    if sys.platform != "linux" or missing_features(["amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni"]):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


needs_tiles = pytest.mark.skipif(
    not have_tiles(),
    reason="needs a CPU with AMX, and leave to use it",
)
