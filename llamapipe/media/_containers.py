"""Reduces an image file to the parts that its decoder needs: the head and the pixels of the first picture.

Open this file to read another kind of image, or to change how much work an image may cause.

The size that a file announces limits the pixels, but not the work. A progressive JPEG may pass over its pixels ten
thousand times, and chunks of text, colour profiles, further frames and previews may unpack to gigabytes. So this module
splits a file into its parts. It passes on only the parts that make up the pixels, and no more of them than real files
have. One pass over the parts is enough, because each part states its length.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

MOST_PARTS = 2**16  # chunks or blocks: a PNG of 64 MB has 8,192 of 8 KB
MOST_SEGMENTS = 2**13  # of a JPEG: a file of 64 MB has 1,024 of 64 KB
MOST_SCANS = 256  # passes of a JPEG over its pixels; usual JPEGs have up to 10
MOST_SCANNED = 2**29  # pixels × scans: 16 scans of the largest image, half a second
MOST_BLOCKS = 2**19  # of a GIF: twice the number of 255-byte blocks in the largest file
MOST_RLE_PIXELS = 2**21  # of a BMP with run lengths, which Pillow decodes in Python
MOST_RLE_BYTES = 2**20  # of such a BMP
_ORIENTATION = 0x0112  # EXIF's tag
_SHORT = 3  # EXIF's type of 16-bit integers


class ContainerError(ValueError):
    """The reason why a file is not decoded."""


class Picture(NamedTuple):
    """A file with one picture: Pillow's name of its format, its bytes, and its EXIF orientation, 1 to 8."""

    format: str
    data: bytes
    orientation: int


def picture_in(data: bytes) -> Picture | None:
    """Return the first picture of a file; None if the format is not supported. Raises ContainerError above a limit."""
    for magic, name, reduced in _READERS:
        if magic.match(data):
            parts, exif = reduced(data)
            return Picture(name, b"".join(parts), _orientation(exif))
    return None


_Reduced = tuple[list[bytes], bytes]  # the kept parts of a file, and its EXIF data or b""


def _orientation(exif: bytes) -> int:
    """Return the orientation in the first directory of EXIF data; 1 if there is none."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None or len(exif) < 8:
        return 1
    (at,) = struct.unpack_from(f"{order}I", exif, 4)
    (n,) = struct.unpack(f"{order}H", exif[at : at + 2].ljust(2, b"\0"))
    entries = exif[at + 2 : at + 2 + 12 * n]
    for tag, kind, _, value in struct.iter_unpack(f"{order}HHIH2x", entries[: len(entries) // 12 * 12]):
        if tag == _ORIENTATION:
            return value if kind == _SHORT and 1 <= value <= 8 else 1
    return 1


def _too_many(what: str, most: int) -> ContainerError:
    return ContainerError(f"it has more than {most} {what}; save it again")


# ---- JPEG
_JPEG_MARKER = re.compile(rb"\xff([^\x00\xff])")
_AFTER_SCAN = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")  # restart markers belong to the scan
_END, _BEGIN, _SCAN = 0xD9, 0xD8, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_KEPT = _FRAMES | {0xC4, 0xCC, 0xDB, 0xDD}  # frames, tables and the restart interval


def _jpeg(data: bytes) -> _Reduced:
    """Return the file without previews, profiles and comments. Segments that define the stored colours stay."""
    kept, exif = [data[:2]], b""
    at, n_pixels, n_scans = 2, 0, 0
    for _ in range(MOST_SEGMENTS):
        match = _JPEG_MARKER.search(data, at)
        if match is None:
            return kept, exif
        begin, at, marker = match.start(), match.end(), match[1][0]
        if marker in (_BEGIN, _END):
            kept.append(data[begin:at])
            return kept, exif
        if marker < 0xC0 or 0xD0 <= marker <= 0xD7:  # markers without a length
            continue
        end = at + int.from_bytes(data[at : at + 2], "big")
        body = data[at + 2 : min(end, at + 16)]
        if end < at + 2:
            raise ContainerError("a segment of it has a wrong length")
        if marker == _SCAN:
            n_scans += 1
            if n_scans > MOST_SCANS or n_scans * n_pixels > MOST_SCANNED:
                raise _too_many("scans for its size", n_scans - 1)
            next_one = _AFTER_SCAN.search(data, end)
            end = len(data) if next_one is None else next_one.start()
        elif marker in _FRAMES:
            n_pixels = max(n_pixels, int.from_bytes(body[1:3], "big") * int.from_bytes(body[3:5], "big"))
        elif marker == 0xE1 and body.startswith(b"Exif\0\0") and not exif:
            exif = data[at + 8 : end]
        if (
            marker in _JPEG_KEPT
            or marker == _SCAN
            or (marker == 0xE0 and body.startswith(b"JFIF"))
            or (marker == 0xEE and body.startswith(b"Adobe"))
        ):
            kept.append(data[begin:end])
        at = end
    raise _too_many("segments", MOST_SEGMENTS)


# ---- PNG
def _png(data: bytes) -> _Reduced:
    """Return the file without texts, profiles and the further frames of an animation."""
    kept, exif = [data[:8]], b""
    for name, begin, end in _chunks(data, 8, "big"):
        if name in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            kept.append(data[begin:end])
        elif name == b"eXIf":
            exif = exif or data[begin + 8 : end - 4]
        if name == b"IEND":
            break
    return kept, exif


def _chunks(data: bytes, at: int, order: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, start and end of each chunk of a PNG or WebP, up to the first chunk without a whole name.

    The end may be beyond the data. ``order``: "big" for PNG, "little" for WebP.
    """
    for _ in range(MOST_PARTS):
        if order == "big":
            name, n = data[at + 4 : at + 8], int.from_bytes(data[at : at + 4], "big") + 12
        else:
            n = int.from_bytes(data[at + 4 : at + 8], "little")
            name, n = data[at : at + 4], n + n % 2 + 8
        if len(name) < 4:
            return
        yield name, at, at + n
        at += n
    raise _too_many("chunks", MOST_PARTS)


# ---- WebP
_WEBP_FLAGS = 0b10010  # the flags for alpha and animation; other flags announce chunks that are removed


def _webp(data: bytes) -> _Reduced:
    """Return the file without profiles; of an animation, only the first frame."""
    kept, exif, n_frames = [b""], b"", 0
    for name, begin, end in _chunks(data, 12, "little"):
        if name == b"VP8X" and end - begin == 18:
            kept.append(
                data[begin : begin + 8] + bytes([data[begin + 8] & _WEBP_FLAGS]) + data[begin + 9 : end]
            )
        elif name in (b"ANIM", b"ALPH", b"VP8 ", b"VP8L") or (name == b"ANMF" and n_frames == 0):
            kept.append(data[begin:end])
            n_frames += name == b"ANMF"
        elif name == b"EXIF":
            exif = exif or data[begin + 8 : end].removeprefix(b"Exif\0\0")
    n = sum(map(len, kept))
    kept[0] = b"RIFF" + (n + 4).to_bytes(4, "little") + b"WEBP"
    return kept, exif


# ---- GIF
def _gif(data: bytes) -> _Reduced:
    """Return the file with only its first frame, without comments."""
    at = 13 + _table_bytes(data[10:11])
    kept, control = [data[:at]], b""
    for _ in range(MOST_PARTS):
        kind = data[at : at + 1]
        if kind == b",":
            begin = at
            at += 10 + _table_bytes(data[at + 9 : at + 10]) + 1
            at = _after_blocks(data, at)
            return [*kept, control, data[begin:at], b";"], b""
        if kind == b"!":
            begin, label = at, data[at + 1 : at + 2]
            at = _after_blocks(data, at + 2)
            if label == b"\xf9":
                control = data[begin:at]
        elif kind in (b"", b";"):
            break
        else:
            at += 1  # a byte that decoders skip
    else:
        raise _too_many("blocks", MOST_PARTS)
    return kept, b""


def _table_bytes(flags: bytes) -> int:
    """Return the size in bytes of the colour table that a header announces."""
    return 3 << ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0


def _after_blocks(data: bytes, at: int) -> int:
    """Return the end of a series of blocks of up to 255 bytes, which ends with an empty block."""
    for _ in range(MOST_BLOCKS):
        if at >= len(data) or data[at] == 0:
            return min(at + 1, len(data))
        at += data[at] + 1
    raise _too_many("blocks", MOST_BLOCKS)


# ---- BMP
def _bmp(data: bytes) -> _Reduced:
    n_head = int.from_bytes(data[14:18], "little")
    if n_head >= 40 and len(data) >= 34:
        width, height, _, _, compression = struct.unpack_from("<IiHHI", data, 18)
        height = abs(height)
        if compression in (1, 2) and (width * height > MOST_RLE_PIXELS or len(data) > MOST_RLE_BYTES):
            raise ContainerError(
                f"it is a BMP with run lengths of {width} × {height} pixels and {len(data)} bytes; at most "
                f"{MOST_RLE_PIXELS} pixels and {MOST_RLE_BYTES} bytes of those are decoded: save it as PNG"
            )
    return [data], b""


_READERS: tuple[tuple[re.Pattern[bytes], str, Callable[[bytes], _Reduced]], ...] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "PNG", _png),
    (re.compile(rb"\xff\xd8\xff"), "JPEG", _jpeg),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "WEBP", _webp),
    (re.compile(rb"GIF8[79]a"), "GIF", _gif),
    (re.compile(rb"BM"), "BMP", _bmp),
)
