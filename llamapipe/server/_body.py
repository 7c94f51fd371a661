"""Decodes bodies that clients have compressed (``Content-Encoding``), within the size limits.

Open it to change which encodings a client may send.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import import_module
from typing import Any

from llamapipe._messages import quoted
from llamapipe.server.errors import ApiError

_MOST_ENCODINGS = 3  # encodings of one body
_MOST_MEMBERS = 1024  # streams that follow each other in one body: bgzip makes one per 64 KiB
_PIECE = 2**20  # bytes that are decoded in one call
_CORRUPT = (zlib.error, EOFError, ValueError)


def encodings_of(fields: Iterable[bytes]) -> list[str]:
    """Read the encodings of a body from its ``Content-Encoding`` fields, in the order in which they were applied.

    Raises ApiError 415 for an unsupported encoding, and for more than ``_MOST_ENCODINGS``.
    """
    names = [name.strip().lower() for field in fields for name in field.decode("latin-1").split(",")]
    encodings = [name for name in names if name not in ("", "identity")]
    known = _decoders()
    for name in encodings:
        if name not in known:
            why = " without Python 3.14 or the package backports.zstd" if name == "zstd" else ""
            raise ApiError(
                415,
                f"Content-Encoding: this server does not decode {quoted(name)}{why}; send the body as it is, or with "
                f"{' or '.join(known)}",
                code="unsupported_encoding",
            )
    if len(encodings) > _MOST_ENCODINGS:
        raise ApiError(
            415, f"Content-Encoding: the body has {len(encodings)} encodings; {_MOST_ENCODINGS} are the most"
        )
    return encodings


def check_transfer(fields: Iterable[bytes]) -> None:
    """Raise ApiError 501 for a Transfer-Encoding other than "chunked", because nothing here decodes it."""
    names = [name.strip().lower() for field in fields for name in field.decode("latin-1").split(",")]
    for name in names:
        if name not in ("", "chunked", "identity"):
            raise ApiError(
                501, f"Transfer-Encoding: this server does not decode {quoted(name)}; use Content-Encoding"
            )


def accepted_encodings() -> str:
    """Return the value of ``Accept-Encoding`` that tells a client which encodings it may use."""
    return ", ".join(_decoders())


def decode(body: bytes, encodings: Iterable[str], most_bytes: int) -> bytes:
    """Return the decoded body. Uses at most twice the memory of the result.

    Raises ApiError 413 as soon as the result of a decoding has more than ``most_bytes``, 400 for damaged bytes.
    """
    for name in reversed(list(encodings)):
        try:
            body = _decode(name, body, most_bytes)
        except _CORRUPT as e:
            raise ApiError(400, f"the body is not what Content-Encoding: {name} says: {e}") from None
    return body


def _decode(name: str, body: bytes, most_bytes: int) -> bytes:
    make = _decoders()[name]
    parts: list[bytes] = []
    n, n_members = 0, 0
    left = body
    while left or not n_members:
        n_members += 1
        if n_members > _MOST_MEMBERS:
            raise ValueError(f"more than {_MOST_MEMBERS} streams follow each other")
        read = make(left)
        while True:
            part, rest = read(min(_PIECE, most_bytes + 1 - n))
            n += len(part)
            parts.append(part)
            if n > most_bytes:
                raise ApiError(
                    413,
                    f"the decoded body has more than {most_bytes} bytes, the limit of this server (--max-body-bytes)",
                )
            if rest is not None:
                left = rest
                break
    return b"".join(parts)


# Returns up to the given number of bytes, and at the end of the stream, the bytes after it; before that, None. Raises
# if the end is missing.
_Reader = Callable[[int], "tuple[bytes, bytes | None]"]


def _zlib_reader(body: bytes, wbits: int) -> _Reader:
    stream = zlib.decompressobj(wbits)
    left = body

    def read(n: int) -> tuple[bytes, bytes | None]:
        nonlocal left
        part = stream.decompress(left, n)
        left = stream.unconsumed_tail
        if not stream.eof and not part and not left:
            raise EOFError("it ends too early")
        return part, stream.unused_data if stream.eof else None

    return read


def _deflate(body: bytes) -> _Reader:
    """Open a reader of the zlib format, as the standard says, or of the raw deflate data that some clients send."""
    has_head = len(body) > 1 and body[0] & 15 == 8 and (256 * body[0] + body[1]) % 31 == 0
    return _zlib_reader(body, zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS)


def _zstd_reader(library: Any) -> Callable[[bytes], _Reader]:
    def make(body: bytes) -> _Reader:
        # Without this limit, a frame could ask for a window of gigabytes.
        options = {library.DecompressionParameter.window_log_max: 23}
        stream = library.ZstdDecompressor(options=options)
        left = body

        def read(n: int) -> tuple[bytes, bytes | None]:
            nonlocal left
            try:
                part = stream.decompress(left, n)
            except library.ZstdError as e:
                raise ValueError(str(e)) from None
            left = b""
            if not stream.eof and not part and stream.needs_input:
                raise EOFError("it ends too early")
            return part, stream.unused_data if stream.eof else None

        return read

    return make


@cache
def _decoders() -> dict[str, Callable[[bytes], _Reader]]:
    """Return the decoders by name.

    The result is cached: Python would look for a missing package at every import, which takes 0.3 ms per request.
    """
    gzip = partial(_zlib_reader, wbits=16 + zlib.MAX_WBITS)
    known: dict[str, Callable[[bytes], _Reader]] = {"gzip": gzip, "x-gzip": gzip, "deflate": _deflate}
    for name in ("compression.zstd", "backports.zstd"):
        try:
            known["zstd"] = _zstd_reader(import_module(name))
        except ImportError:
            continue
        break
    return known
