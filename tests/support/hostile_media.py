"""Images and sounds of a small head that ask for much work, one of each kind that decoders know.

Each is a file of some hundred kilobytes to a few megabytes, as a client may send it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from PIL import Image

from support.media_models import picture
from support.media_mutants import chunk, saved, wav


def _small(kind: str, **options: object) -> bytes:
    return saved(kind, Image.fromarray(picture(48, 32)), **options)


# ---- JPEG
def _segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def jpeg_of_scans(n_scans: int, width: int = 2000, height: int = 2000) -> bytes:
    """A progressive JPEG; each scan passes over all blocks and changes none."""
    n_blocks = -(-width // 8) * -(-height // 8)
    bits = ("0" + "1" * 14) * -(-n_blocks // 32767)  # runs of 32,767 empty blocks
    bits += "1" * (-len(bits) % 8)
    empty = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    head = (
        b"\xff\xd8"
        + _segment(0xDB, b"\0" + bytes([1]) * 64)
        + _segment(0xC2, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0")
        + _segment(0xC4, b"\0" + bytes([1]) + bytes(15) + b"\0")
        + _segment(0xC4, b"\x10" + bytes([1]) + bytes(15) + b"\xe0")
    )
    first = _segment(0xDA, b"\1\1\0\0\0\0") + bytes(n_blocks // 8 + 1)
    return head + first + (_segment(0xDA, b"\1\1\0\1\x3f\0") + empty) * n_scans + b"\xff\xd9"


def _jpeg_with(segments: bytes) -> bytes:
    jpeg = _small("JPEG")
    return jpeg[:2] + segments + jpeg[2:]


def _directory(n: int) -> bytes:
    """EXIF data whose entries all have the same 60,000 bytes."""
    entries = b"".join(struct.pack("<HHII", tag, 7, 60_000, 8) for tag in range(300, 300 + n))
    data = b"II*\0" + struct.pack("<IH", 8, n) + entries + bytes(4)
    return data.ljust(60_008, b"\0")


def _jpeg_exif() -> bytes:
    data = _directory(50_000)
    parts = [data[i : i + 65_000] for i in range(0, len(data), 65_000)]
    return _jpeg_with(b"".join(_segment(0xE1, b"Exif\0\0" + part) for part in parts))


def _jpeg_mpo() -> bytes:
    # The list of further pictures that a camera's file has, 4,096 of them.
    n = 4000
    entries = struct.pack(">HHI4s", 0xB000, 7, 4, b"0100")
    entries += struct.pack(">HHII", 0xB001, 4, 1, n) + struct.pack(">HHII", 0xB002, 7, 16 * n, 50)
    body = b"MM\0*" + struct.pack(">IH", 8, 3) + entries + bytes(4)
    return _jpeg_with(_segment(0xE2, b"MPF\0" + body.ljust(50, b"\0") + bytes(16 * 900)))


# ---- PNG
def _png_with(chunks: bytes) -> bytes:
    png = _small("PNG")
    return png[:33] + chunks + png[33:]


def _unpacks_to(n_bytes: int) -> bytes:
    return zlib.compress(bytes(n_bytes), 9)


def _png_frames(n: int) -> bytes:
    control = struct.pack(">IIIIIHHBB", 0, 48, 32, 0, 0, 1, 100, 0, 0)
    png = _small("PNG")
    frame = struct.pack(">I", 2) + zlib.compress(bytes(32 * (48 * 3 + 1)), 9)
    frames = (chunk(b"fcTL", control) + chunk(b"fdAT", frame)) * n
    return png[:33] + chunk(b"acTL", struct.pack(">II", n, 0)) + png[33:-12] + frames + png[-12:]


def _png_of_pieces() -> bytes:
    png = _small("PNG")
    return png[:33] + chunk(b"IDAT", b"") * 200_000 + png[33:]


# ---- GIF
def _gif(image: Image.Image) -> tuple[bytes, bytes]:
    """The head with its palette, and what comes after."""
    gif = saved("GIF", image)
    head = 13 + (3 << ((gif[10] & 7) + 1) if gif[10] & 0x80 else 0)
    return gif[:head], gif[head:]


def _gif_with(blocks: bytes) -> bytes:
    head, rest = _gif(Image.fromarray(picture(48, 32)).convert("P"))
    return head + blocks + rest


def _gif_frames() -> bytes:
    head, rest = _gif(Image.fromarray(picture(48, 32)[:, :, 0]))
    return head + rest[:-1] * 1000 + b";"


def _gif_of_pieces() -> bytes:
    head, rest = _gif(Image.fromarray(picture(48, 32)[:, :, 0]))
    at = rest.index(b",") + 11
    return head + rest[:at] + b"\x01\x00" * 600_000 + b"\0;"


# ---- WebP
def _riff(chunks: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def _webp_frames() -> bytes:
    still = _small("WEBP", lossless=True)[12:]
    frame = bytes(6) + (47).to_bytes(3, "little") + (31).to_bytes(3, "little") + bytes(4) + still
    chunk = b"ANMF" + struct.pack("<I", len(frame)) + frame + b"\0" * (len(frame) % 2)
    head = b"VP8X" + struct.pack("<I", 10) + bytes([2, 0, 0, 0, 47, 0, 0, 31, 0, 0])
    return _riff(head + b"ANIM" + struct.pack("<I", 6) + bytes(6) + chunk * 2000)


def _webp_pieces() -> bytes:
    return _riff(_small("WEBP")[12:] + b"none" + bytes(4) + (b"none" + bytes(4)) * 400_000)


# ---- BMP
def _bmp_runs(width: int, height: int, runs: bytes) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
    colours = b"".join(bytes([i, 255 - i, 0, 0]) for i in range(256))
    n = 14 + len(head) + len(colours)
    return b"BM" + struct.pack("<IHHI", n + len(runs), 0, 0, n) + head + colours + runs


def _tiff() -> bytes:
    return b"II*\0" + struct.pack("<I", 8) + _directory(60_000)[8:]


def _wav_of_pieces() -> bytes:
    return b"RIFF" + b"\xff" * 4 + b"WAVE" + (b"none" + bytes(4)) * 400_000 + wav()[12:]


# By name: whether it is read, and what makes it.
IMAGES: dict[str, tuple[bool, Callable[[], bytes]]] = {
    "jpeg of empty scans": (False, lambda: jpeg_of_scans(7000)),
    "jpeg of empty scans, large": (False, lambda: jpeg_of_scans(60, 5792, 5792)),
    "jpeg of empty scans, small": (False, lambda: jpeg_of_scans(50_000, 16, 16)),
    "jpeg of comments": (False, lambda: _jpeg_with(b"\xff\xfe\0\2" * 400_000)),
    "jpeg of tables": (False, lambda: _jpeg_with((b"\xff\xdb\0\x43\0" + bytes([1]) * 64) * 100_000)),
    "jpeg of Photoshop's parts": (True, lambda: _jpeg_with(
        _segment(0xED, b"Photoshop 3.0\0" + (b"8BIM\4\4\0\0" + bytes(4)) * 5000) * 100)),
    "jpeg with a large directory": (True, _jpeg_exif),
    "jpeg with further pictures": (True, _jpeg_mpo),
    "png of texts": (True, lambda: _png_with(chunk(b"zTXt", b"a\0\0" + _unpacks_to(2**20 - 1)) * 60)),
    "png of international texts": (True, lambda: _png_with(
        chunk(b"iTXt", b"a\0\1\0\0\0" + _unpacks_to(2**20 - 1)) * 2000)),
    "png of profiles": (True, lambda: _png_with(chunk(b"iCCP", b"a\0\0" + _unpacks_to(2**20 - 1)) * 3000)),
    "png with a large directory": (True, lambda: _png_with(chunk(b"eXIf", _directory(60_000)))),
    "png of empty chunks": (False, lambda: _png_with(chunk(b"teSt", b"") * 300_000)),
    "png of empty pixels": (False, _png_of_pieces),
    "png of frames": (True, lambda: _png_frames(5000)),
    "gif of comments": (False, lambda: _gif_with(b"!\xfe\1a\0" * 200_000)),
    "gif of a long comment": (False, lambda: _gif_with(b"!\xfe" + b"\1a" * 1_000_000 + b"\0")),
    "gif of junk": (False, lambda: _gif_with(b"\0" * 1_000_000)),
    "gif of frames": (True, _gif_frames),
    "gif of small blocks": (False, _gif_of_pieces),
    "webp of frames": (True, _webp_frames),
    "webp of chunks": (False, _webp_pieces),
    "webp with a large directory": (True, lambda: _riff(
        b"VP8X" + struct.pack("<I", 10) + bytes([8, 0, 0, 0, 47, 0, 0, 31, 0, 0]) + _small("WEBP")[12:]
        + b"EXIF" + struct.pack("<I", len(_directory(60_000))) + _directory(60_000))),
    "bmp of line ends": (False, lambda: _bmp_runs(5792, 5792, b"\0\0" * 6000)),
    "bmp of runs": (False, lambda: _bmp_runs(2000, 1000, b"\1\0" * 2_000_000)),
    "tiff of entries": (False, _tiff),
}  # fmt: skip
SOUNDS: dict[str, tuple[bool, Callable[[], bytes]]] = {
    "wav of chunks": (False, _wav_of_pieces),
    "wav of a thousand channels": (True, lambda: wav(8, 1000, 1000, seconds=4)),
    "wav, long and slow": (True, lambda: wav(8, 1, 4000, seconds=1700)),
    "wav of a wrong rate": (False, lambda: wav(8, 1, 999_999, seconds=0.1)),
}
