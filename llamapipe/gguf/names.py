"""Reads the name of a GGUF file: the model, the number of the file's part, and the quantization.

Open this file to support another naming scheme.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.ASCII)
_QUANTIZATION = re.compile(r"[-._]((?:ud-)?(?:i?q\d\w*|tq\d\w*|mxfp4\w*|b?f16|f32))$", re.IGNORECASE)


class FileName(NamedTuple):
    """``stem``: the model, including its folder. ``part``: counts from 1. ``n_parts``: 0 if the name has no numbers."""

    stem: str
    part: int
    n_parts: int


def read_name(name: str) -> FileName:
    """Split a file's name into the model, the number of its part, and the number of parts."""
    match = _PART.search(name)
    if match is None:
        return FileName(name.removesuffix(".gguf"), 1, 0)
    return FileName(name[: match.start()], int(match[1]), int(match[2]))


def part_name(stem: str, part: int, n_parts: int) -> str:
    """Return the file name of a part of a model; ``part`` is counted from 1."""
    return f"{stem}-{part:05}-of-{n_parts:05}.gguf"


def split_quantization(stem: str) -> tuple[str, str | None]:
    """Split a stem such as ``model-Q4_K_M`` into the text before its quantization, and the quantization or None."""
    match = _QUANTIZATION.search(stem)
    return (stem, None) if match is None else (stem[: match.start()], match[1].upper())
