"""Checks a GGUF file before llama.cpp loads it.

llama.cpp refuses most damaged files with an error. On others, it aborts, crashes or loops forever, and the process is
lost. Everything before the tensor data is checked here; damage inside tensor data cannot be detected. Architectures and
tensor types that this version does not know are left to llama.cpp. For rare architectures, llama.cpp may make
assertions about keys that this check does not know.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llamapipe.errors import ModelLoadError
from llamapipe.gguf._shapes import Shapes, check_shapes
from llamapipe.gguf._vocab import check_vocabulary
from llamapipe.gguf.names import part_name, read_name
from llamapipe.gguf.reader import (
    BOOL,
    F32,
    F64,
    I64,
    INTEGER_RANGES,
    STRING,
    TYPE_NAMES,
    U16,
    U32,
    Array,
    Damage,
    Entry,
    Head,
    Tensor,
    parse_head,
)

# ggml's tensor types: name, values in a block, bytes of a block (ggml.h, ggml-common.h).
TYPES: Final = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
_REMOVED: Final = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
# llama.cpp asserts that mapped tensors lie at multiples of this (TENSOR_ALIGNMENT in ggml-impl.h).
_ALIGNMENT: Final = 32
_F32: Final = 0
# Types that no kernel accepts as weights: intermediate formats, integers and doubles.
_NOT_WEIGHTS: Final = frozenset({9, 15, 24, 25, 26, 27, 28})
# Tables of ids, which may be integers.
_TABLES: Final = re.compile(r"\bd2t\b|tid2eid|_ordering")
# Kernels process these tensors element by element and only as F32, whatever their rank. The same is true of all
# vectors.
_F32_ONLY: Final = re.compile(
    r"norm\d?\.weight$|rope_f|\.(?:bias|scale)$|\.ssm_[ad]$|\.ssm_conv1d|\.shortconv\.conv|\.time_mix_(?:first|lerp|decay\.)"
)


def check_tensors(head: Head) -> None:
    """Check the shapes, types and places of all tensors. Raises Damage."""
    size = len(head.buffer)
    expected = end = 0
    truncated = None
    for tensor in head.tensors:
        n_bytes = _n_bytes(tensor)
        if n_bytes is None:
            return  # a type newer than this check: llama.cpp knows it or reports it
        if tensor.offset != expected:
            raise Damage(f"tensor {tensor.name!r} is at offset {tensor.offset}, but {expected} comes next")
        start = head.data_start + expected
        if start % _ALIGNMENT:
            raise Damage(
                f"tensor {tensor.name!r} is at byte {start}, which is not a multiple of {_ALIGNMENT}"
            )
        end = start + n_bytes
        if end > size and truncated is None:
            truncated = tensor.name
        expected += -(-n_bytes // head.alignment) * head.alignment
    if truncated is not None:
        raise Damage(
            f"the data of {truncated!r} is missing: the file ends at byte {size} but should have {end}:"
            " it is truncated, download or convert it again"
        )


def type_name(tensor: Tensor) -> str:
    """Return the name of a tensor's type, such as ``Q4_K``; its number if it is newer than this check."""
    return TYPES[tensor.kind][0] if tensor.kind in TYPES else str(tensor.kind)


def tensor_bytes(tensor: Tensor) -> int:
    """Return the number of bytes of a checked tensor's data; 0 if its type is newer than this check."""
    return _n_bytes(tensor) or 0


def _n_bytes(tensor: Tensor) -> int | None:
    """Return the number of bytes of the tensor's data; None for an unknown type."""
    shape = " × ".join(map(str, tensor.dims))
    n_values = math.prod(tensor.dims)
    if not 0 < n_values < 1 << 63:
        raise Damage(f"tensor {tensor.name!r} has the impossible shape {shape}")
    if tensor.kind in _REMOVED:
        raise Damage(
            f"tensor {tensor.name!r} has the type {tensor.kind}, which llama.cpp removed; quantize again"
        )
    known = TYPES.get(tensor.kind)
    if known is None:
        return None
    name, block, block_bytes = known
    if tensor.dims[0] % block:
        raise Damage(
            f"tensor {tensor.name!r} ({shape}) has rows of {tensor.dims[0]}, not a multiple of {name}'s {block}"
        )
    if not _TABLES.search(tensor.name):
        if tensor.kind in _NOT_WEIGHTS:
            raise Damage(f"tensor {tensor.name!r} has the type {name}, which is not one of weights")
        if tensor.kind != _F32 and (len(tensor.dims) == 1 or _F32_ONLY.search(tensor.name)):
            raise Damage(
                f"tensor {tensor.name!r} has the type {name}; llama.cpp reads such tensors as F32 only"
            )
    return n_values // block * block_bytes


_CONVERTER: Final = "convert_hf_to_gguf.py"
# Other files that people pass by mistake, by their first bytes.
_LOOKALIKES: Final = (
    (rb".{7}\0\{\s*\"", f"a safetensors file; convert it with llama.cpp's {_CONVERTER}"),
    (rb"PK\x03\x04|\x80[\x02-\x05]", "a PyTorch checkpoint or zip archive; convert the model to GGUF"),
    (
        rb"lmgg|fmgg|tjgg|algg|ggml|ggmf|ggjt",
        "a model of the format before GGUF; convert the original model again",
    ),
    (rb"version https://git-lfs", "a Git LFS pointer, not the file itself; run `git lfs pull`"),
    (
        rb"\s*<(?:!doctype|html|\?xml)",
        "a web page, probably an error page of a download; download the file itself",
    ),
    (rb"\x1f\x8b|7z\xbc\xaf|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd", "a compressed archive; unpack it"),
    (rb"\s*\{", "a JSON file; give the .gguf file"),
    (
        rb"(?:\s*#[^\n]*\n)*\s*FROM\s",
        "a Modelfile of Ollama; give the file or model that its FROM line names, and its parameters as options",
    ),
    (rb"FUGG", "a GGUF file with its bytes swapped; convert the model for this machine's byte order"),
)
RANK_HEADS = ("cls.weight", "cls.output.weight")


@dataclass(frozen=True)
class Stamp:
    """The identity of a file's content, as far as the file system shows it."""

    path: Path
    n_bytes: int
    device: int
    inode: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> Stamp:
        """Return the stamp of the file with this status."""
        return cls(path, status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns)

    def change(self) -> str | None:
        """Return how the file has changed since the stamp was made; None if it has not."""
        try:
            now = Stamp.of(self.path, self.path.stat())
        except OSError as error:
            return f"{self.path} cannot be read any more: {error}"
        if now.n_bytes != self.n_bytes:
            return f"{self.path} had {self.n_bytes} bytes and has {now.n_bytes} now"
        return None if now == self else f"{self.path} was replaced or written to"


@dataclass(frozen=True)
class OpenFile:
    """A mapped file with its head."""

    stamp: Stamp
    head: Head


@dataclass(frozen=True)
class GgufInfo(Shapes):
    """The facts in the head of a checked file.

    ``n_entries`` counts metadata entries, ``n_parts`` the files of a split model. ``tokenizer`` is None without a
    vocabulary. ``is_vocab_only`` is True for a file without tensors, ``is_causal`` False for models whose tokens attend
    to later ones, such as encoders. ``metadata``: single values and arrays of numbers by key, without the keys of the
    vocabulary. ``has_rank_head``: the model has the output layer of a reranker. ``n_rot``: the number of a head's
    values that positions rotate, None if the file leaves it to llama.cpp. ``has_rope_sections``: the file says how
    several kinds of positions share a head's values. ``n_layer``, ``n_embd`` and ``n_ctx_train`` are 0 if a
    vocabulary-only file omits them. ``tensors``: the tensors of all files. ``size_bytes`` is the size of all files,
    ``stamps`` their identities.
    """

    path: Path
    version: int
    tokenizer: str | None
    n_vocab: int
    n_entries: int
    n_tensors: int
    n_parts: int
    metadata: Mapping[str, Any]
    is_vocab_only: bool
    has_rank_head: bool
    tensors: tuple[Tensor, ...]
    size_bytes: int
    stamps: tuple[Stamp, ...]

    def change(self) -> str | None:
        """Return how the files have changed since the check; None if they have not."""
        return next((change for stamp in self.stamps if (change := stamp.change())), None)


def check_gguf(
    path: str | os.PathLike[str], overrides: Mapping[str, bool | float | str] | None = None
) -> GgufInfo:
    """Check a GGUF file and, for a split model, its other parts. Any thread; files are mapped, not copied.

    ``overrides``: single values by key that are checked and returned in place of the file's; see ``override``.

    Raises ModelLoadError if the file is missing, not a GGUF file, truncated or damaged; the message names the problem
    and its place.
    """
    file = Path(path)
    first = open_gguf(file)
    head = first.head
    with naming(file):
        head.entries.update(override(head.entries, overrides or {}))
        # This check is first: a later part of a split model has no architecture, but the message must not complain of
        # that.
        n_tensors, parts = _parts(file, head)
        shapes = check_shapes(head)
        tokenizer, n_vocab = check_vocabulary(head)
        check_tensors(head)
    tensors = tuple(
        tensor for part_head in (head, *(part.head for part in parts)) for tensor in part_head.tensors
    )
    return GgufInfo(
        path=file,
        **vars(shapes),
        version=head.version,
        tokenizer=tokenizer,
        n_vocab=n_vocab,
        n_entries=len(head.entries),
        n_tensors=n_tensors,
        n_parts=1 + len(parts),
        metadata=_metadata(head),
        is_vocab_only=n_tensors == 0,
        has_rank_head=any(tensor.name in RANK_HEADS for tensor in tensors),
        tensors=tensors,
        size_bytes=len(head.buffer) + sum(len(part.head.buffer) for part in parts),
        stamps=(first.stamp, *(part.stamp for part in parts)),
    )


def override(entries: Mapping[str, Entry], overrides: Mapping[str, bool | float | str]) -> dict[str, Entry]:
    """Return the entries that replace a file's, with the types of the file's entries.

    ``overrides``: bools, ints, floats or strs by key. Raises Damage for a value whose type is not the file's; llama.cpp
    would ignore it.
    """
    replacements = {}
    for key, value in overrides.items():
        known = entries.get(key)
        kind = _kind_of(value) if known is None else known.kind
        stored = value
        if kind in (F32, F64) and isinstance(value, int) and not isinstance(value, bool):
            stored = float(value)
        if kind in _PYTHON_TYPES:
            fits = isinstance(stored, _PYTHON_TYPES[kind])
        else:
            low, high = INTEGER_RANGES.get(kind, (1, 0))  # arrays have no range: nothing fits
            fits = type(stored) is int and low <= stored <= high
        if not fits:
            raise Damage(f"kv_overrides has {value!r} for {key}, which is of type {TYPE_NAMES[kind]}")
        replacements[key] = Entry(kind, stored.encode() if isinstance(stored, str) else stored)
    return replacements


_PYTHON_TYPES: Final = {BOOL: bool, STRING: str, F32: float, F64: float}


def _kind_of(value: bool | int | float | str) -> int:
    """Return the type that llama.cpp gives a value whose key is not in the file."""
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return U32 if 0 <= value < 2**32 else I64
    return STRING if isinstance(value, str) else F32


def _metadata(head: Head) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for key, entry in head.entries.items():
        value = entry.value
        if isinstance(value, bytes):
            metadata[key] = value.decode(errors="replace")
        elif not isinstance(value, Array):
            metadata[key] = value
        elif value.kind != STRING and not key.startswith("tokenizer."):
            metadata[key] = value.data.tolist()
    return metadata


def open_gguf(path: Path, converter: str = _CONVERTER) -> OpenFile:
    """Map a file and parse its head. ``converter``: script to name for safetensors files. Raises ModelLoadError."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelLoadError(_directory(path))
        if not stat.S_ISREG(status.st_mode):
            raise ModelLoadError(f"{path} is not a regular file; give the path of a .gguf file")
        with path.open("rb") as file:
            first = file.read(64)
            if not first:
                raise ModelLoadError(f"{path} is empty; download or convert it again")
            if first[:4] != b"GGUF":
                raise ModelLoadError(_stranger(path, first).replace(_CONVERTER, converter))
            status = os.fstat(file.fileno())  # of the open file: the path may name another file by now
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelLoadError(_missing(path)) from None
    except PermissionError:
        raise ModelLoadError(f"{path} cannot be read: no permission; change its mode or owner") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    with naming(path):
        return OpenFile(Stamp.of(path, status), parse_head(buffer))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn a Damage raised in the block into a ModelLoadError that names the file."""
    try:
        yield
    except Damage as damage:
        raise ModelLoadError(f"{path}: {damage}") from None


def _missing(path: Path) -> str:
    folder = path.parent
    n_parts = 0 if path.is_absolute() or path.suffix == ".gguf" else len(path.parts)
    elsewhere = {
        1: f", or write ollama:{path} for a model of Ollama",
        2: f", or write hf:{path} for a model of the Hub",
    }
    advice = "check the path" + elsewhere.get(n_parts, "")
    if not folder.is_dir():
        return f"{path} does not exist, nor does its folder {folder}; {advice}"
    near = sorted(other.name for other in folder.glob("*.gguf"))[:5]
    return f"{path} does not exist; " + (f"its folder has {', '.join(near)}" if near else advice)


def _directory(path: Path) -> str:
    names = sorted(other.name for other in path.glob("*.gguf"))[:5]
    hint = f"give one of its files: {', '.join(names)}" if names else "give the path of a .gguf file"
    if not names and next(path.glob("*.safetensors"), None) is not None:
        hint = f"it holds safetensors: convert it with llama.cpp's {_CONVERTER}, and give the path of the .gguf file"
    return f"{path} is a directory; {hint}"


def _stranger(path: Path, first: bytes) -> str:
    for pattern, what in _LOOKALIKES:
        if re.match(pattern, first, re.DOTALL | re.IGNORECASE):
            return f"{path} is not a GGUF file: it looks like {what}"
    return f"{path} is not a GGUF file: it begins with {first[:4]!r} instead of b'GGUF'"


def _parts(path: Path, head: Head) -> tuple[int, list[OpenFile]]:
    """Return the number of tensors in all parts, and the other parts of a split model."""
    n_parts = _split_value(head, "split.count")
    if n_parts is None or n_parts <= 1:
        return len(head.tensors), []
    number = _split_value(head, "split.no")
    if number is None:
        raise Damage(f"it is one of {n_parts} parts, but does not say which: split.no is missing")
    stem, part_no, n_named = read_name(path.name)
    if number != 0:
        first = part_name(stem, 1, n_named) if n_named else "…-00001-of-….gguf"
        raise Damage(
            f"it is part {number + 1} of {n_parts}; give the first part, {first}, in the folder that has all parts"
        )
    if part_no != 1 or n_named != n_parts:
        raise Damage(
            f"it is the first of {n_parts} parts, which are found by their names: it must be called "
            f"{part_name('NAME', 1, n_parts)}"
        )
    parts = []
    names = {tensor.name for tensor in head.tensors}
    for i in range(1, n_parts):
        part_path = path.with_name(part_name(stem, i + 1, n_parts))
        opened = open_gguf(part_path)
        part = opened.head
        if _split_value(part, "split.no") != i:
            raise Damage(f"{part_path} does not say that it is part {i + 1} of the model")
        for tensor in part.tensors:
            if tensor.name in names:
                raise Damage(f"{part_path}: the tensor {tensor.name!r} occurs in an earlier part too")
            names.add(tensor.name)
        with naming(part_path):
            check_tensors(part)
        parts.append(opened)
    return len(names), parts


def _split_value(head: Head, key: str) -> int | None:
    entry = head.entries.get(key)
    if entry is None:
        return None
    if entry.kind != U16 or not isinstance(entry.value, int):
        raise Damage(f"{key} must be a u16")
    return entry.value


def head_texts(path: Path) -> dict[str, str]:
    """Return the single values of a checked file's metadata as text, by key, as in ``Model.metadata``.

    Raises ModelLoadError.
    """
    entries = open_gguf(path).head.entries
    return {
        key: entry.value.decode(errors="replace") if isinstance(entry.value, bytes) else str(entry.value)
        for key, entry in entries.items()
        if not isinstance(entry.value, Array)
    }
