"""Decodes images and sounds: converts paths, bytes, Pillow images and arrays to pixels and samples.

Open this file to change a limit or a format. Nothing here is native code. A hostile image reaches only Pillow's
decoders of common formats. They get no image whose header announces too many pixels, and only the parts that
``_containers.py`` passes on. Sounds must be WAV files: decoding MP3, Ogg or M4A would need a large C library, and a
client can convert such files with one command.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import struct
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.media._containers import ContainerError, picture_in
from llamapipe.wanted import check_wanted

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_BYTES = 2**26  # of a file
MOST_PIXELS = 2**25  # of an image: 33 million
MOST_SECONDS = 30 * 60  # of a sound
_LONGEST_RATIO = 200  # of an image's longer side to its shorter side
_MOST_CHUNKS = 1000  # of a WAV file
_BLOCK = 2**18  # samples that are computed together
_FLOATS, _EXTENSIBLE = 3, 0xFFFE  # formats of WAV files; PCM is 1
# Numpy types by WAV format and bits per sample. 24-bit samples are read as bytes.
_SAMPLES = {
    (1, 8): "u1", (1, 16): "<i2", (1, 24): "u1", (1, 32): "<i4", (_FLOATS, 32): "<f4", (_FLOATS, 64): "<f8",
}  # fmt: skip
_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}
_OTHER_IMAGES = (
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\0\0\x01\0", "ICO"),
    (b"8BPS", "PSD"),
)
_OTHER_SOUNDS = (
    (b"ID3", "MP3"),
    (b"fLaC", "FLAC"),
    (b"OggS", "Ogg"),
    (b"\x1aE\xdf\xa3", "WebM or Matroska"),
    (b"FORM", "AIFF"),
    (b"#!AMR", "AMR"),
)
_DATA_URL = re.compile(r"data:(?P<type>[\w.+/-]*)(?:;[\w=.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
# Pillow's modes that are not read, with the reason. Pillow's conversion would clip values above 255.
_NO_RANGE = "whose values have no fixed range"
_OTHER_MODES = {"I": _NO_RANGE, "F": _NO_RANGE, "La": "which Pillow cannot convert"}
_SPACES = re.compile(r"[ \t\r\n]+")
Kind = Literal["image", "sound"]


class Given(NamedTuple):
    """An image or a sound as the caller passed it. ``value``: bytes, a path, a Pillow image or an array.

    ``place``: the place in the request, for error messages. ``rate``: the sampling rate in Hz of a sound in an array.
    """

    kind: Kind
    value: Any
    place: str
    rate: int | None = None

    def digest(self) -> bytes:
        """Return a 32-byte hash of the content; read the file if it is a path. Raises as ``content`` does."""
        head = f"{self.kind} {self.rate} ".encode()
        content = self.content()
        if isinstance(content, bytes):
            return sha256(head + content).digest()
        array = np.ascontiguousarray(content)
        return sha256(head + f"{array.dtype} {array.shape} ".encode() + array.tobytes()).digest()

    def content(self) -> bytes | npt.NDArray[Any]:
        """Return the bytes of a file, or an array of pixels or samples. Raises InvalidRequestError, TypeError."""
        value = self.value
        if isinstance(value, (str, os.PathLike)):
            return self._read(Path(value))
        if isinstance(value, (bytes, bytearray, memoryview)):
            if len(value) > MOST_BYTES:
                raise self._too_large(len(value))
            return bytes(value)
        if hasattr(value, "convert") and hasattr(value, "size"):  # a Pillow image
            _check_size(self.place, *value.size)
            if value.mode in _OTHER_MODES:
                raise InvalidRequestError(
                    f"{self.place}: the image has Pillow's mode {value.mode}, {_OTHER_MODES[value.mode]}; give an "
                    "image of mode RGB or L"
                )
            return _rgb(value)
        if isinstance(value, np.ndarray):
            return value
        raise TypeError(
            f"{self.place}: an {self.kind} must be a path, bytes, {'a Pillow image, ' if self.kind == 'image' else ''}"
            f"or a numpy array, not {type(value).__name__}"
        )

    def _read(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidRequestError(f"{self.place}: {path} cannot be read: {reason}") from None
        if len(data) > MOST_BYTES:
            raise self._too_large(path.stat().st_size)
        return data

    def _too_large(self, n_bytes: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self.place}: the {self.kind} has {n_bytes} bytes; at most {MOST_BYTES} are read: make it smaller"
        )

    def pixels(self) -> npt.NDArray[np.uint8]:
        """Decode an image to an array: (height, width, 3), uint8.

        Raises InvalidRequestError, TypeError, ImportError without Pillow.
        """
        content = self.content()
        image = (
            _decode_image(self.place, content) if isinstance(content, bytes) else _as_rgb(self.place, content)
        )
        _check_size(self.place, image.shape[1], image.shape[0])
        return np.ascontiguousarray(image)

    def samples(self, rate: int, max_s: float | None = None) -> npt.NDArray[np.float32]:
        """Decode a sound to mono samples at ``rate`` Hz: (n,), float32.

        ``max_s``: a limit in seconds below ``MOST_SECONDS``. Raises InvalidRequestError, TypeError.
        """
        content = self.content()
        if isinstance(content, bytes):
            sound, own = _wave(self.place, content)
        else:
            sound, own = _as_mono(self.place, content), self.rate or rate
        if not 1000 <= own <= 768_000:
            raise InvalidRequestError(
                f"{self.place}: the sound has {own} samples per second; give 1000 to 768000"
            )
        if not 0 < len(sound) <= MOST_SECONDS * own:
            raise InvalidRequestError(
                f"{self.place}: the sound is {len(sound) / own:.0f} s long; it must not be empty and may have at most "
                f"{MOST_SECONDS} s"
            )
        if max_s is not None and len(sound) > max_s * own:
            raise InvalidRequestError(
                f"{self.place}: the sound is {len(sound) / own:.0f} s long; the limit of this server is {max_s:g} s "
                "(--max-sound): cut it into parts"
            )
        if own != rate:
            sound = _resample(sound, own / rate, max(round(len(sound) * rate / own), 1))
        return np.ascontiguousarray(sound, np.float32)


def _check_size(place: str, width: int, height: int) -> None:
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise InvalidRequestError(
            f"{place}: the image has {width} × {height} pixels; at most {MOST_PIXELS} are decoded: make it smaller"
        )
    if max(width, height) > _LONGEST_RATIO * min(width, height):
        raise InvalidRequestError(
            f"{place}: the image has {width} × {height} pixels; a side may be at most {_LONGEST_RATIO} times the other"
        )


def _decode_image(place: str, data: bytes) -> npt.NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(
            "decoding images needs Pillow, which is not installed: pip install 'llamapipe[media]'; "
            "or give the image as a numpy array (height, width, 3)"
        ) from None
    try:
        picture = picture_in(data)
        if picture is None:
            raise ContainerError(f"it is {_image_format(data)}")
        with Image.open(_Watched(picture.data), formats=[picture.format]) as image:
            _check_size(place, *image.size)
            image.load()
            check_wanted()
            turn = _TURNS.get(picture.orientation)
            turned = image if turn is None else image.transpose(Image.Transpose[turn])
            return _rgb(turned)
    except InvalidRequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidRequestError(f"{place}: the image has too many pixels: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise many kinds for damaged files
        check_wanted()  # raises again if the error is from `check_wanted`
        reason = "it is none" if type(error).__name__ == "UnidentifiedImageError" else str(error)
        raise InvalidRequestError(
            f"{place}: the image cannot be decoded ({reason[:200]}); give PNG, JPEG, WebP, GIF or BMP"
        ) from None


# Pillow's names of the transpositions that turn a picture upright, by EXIF orientation.
_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip


def _rgb(image: Any) -> npt.NDArray[np.uint8]:
    """Return the pixels of a Pillow image: (height, width, 3), uint8.

    16-bit grey is converted here, because Pillow's conversion makes all but the darkest pixels white.
    """
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, 2)
    return np.asarray(image.convert("RGB"))


class _Watched(io.BytesIO):
    """A file in memory that stops its decoder, which reads it in pieces, when the picture is no longer wanted."""

    def read(self, size: int | None = -1, /) -> bytes:
        check_wanted()
        return super().read(size)


def _as_rgb(place: str, array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if (
        array.dtype != np.uint8
        or array.ndim not in (2, 3)
        or (array.ndim == 3 and array.shape[2] not in (3, 4))
    ):
        raise InvalidRequestError(
            f"{place}: the image is an array of {array.dtype} with shape {array.shape}; give uint8 with shape "
            "(height, width, 3)"
        )
    return np.repeat(array[:, :, None], 3, 2) if array.ndim == 2 else array[:, :, :3]


def _as_mono(place: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if array.ndim != 1 or array.dtype.kind != "f":
        raise InvalidRequestError(
            f"{place}: the sound is an array of {array.dtype} with shape {array.shape}; give float32 samples from -1 "
            "to 1 with shape (n,)"
        )
    samples = array.astype(np.float32)
    if not np.isfinite(samples).all():
        raise InvalidRequestError(f"{place}: the sound has samples that are not finite")
    return samples


def _wave(place: str, data: bytes) -> tuple[npt.NDArray[np.float32], int]:
    """Return the samples of a WAV file, averaged over its channels, as (n,) float32, and their rate in Hz.

    The standard library's reader supports neither floats nor, before Python 3.12, ``WAVE_FORMAT_EXTENSIBLE``, which
    many programs write for more than 16 bits or two channels.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise InvalidRequestError(
            f"{place}: the sound is {_sound_format(data)}, and only WAV files are read: convert it, for example with "
            "ffmpeg -i IN -ac 1 -ar 16000 OUT.wav"
        )
    form = raw = memoryview(b"")
    at = 12
    for _ in range(_MOST_CHUNKS):
        n = int.from_bytes(data[at + 4 : at + 8], "little")
        body = memoryview(data)[at + 8 : at + 8 + n]  # a file from a pipe may announce more bytes than it has
        if data[at : at + 4] == b"fmt ":
            form = body
        elif data[at : at + 4] == b"data":
            raw = body
            break
        at += 8 + n + n % 2
    kind = n_channels = rate = n_frame = bits = 0
    if len(form) >= 16:
        kind, n_channels, rate, _, n_frame, bits = struct.unpack_from("<HHIIHH", form)
        if kind == _EXTENSIBLE and len(form) >= 26:
            kind = int.from_bytes(form[24:26], "little")
    dtype = _SAMPLES.get((kind, bits))
    if dtype is None or n_channels == 0 or n_frame != n_channels * bits // 8:
        raise InvalidRequestError(
            f"{place}: the WAV file cannot be decoded (format {kind}, {n_channels} channels, {bits} bits); give PCM "
            "samples of 8, 16, 24 or 32 bits, or floats"
        )
    n = min(len(raw) // n_frame, MOST_SECONDS * rate + 1)
    numbers = np.frombuffer(raw[: n * n_frame], dtype)
    if bits == 24:
        wide = np.zeros((n * n_channels, 4), np.uint8)
        wide[:, 1:] = numbers.reshape(-1, 3)
        numbers = wide.view("<i4")[:, 0]
    with np.errstate(over="ignore"):
        values = numbers.astype(np.float32)
    if kind == _FLOATS:
        if not np.isfinite(values).all():
            raise InvalidRequestError(f"{place}: the sound has samples that are not finite")
        np.clip(values, -1, 1, out=values)
    elif bits == 8:
        values /= 128
        values -= 1
    else:
        values /= 2 ** (8 * numbers.itemsize - 1)
    return values.reshape(-1, n_channels).mean(1, dtype=np.float32), rate


def _resample(samples: npt.NDArray[np.float32], step: float, n: int) -> npt.NDArray[np.float32]:
    """Return ``n`` values, interpolated linearly between the samples at multiples of ``step``.

    Works in blocks, because numpy's float64 intermediates would need several times the memory of the sound.
    """
    values = np.empty(n, np.float32)
    for begin in range(0, n, _BLOCK):
        check_wanted()
        at = np.arange(begin, min(begin + _BLOCK, n)) * step
        first = min(int(at[0]), len(samples) - 1)
        near = samples[first : int(at[-1]) + 2]
        values[begin : begin + _BLOCK] = np.interp(at, np.arange(first, first + len(near)), near)
    return values


def _image_format(data: bytes) -> str:
    """Return the format of an image file that is not decoded, for error messages; "none" if it is no known image."""
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "a video")
    if data[:1000].lstrip(b"\xef\xbb\xbf \r\n\t").startswith((b"<svg", b"<?xml")) and b"<svg" in data[:1000]:
        return "SVG"
    return next((name for magic, name in _OTHER_IMAGES if data.startswith(magic)), "none")


def _sound_format(data: bytes) -> str:
    """Return the format of a file that is not WAV, for error messages."""
    if data[4:8] == b"ftyp":
        return "MP4 or M4A"
    if data[:1] == b"\xff" and data[1:2] >= b"\xe0":
        return "MP3 or AAC"
    return next((name for magic, name in _OTHER_SOUNDS if data.startswith(magic)), "of an unknown format")


def path_below(place: str, name: str, folder: Path | None) -> Path:
    """Return the file in or below ``folder`` that a client's text names.

    If ``folder`` is None, no file may be read. Raises InvalidRequestError if the file is elsewhere, even through a
    link, or is a pipe or a device.
    """
    if folder is None:
        raise InvalidRequestError(
            f"{place}: {quoted(name[:80])} is a path, and none are read here: give a data URL, or media_path the "
            "folder that paths may name files of"
        )
    try:
        root = folder.resolve(strict=True)
        path = (root / name).resolve(strict=True)
        is_inside = path.is_relative_to(root) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # no such file; a NUL in the name; a link to itself
        is_inside = False
    if not is_inside:
        raise InvalidRequestError(f"{place}: {quoted(name[:80])} is not a file in {folder} or below it")
    return path


# ---- the parts of messages
def media_in(part: Mapping[str, Any], place: str) -> Given | None:
    """Return the image or sound in a part of a message, in our form or OpenAI's; None for other parts.

    In our form, a str may also be a path. OpenAI's form has data URLs and base64 only. Raises InvalidRequestError,
    TypeError.
    """
    kind = part.get("type")
    if kind in ("image_url", "input_image"):
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(url, str):
            raise InvalidRequestError(
                f'{place} has no image; give {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,…"}}}}'
            )
        return Given("image", _of_data_url(place, url), place)
    if kind == "input_audio":
        sound = part.get("input_audio")
        data = sound.get("data") if isinstance(sound, Mapping) else None
        if not isinstance(data, str):
            raise InvalidRequestError(
                f'{place} has no sound; give {{"type": "input_audio", "input_audio": {{"data": BASE64, '
                '"format": "wav"}}'
            )
        return Given("sound", _of_base64(place, data), place)
    if kind not in ("image", "audio"):
        return None
    if kind not in part:
        raise InvalidRequestError(f'{place} has no {kind}; give {{"type": "{kind}", "{kind}": …}}')
    value, rate = part[kind], None
    if kind == "audio" and isinstance(value, tuple) and len(value) == 2:
        value, rate = value
        if isinstance(rate, bool) or not isinstance(rate, int):
            raise TypeError(f"{place}: the rate of a sound must be an int, not {type(rate).__name__}")
    if isinstance(value, str) and value[:5].lower() == "data:":
        value = _of_data_url(place, value)
    return Given("image" if kind == "image" else "sound", value, place, rate)


def is_media(part: Any) -> bool:
    """Return whether a part of a message is an image or a sound, valid or not."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in KINDS


KINDS = frozenset({"image", "image_url", "input_image", "audio", "input_audio"})


def _of_data_url(place: str, url: str) -> bytes:
    match = _DATA_URL.match(url)
    if match is None:
        raise InvalidRequestError(
            f"{place}: {quoted(url[:80])} is not a data URL; only data:image/…;base64,… is read, no address is fetched"
        )
    return _of_base64(place, url[match.end() :])


def _of_base64(place: str, text: str) -> bytes:
    if len(text) > MOST_BYTES // 3 * 4 + 4:
        raise InvalidRequestError(
            f"{place}: the base64 text has {len(text)} characters; give at most {MOST_BYTES} bytes"
        )
    if _SPACES.search(text):  # programs such as ``base64`` write lines
        text = _SPACES.sub("", text)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{place}: the text is not base64: {error}") from None
