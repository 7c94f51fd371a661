"""Damaged images and sounds: ``mutant(number)`` is always the same file."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from functools import cache

import numpy as np
from PIL import Image

from support.media_models import picture

_NUMBERS = (0, 1, 2, 3, 127, 128, 255, 256, 32767, 32768, 65535, 2**31 - 1, 2**31, 2**32 - 1)
_LONGEST = 4096  # bytes that one change adds


def wav(
    bits: int = 16, n_channels: int = 1, rate: int = 16000, kind: int = 1, seconds: float = 0.25
) -> bytes:
    """A WAV file, also of forms that ``wave`` does not write. ``kind``: 1 PCM, 3 floats, 65534 extensible."""
    n_frame = bits // 8 * n_channels
    chance = np.random.default_rng(bits)
    n = int(rate * seconds) * n_channels
    floats = chance.uniform(-1, 1, n).astype("<f8" if bits == 64 else "<f4")
    samples = floats.tobytes() if kind == 3 else chance.bytes(n * bits // 8)
    form = struct.pack("<HHIIHH", kind, n_channels, rate, rate * n_frame, n_frame, bits)
    if kind == 65534:
        form += struct.pack("<HHIH", 22, bits, 0, 1) + bytes.fromhex("000000001000800000aa00389b71")
    chunks = b"".join(
        name + struct.pack("<I", len(data)) + data for name, data in ((b"fmt ", form), (b"data", samples))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def saved(kind: str, image: Image.Image, **options: object) -> bytes:
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@cache
def whole() -> dict[str, bytes]:
    """Files by name; those of sounds begin with ``sound``. What we do not read has its head only."""
    images = [Image.fromarray(picture(48 - 8 * i, 32, i)) for i in range(3)]
    still, same = images[0], [Image.fromarray(picture(48, 32, i)) for i in range(4)]
    turned = Image.Exif()
    turned[0x0112] = 6
    mpeg = bytes.fromhex("fffb9064") + bytes(413)
    flac = b"fLaC" + bytes.fromhex("80000022100010000000000000000ac442f000000000") + bytes(16)
    return {
        "png": saved("PNG", still),
        "png of 1 bit": saved("PNG", still.convert("1")),
        "png with a palette": saved("PNG", still.convert("P"), transparency=3),
        "png of 16 bits": saved("PNG", Image.fromarray(picture(48, 32)[:, :, 0].astype(np.uint16) * 257)),
        "png with alpha": saved("PNG", still.convert("RGBA")),
        "apng": saved("PNG", same[0], save_all=True, append_images=same[1:]),
        "jpeg": saved("JPEG", still, exif=turned),
        "jpeg, progressive": saved("JPEG", still, progressive=True),
        "jpeg of 4 colours": saved("JPEG", still.convert("CMYK")),
        "gif": saved("GIF", still.convert("P")),
        "gif that moves": saved("GIF", same[0], save_all=True, append_images=same[1:], duration=20, loop=0),
        "webp": saved("WEBP", still),
        "webp without loss": saved("WEBP", still.convert("RGBA"), lossless=True),
        "webp that moves": saved("WEBP", same[0], save_all=True, append_images=same[1:]),
        "bmp": saved("BMP", still),
        "bmp with a palette": saved("BMP", still.convert("P")),
        "sound of 8 bits": wav(8),
        "sound of 16 bits": wav(16, 2, 8000),
        "sound of 24 bits": wav(24, 1, 44100),
        "sound of 32 bits": wav(32, 6, 48000, seconds=0.05),
        "sound, extensible": wav(16, 1, 16000, 65534),
        "sound of floats": wav(32, 1, 16000, 3),
        "sound as mp3": b"ID3\x04\0\0\0\0\0\0" + mpeg * 3,
        "sound as flac": flac,
        "sound as ogg": b"OggS\0\x02"
        + bytes(8)
        + bytes.fromhex("01000000000000000000000001")
        + b"\x13OpusHead",
    }


def mutant(number: int) -> tuple[str, bytes]:
    """The name of the file that was damaged, and what became of it."""
    chance = random.Random(number)
    names = list(whole())
    name = names[number % len(names)]
    data = bytearray(whole()[name])
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        if data:
            _change(data, chance)
    if "png" in name and chance.random() < 0.7:
        data = _with_sums(data)
    return name, bytes(data)


def _change(data: bytearray, chance: random.Random) -> None:
    # Heads are where sizes and kinds are.
    end = len(data) if chance.random() < 0.5 else min(len(data), 96)
    at = chance.randrange(end)
    order = chance.choice("<>")
    match chance.randrange(9):
        case 0:
            data[at] = chance.randrange(256)
        case 1:
            data[at] ^= 1 << chance.randrange(8)
        case 2:
            data[at : at + 4] = struct.pack(f"{order}I", chance.choice(_NUMBERS))
        case 3:
            data[at : at + 2] = struct.pack(f"{order}H", chance.choice(_NUMBERS) % 2**16)
        case 4:
            del data[at:]
        case 5:
            del data[at : at + chance.randint(1, 64)]
        case 6:
            data[at:at] = chance.randbytes(chance.randint(1, 64))
        case 7:
            begin = chance.randrange(len(data))
            data[at:at] = data[begin : begin + chance.randint(1, _LONGEST)]
        case _:  # from another file
            other = chance.choice(list(whole().values()))
            begin = chance.randrange(len(other))
            data[at : at + 64] = other[begin : begin + chance.randint(1, 128)]


def _with_sums(data: bytearray) -> bytearray:
    """A PNG whose chunks have the right sums, so that damage is not found by these."""
    fixed = data[:8]
    for kind, body in _chunks(data):
        fixed += chunk(kind, body)
    return fixed


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG, with the right sum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _chunks(data: bytearray) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at + 8 <= len(data):
        (n,) = struct.unpack_from(">I", data, at)
        yield bytes(data[at + 4 : at + 8]), bytes(data[at + 8 : at + 8 + n])
        at += n + 12
