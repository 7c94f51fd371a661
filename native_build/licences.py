"""Collects the licence of llama.cpp and the notices of third-party code that is compiled with it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

# Files with a separate licence or notice. Other such files (KleidiAI, SYCL …) are not compiled.
_WHOLE = ("ggml/src/ggml-cpu/llamafile/sgemm.cpp",)
_LINES = ("ggml/src/ggml-cpu/ops.cpp",)
# Third-party code in libmtmd: licence texts, and sources that end with their licence.
_TEXTS = ("vendor/hash/rotate-bits/LICENSE.md", "vendor/hash/xxhash/LICENSE", "vendor/hash/sha256/LICENSE")
_ENDS = ("vendor/stb/stb_image.h", "vendor/miniaudio/miniaudio.h")
_END = "This software is available"


def llama_cpp_licence(tree: Path) -> str:
    """Return the text to ship with the libraries, read from the source tree that they were compiled from."""
    parts = [(tree / "LICENSE").read_text(encoding="utf-8").strip()]
    for name, notice in _notices(tree):
        parts.append(f"{'-' * 80}\n{name}:\n\n{notice}")
    return "\n\n".join(parts) + "\n"


def _notices(tree: Path) -> Iterator[tuple[str, str]]:
    for name in (*_WHOLE, *_LINES):
        path = tree / name
        if not path.is_file():  # a different llama.cpp may lack the file
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if name in _WHOLE:
            comment = list(takewhile(lambda line: line.startswith("//"), lines))
        else:
            comment = [
                line.strip() for line in lines if line.lstrip().startswith("//") and "Copyright (c)" in line
            ]
        if comment:
            yield name, "\n".join(line.removeprefix("//").strip() for line in comment)
    for name in (*_TEXTS, *_ENDS):
        path = tree / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if name in _ENDS:
            text = text[text.rfind(_END) :].removesuffix("*/\n")
        yield name, text.strip()
