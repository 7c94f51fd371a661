"""Names of llama-cpp-python that are neither classes nor methods: its constants, and attributes that are missing here.

The constants are those of options that the constructor has. They come from the tables that the options are checked
with, so that each name and its number mean the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from llamapipe._messages import instead_of, quoted, unknown_attribute
from llamapipe.compat import options

CONSTANTS: Final[dict[str, int]] = {
    f"{prefix}_{name.upper()}": number
    for prefix, names in (
        ("GGML_TYPE", options.TYPES),
        ("LLAMA_POOLING_TYPE", options.POOLING),
        ("LLAMA_SPLIT_MODE", options.SPLIT_MODES),
        ("LLAMA_ROPE_SCALING_TYPE", options.ROPE_SCALING),
    )
    for number, name in names.items()
}


def missing(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """An error for an attribute that ``owner`` lacks: the reason if llama-cpp-python has it, else the nearest name."""
    if (reason := instead_of(name, owner)) is not None:
        return AttributeError(f"{owner} has no {quoted(name)} here: {reason}", name=name)
    if name.startswith("_"):  # Python itself asks for many of these
        return AttributeError(f"{owner!r} object has no attribute {name!r}", name=name)
    return unknown_attribute(owner, name, known)
