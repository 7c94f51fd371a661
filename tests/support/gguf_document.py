"""A GGUF file taken apart and put together again, for tests that damage it on purpose; not the library's reader."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
# ggml's number of a tensor type: values in a block, bytes of a block. gguf has not got the newest of them.
BLOCKS = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()} | {9: (32, 36), 42: (64, 18)}


@dataclass
class Entry:
    """A metadata entry; `item` is the element type of an array, strings are bytes."""

    key: bytes
    kind: int
    value: Any
    item: int = 0


@dataclass
class Tensor:
    name: bytes
    dims: list[int]
    kind: int
    data: bytes = b""

    @property
    def n_bytes(self) -> int:
        block, size = BLOCKS[self.kind]
        return math.prod(self.dims) // block * size


@dataclass
class Document:
    entries: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    magic: bytes = b"GGUF"

    def entry(self, key: str) -> Entry:
        return next(entry for entry in self.entries if entry.key == key.encode())

    def has(self, key: str) -> bool:
        return any(entry.key == key.encode() for entry in self.entries)

    def put(self, key: str, kind: int, value: Any, item: int = 0) -> None:
        """Set an entry, in its place if the key is there."""
        if not self.has(key):
            self.entries.append(Entry(key.encode(), kind, value))
        entry = self.entry(key)
        entry.kind, entry.value, entry.item = kind, value, item

    def remove(self, key: str) -> None:
        self.entries = [entry for entry in self.entries if entry.key != key.encode()]

    def rename(self, architecture: str) -> None:
        """Calls it one of another architecture, in the names of its keys, too."""
        before = f"{self.architecture}.".encode()
        for entry in self.entries:
            if entry.key.startswith(before):
                entry.key = architecture.encode() + entry.key[len(before) - 1 :]
        self.put("general.architecture", STRING, architecture.encode())

    @property
    def architecture(self) -> str:
        """What it says it is; llama if it does not say."""
        value = self.entry("general.architecture").value if self.has("general.architecture") else b"llama"
        return value.decode(errors="replace") if isinstance(value, bytes) else "llama"

    @property
    def alignment(self) -> int:
        return next(
            (e.value for e in self.entries if e.key == b"general.alignment" and e.kind == 4 and e.value), 32
        )

    def pack(self) -> bytes:
        """The file, laid out as the format wants it, with whatever values are in here."""
        out = [self.magic, struct.pack("<IQQ", self.version, len(self.tensors), len(self.entries))]
        for entry in self.entries:
            out += [_string(entry.key), struct.pack("<I", entry.kind)]
            if entry.kind == ARRAY:
                out.append(struct.pack("<IQ", entry.item, len(entry.value)))
                if entry.item == STRING:
                    out += [_string(text) for text in entry.value]
                else:
                    out.append(struct.pack(f"<{len(entry.value)}{SCALARS[entry.item]}", *entry.value))
            elif entry.kind == STRING:
                out.append(_string(entry.value))
            else:
                out.append(struct.pack("<" + SCALARS[entry.kind], entry.value))
        offset, data = 0, []
        for tensor in self.tensors:
            out += [
                _string(tensor.name),
                struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims),
            ]
            out.append(struct.pack("<IQ", tensor.kind, offset))
            # A tensor of absurd size gets no data; the file then ends too early.
            n_bytes = min(tensor.n_bytes, 1 << 21)
            content = tensor.data.ljust(n_bytes, b"\x11")[:n_bytes]
            data.append(content + bytes(-len(content) % self.alignment))
            offset += len(data[-1])
        head = b"".join(out)
        return head + bytes(-len(head) % self.alignment) + b"".join(data) if data else head

    @classmethod
    def read(cls, path: Path) -> Document:
        """A valid file."""
        return unpack(path.read_bytes())[0]

    def write(self, path: Path) -> Path:
        """The file at ``path``, which it returns."""
        path.write_bytes(self.pack())
        return path


@dataclass(frozen=True)
class Span:
    """Where in the file something stands: what is ``count``, ``length``, ``type``, ``number``, ``text`` or ``dim``."""

    what: str
    start: int
    end: int


def unpack(file: bytes) -> tuple[Document, list[Span]]:
    """Take a valid file apart; the spans cover all that stands before the tensor data."""
    spans: list[Span] = []
    pos = 4

    def number(what: str, code: str) -> Any:
        nonlocal pos
        start, pos = pos, pos + struct.calcsize("<" + code)
        spans.append(Span(what, start, pos))
        return struct.unpack_from("<" + code, file, start)[0]

    def text() -> bytes:
        nonlocal pos
        n = number("length", "Q")
        start, pos = pos, pos + n
        if n:
            spans.append(Span("text", start, pos))
        return file[start:pos]

    version = number("version", "I")
    n_tensors, n_entries = number("count", "Q"), number("count", "Q")
    document = Document(version=version, magic=file[:4])
    for _ in range(n_entries):
        key, kind = text(), number("type", "I")
        if kind == ARRAY:
            item, n = number("type", "I"), number("length", "Q")
            value: Any = [text() if item == STRING else number("number", SCALARS[item]) for _ in range(n)]
            document.entries.append(Entry(key, kind, value, item))
        else:
            document.entries.append(
                Entry(key, kind, text() if kind == STRING else number("number", SCALARS[kind]))
            )
    offsets = []
    for _ in range(n_tensors):
        name = text()
        dims = [number("dim", "Q") for _ in range(number("type", "I"))]
        document.tensors.append(Tensor(name, dims, number("type", "I")))
        offsets.append(number("offset", "Q"))
    data = -(-pos // document.alignment) * document.alignment
    for tensor, offset in zip(document.tensors, offsets, strict=True):
        tensor.data = file[data + offset : data + offset + tensor.n_bytes]
    return document, spans


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text
