"""Patches the pinned llama.cpp: fixes faults that no newer source archive fixes.

Each patch names its fault, and is removed once the pinned version includes the fix. A user's own tree is not patched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from native_build.errors import BuildError


@dataclass(frozen=True)
class Patch:
    """Replaces ``before`` with ``after`` in the file ``path``. ``sha256``: the hash of the patched file."""

    path: str
    before: str
    after: str
    sha256: str

    def apply(self, tree: Path) -> None:
        """Change the file. Raises BuildError unless the result has the expected hash."""
        file = tree / self.path
        text = file.read_text(encoding="utf-8").replace(self.before, self.after, 1)
        if hashlib.sha256(text.encode()).hexdigest() != self.sha256:
            raise BuildError(
                f"the patch of {self.path} does not fit the pinned source",
                "third_party/README.md says how to move the pin; native_build/patches.py has the patch",
            )
        file.write_text(text, encoding="utf-8")


PATCHES = (
    # CVE-2026-137567: anyone who reaches an RPC worker could write below a buffer. The destination of COPY_TENSOR was
    # compared with the buffer's end only, and a tensor without elements is not checked when it is read.
    Patch(
        "ggml/src/ggml-rpc/ggml-rpc.cpp",
        "if (dst_data + src_size > dst_base + dst_buf_sz) {",
        "if (dst_data < dst_base || src_size > dst_buf_sz || dst_data - dst_base > dst_buf_sz - src_size) {",
        "d35998546eaf2639e08ccb8e126d5ef3b157433eda6b8c6605a86e0527fb8455",
    ),
)


def digest(patches: Sequence[Patch]) -> str:
    """Return a text that changes with the patches."""
    return hashlib.sha256(repr(tuple(patches)).encode()).hexdigest()[:12]
