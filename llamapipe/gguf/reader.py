"""Parses the head of a GGUF file (metadata and tensor list), and checks every length before using it.

Arrays stay in the mapped file, and an array of strings is a list of offsets into it. Values are copied only when they
are read. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

U16, U32, I32, F32, BOOL, STRING, ARRAY, I64, F64 = 2, 4, 5, 6, 7, 8, 9, 11, 12
INTEGER_RANGES: Final = {
    **{kind: (0, 2**bits - 1) for kind, bits in {0: 8, 2: 16, 4: 32, 10: 64}.items()},
    **{
        kind: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for kind, bits in {1: 8, 3: 16, 5: 32, 11: 64}.items()
    },
}
TYPE_NAMES: Final = tuple("u8 i8 u16 i16 u32 i32 f32 bool string array u64 i64 f64".split())
# A string and an array have no fixed size.
_SCALARS: Final = {
    kind: struct.Struct(f"<{code}") for kind, code in enumerate("BbHhIifB  Qqd") if code != " "
}
_DTYPES: Final = {kind: np.dtype(scalar.format) for kind, scalar in _SCALARS.items()}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_HEADER_BYTES: Final = 24
_MAX_KEY_BYTES: Final = 65_535
_MAX_STRING_BYTES: Final = 1 << 30  # llama.cpp's own limit
_MAX_NAME_BYTES: Final = 63  # GGML_MAX_NAME - 1
_SCAN_BYTES: Final = 1 << 22
_FIRST_BYTES: Final = 2**16
Scalar = int | float | bytes


class Damage(Exception):  # noqa: N818 - not raised to users: check_gguf turns it into a ModelLoadError
    """A problem with a file; the message does not name the file."""


@dataclass(frozen=True)
class Array:
    """An array in the metadata: element type, count, and the place of its elements in the mapped file.

    ``starts`` and ``lengths`` (int64, ``(count,)``) are set for strings; ``data`` for numbers.
    """

    kind: int
    count: int
    data: npt.NDArray[np.generic]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Entry:
    """One value of the metadata. A string is stored as bytes up to its first NUL, as C code reads it."""

    kind: int
    value: Scalar | Array


@dataclass(frozen=True)
class Tensor:
    """One entry of the tensor list: ``dims`` innermost first, ggml's type number, ``offset`` in the data section."""

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Head:
    """Everything before the tensor data. ``buffer`` is the mapped file, to which arrays refer."""

    version: int
    entries: dict[str, Entry]
    tensors: list[Tensor]
    alignment: int
    data_start: int
    buffer: mmap.mmap

    def strings(self, array: Array) -> list[bytes]:
        """Return the strings of an array, each up to its first NUL, as C code reads them."""
        if array.count == 0:
            return []
        first = int(array.starts[0])
        end = int(array.starts[-1] + array.lengths[-1])
        region = self.buffer[first:end]
        starts = (array.starts - first).tolist()
        ends = (array.starts + array.lengths - first).tolist()
        strings = [region[start:end] for start, end in zip(starts, ends, strict=True)]
        # The region also holds the lengths of all strings but the first. Zero bytes of lengths do not count.
        n_zero = 8 * (array.count - 1) - sum(
            int(np.count_nonzero(array.lengths[1:] >> shift & 0xFF)) for shift in range(0, 32, 8)
        )
        if region.count(0) != n_zero:
            strings = [piece.split(b"\0", 1)[0] for piece in strings]
        return strings


def parse_head(buffer: mmap.mmap) -> Head:
    """Parse a mapped file that begins with the GGUF magic. Raises Damage."""
    return _Parser(buffer).head()


class _Parser:
    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._size = len(buffer)
        self._pos = 0

    def head(self) -> Head:
        if self._size < _HEADER_BYTES:
            raise Damage(f"the file has {self._size} bytes, less than a GGUF header of {_HEADER_BYTES}")
        version = _U32.unpack_from(self._buffer, 4)[0]
        _check_version(version)
        n_tensors, n_entries = struct.unpack_from("<QQ", self._buffer, 8)
        # The smallest entry is a key of one byte with a one-byte value; the smallest tensor has no dimension.
        for what, count, smallest in (("metadata entries", n_entries, 14), ("tensors", n_tensors, 25)):
            if count * smallest > self._size:
                raise Damage(
                    f"the header claims {count} {what}, but the file has only {self._size} bytes: it is truncated or "
                    "damaged"
                )
        self._pos = _HEADER_BYTES
        entries: dict[str, Entry] = {}
        for i in range(n_entries):
            key = self._key(i)
            if key in entries:
                raise Damage(f"the key {key!r} occurs twice in the metadata")
            entries[key] = self._entry(key)
        alignment = _alignment(entries)
        names: set[str] = set()
        tensors = []
        for i in range(n_tensors):
            tensor = self._tensor(i)
            if tensor.name in names:
                raise Damage(f"the tensor {tensor.name!r} occurs twice")
            names.add(tensor.name)
            tensors.append(tensor)
        start = -(-self._pos // alignment) * alignment if tensors else self._pos
        return Head(version, entries, tensors, alignment, start, self._buffer)

    def _need(self, n_bytes: int, what: str) -> int:
        """Return the current position and advance it by ``n_bytes``."""
        pos = self._pos
        if n_bytes > self._size - pos:
            raise Damage(
                f"{what} at byte {pos} needs {n_bytes} bytes, but the file ends at byte {self._size}:"
                " it is truncated or damaged"
            )
        self._pos = pos + n_bytes
        return pos

    def _u32(self, what: str) -> int:
        return int(_U32.unpack_from(self._buffer, self._need(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack_from(self._buffer, self._need(8, what))[0])

    def _string(self, what: str, limit: int) -> bytes:
        length = self._u64(f"the length of {what}")
        if length > limit:
            raise Damage(f"{what} at byte {self._pos} claims {length} bytes; the limit is {limit}")
        pos = self._need(length, what)
        return self._buffer[pos : pos + length]

    def _key(self, i: int) -> str:
        key = self._string(f"key {i} of the metadata", _MAX_KEY_BYTES)
        if not key or b"\0" in key:
            raise Damage(f"key {i} of the metadata is {'empty' if not key else repr(key)}")
        return key.decode("utf-8", "backslashreplace")

    def _entry(self, key: str) -> Entry:
        kind = self._u32(f"the type of {key!r}")
        if kind == ARRAY:
            return Entry(ARRAY, self._array(key))
        if kind == STRING:
            return Entry(STRING, self._string(f"the value of {key!r}", _MAX_STRING_BYTES).split(b"\0", 1)[0])
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise Damage(f"{key!r} has the unknown value type {kind}")
        value = scalar.unpack_from(self._buffer, self._need(scalar.size, f"the value of {key!r}"))[0]
        return Entry(kind, value)

    def _array(self, key: str) -> Array:
        kind = self._u32(f"the element type of {key!r}")
        count = self._u64(f"the length of {key!r}")
        nothing = np.empty(0, np.int64)
        if kind == STRING:
            starts, lengths = self._string_array(key, count)
            return Array(kind, count, nothing, starts, lengths)
        dtype = _DTYPES.get(kind)
        if dtype is None:
            name = "array" if kind == ARRAY else str(kind)
            raise Damage(f"{key!r} is an array of type {name}, which llama.cpp does not read")
        pos = self._need(count * dtype.itemsize, f"the array {key!r} of {count} elements")
        # frombuffer refuses an empty view at the very end of the file.
        data = np.frombuffer(self._buffer, dtype, count, pos) if count else np.empty(0, dtype)
        return Array(kind, count, data, nothing, nothing)

    def _string_array(self, key: str, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return starts and lengths of ``count`` strings; each is a u64 length followed by that many bytes.

        The start of a string is known only after the previous one has been read, and in Python this is slow for half a
        million strings. So all candidates are located together: a length below 65,536 ends in six zero bytes, which
        text hardly ever contains. Candidates are kept as long as they form an unbroken chain; all other strings are
        read one by one.
        """
        if count * 8 > self._size - self._pos:
            raise Damage(
                f"the array {key!r} claims {count} strings, but only {self._size - self._pos} bytes are left:"
                " the file is truncated or damaged"
            )
        starts, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        left, patience = count, 64
        while left:
            chain = self._chain(left) if left > 32 else None
            if chain is None:
                # Doubling bounds the cost of a file that was made to defeat the fast path.
                chain = self._read_one_by_one(key, min(left, patience), count - left)
                patience *= 2
            starts.append(chain[0])
            lengths.append(chain[1])
            left -= len(chain[0])
        return np.concatenate(starts), np.concatenate(lengths)

    def _chain(self, most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Return starts and lengths of up to ``most`` next strings that certainly follow each other, or None."""
        # Words of four bytes from the last aligned position; strings are rarely longer than 40 bytes.
        base = self._pos & ~3
        n_words = min(_SCAN_BYTES, 48 * most + 64, self._size - base) // 4
        words = np.frombuffer(self._buffer, "<u4", n_words, base)
        window = words.view(np.uint8)
        # The seven zeros of a length below 256 hold one aligned zero word; the text begins in the next word.
        zero = np.flatnonzero(words[:-1] == 0)
        after = words[zero + 1]
        lead = np.where(after & 0xFF, 0, np.where(after & 0xFF00, 1, np.where(after & 0xFF0000, 2, 3)))
        at = 4 * zero - 4 + lead
        at = at[(after != 0) & (at >= self._pos - base)][:most]
        if len(at) == 0 or at[0] != self._pos - base:
            return None
        lengths = window[at].astype(np.int64)
        for i in range(1, 4):
            lengths |= window[at + i].astype(np.int64) << 8 * i
        ends = at + 8 + lengths
        broken = np.flatnonzero(at[1:] != ends[:-1])
        n = int(broken[0]) + 1 if len(broken) else len(at)
        if base + int(ends[n - 1]) > self._size:
            n -= 1
        if n == 0:
            return None
        self._pos = base + int(ends[n - 1])
        return at[:n] + 8 + base, lengths[:n]

    def _read_one_by_one(
        self, key: str, n: int, first: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        starts, lengths = [], []
        for i in range(first, first + n):
            length = self._u64(f"the length of string {i} of {key!r}")
            if length > _MAX_STRING_BYTES:
                raise Damage(f"string {i} of {key!r} claims {length} bytes; the limit is {_MAX_STRING_BYTES}")
            starts.append(self._need(length, f"string {i} of {key!r}"))
            lengths.append(length)
        return np.array(starts, np.int64), np.array(lengths, np.int64)

    def _tensor(self, i: int) -> Tensor:
        raw = self._string(f"the name of tensor {i}", _MAX_NAME_BYTES)
        if not raw or b"\0" in raw:
            raise Damage(f"tensor {i} is named {raw!r}")
        name = raw.decode("utf-8", "backslashreplace")
        n_dims = self._u32(f"the number of dimensions of tensor {name!r}")
        if not 1 <= n_dims <= 4:
            raise Damage(f"tensor {name!r} has {n_dims} dimensions; llama.cpp reads 1 to 4")
        pos = self._need(8 * n_dims + 12, f"the description of tensor {name!r}")
        *dims, kind, offset = struct.unpack_from(f"<{n_dims}QIQ", self._buffer, pos)
        return Tensor(name, tuple(dims), kind, offset)


def _check_version(version: int) -> None:
    if version & 0xFFFF == 0:
        raise Damage("it is big-endian; convert it again for this machine's byte order")
    if version == 1:
        raise Damage("it has GGUF version 1, which llama.cpp no longer reads; convert the model again")
    if version > 3:
        raise Damage(
            f"it has GGUF version {version}, this llama.cpp reads up to 3; a newer llamapipe may read it"
        )


def _alignment(entries: dict[str, Entry]) -> int:
    entry = entries.get("general.alignment")
    if entry is None:
        return 32
    value = entry.value
    if entry.kind != U32 or not isinstance(value, int) or value <= 0 or value & (value - 1):
        raise Damage(f"general.alignment is {value!r}; it must be a u32 and a power of two")
    return value


def first_texts(path: Path) -> dict[str, str]:
    """Return the texts of a file's metadata before the first array, such as ``general.type``.

    Accepts any file without an error. Reads only 64 KiB, because a whole head includes the vocabulary.
    """
    texts: dict[str, str] = {}
    try:
        if not path.is_file():  # reading a pipe would block
            return texts
        with path.open("rb") as file:
            data = file.read(_FIRST_BYTES)
        at = _HEADER_BYTES
        while data[:4] == b"GGUF":
            n = _U64.unpack_from(data, at)[0]
            key = data[at + 8 : at + 8 + n]
            at += 8 + n
            kind = _U32.unpack_from(data, at)[0]
            at += 4
            if kind != STRING:
                at += _SCALARS[kind].size  # raises KeyError for an array
                continue
            n = _U64.unpack_from(data, at)[0]
            texts[key.decode(errors="replace")] = data[at + 8 : at + 8 + n].decode(errors="replace")
            at += 8 + n
    except (OSError, ValueError, KeyError, struct.error):
        pass
    return texts


N_BYTES = 16
_HEAD_BYTES = 16 * 2**20  # metadata, vocabulary and the list of tensors
_CHUNK_BYTES = 2**20
_N_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(path: Path) -> bytes:
    """Return 16 bytes that differ between files with different metadata, vocabularies or weights.

    They are a BLAKE2b hash of the file's size, its first 16 MiB and 64 evenly spread samples of 4 KiB. Files whose
    weights differ only outside the samples have the same hash. Raises OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        from hashlib import blake2b

        digest = blake2b(size.to_bytes(8, "little"), digest_size=N_BYTES)
        for _ in range(_HEAD_BYTES // _CHUNK_BYTES):
            digest.update(file.read(_CHUNK_BYTES))
        for i in range(1, _N_SAMPLES + 1):
            file.seek(max(size - _SAMPLE_BYTES, 0) * i // _N_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
