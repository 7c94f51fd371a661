"""The types of weights that llamapipe's kernels multiply on this processor, as the native library says."""

from __future__ import annotations

from llamapipe.errors import BackendError
from llamapipe.gguf.check import TYPES
from llamapipe.native.load import native

NUMBERS = {name: number for number, (name, *_) in TYPES.items()}  # ggml's


def kernel_types() -> list[str]:
    """Their names. Without a native library there are none: tests can be collected from a source archive."""
    try:
        lib = native().lib
    except BackendError:
        return []
    return [name for name, number in NUMBERS.items() if lib.lp_kernels_have(number, 512, 32)]
