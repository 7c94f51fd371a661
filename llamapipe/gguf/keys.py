"""Reads single values of a GGUF file's metadata and checks their types and limits.

A missing key is not an error here; a value of the wrong type, or outside its limits, is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamapipe.gguf.reader import ARRAY, BOOL, I32, TYPE_NAMES, U32, Array, Damage, Entry


def text(entries: dict[str, Entry], key: str) -> str | None:
    """The value of a string key; None if it is missing."""
    entry = entries.get(key)
    if entry is None:
        return None
    if not isinstance(entry.value, bytes):
        raise Damage(f"{key} must be a string")
    return entry.value.decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Keys:
    """The metadata of one architecture, by the part of the key that follows the architecture's name."""

    entries: dict[str, Entry]
    architecture: str

    def name(self, key: str) -> str:
        """The full key, with the architecture's name."""
        return f"{self.architecture}.{key}"

    def get(self, key: str, kind: int) -> int | None:
        """The value of a key of type `kind` (an integer type or bool); None if it is missing."""
        entry = self.entries.get(self.name(key))
        if entry is None:
            return None
        if entry.kind != kind or not isinstance(entry.value, int):
            raise Damage(f"{self.name(key)} must be {TYPE_NAMES[kind]}, it is {TYPE_NAMES[entry.kind]}")
        return entry.value

    def integer(
        self, key: str, low: int, high: int, *, required: bool = False, besides: int | None = None
    ) -> int:
        """The value of a u32 key; 0 if it is missing."""
        value = self.get(key, U32)
        if value is None:
            if required:
                raise Damage(f"{self.name(key)} is missing from the metadata")
            return 0
        if not low <= value <= high and value != besides:
            raise Damage(f"{self.name(key)} is {value}, it must be {low} to {high}")
        return value

    def per_layer(self, key: str, n_layer: int) -> npt.NDArray[np.int64] | None:
        """The values `(n_layer,)` of a key that holds one number per layer, or one for all layers."""
        entry = self.entries.get(self.name(key))
        if entry is None:
            return None
        if entry.kind != ARRAY:
            return np.full(n_layer, self.get(key, U32), np.int64)
        array = entry.value
        if not isinstance(array, Array) or array.kind not in (U32, I32, BOOL):
            raise Damage(f"{self.name(key)} must be u32 or an array of integers")
        if array.count != n_layer:
            raise Damage(f"{self.name(key)} has {array.count} elements, but the model has {n_layer} layers")
        values = array.data.astype(np.int64)
        if values.min() < 0:
            raise Damage(f"{self.name(key)} holds {values.min()}, it must not be negative")
        return values
