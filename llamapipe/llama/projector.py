"""Owns libmtmd's encoder and a cache of the images and sounds that it has prepared and encoded.

Open this file to change how an image becomes rows of a prompt.

A model's second file (``mmproj``) holds an encoder and a projector. They turn an image into rows that take the place of
tokens in a prompt, with tokens of the text model in between. This takes two steps: preparing (``Projector.media``)
resizes and cuts the image, on the caller's thread; encoding, the costly step, runs on the engine's encoder thread.

The cache is keyed by content and drops the least recently used entries. An image that recurs, in any prompt, is not
prepared or encoded again.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from hashlib import sha256, shake_256
from typing import TYPE_CHECKING, Any

import numpy as np

from llamapipe.errors import DecodeError, EngineClosedError, InvalidRequestError, ModelLoadError
from llamapipe.llama._loading import mapping_guard
from llamapipe.locks import Lock
from llamapipe.media.turns import N_MOST, Turns
from llamapipe.native.load import LIB_DIR, drain_log, last_error
from llamapipe.wanted import Limit, check_wanted, limited

if TYPE_CHECKING:
    import numpy.typing as npt

    from llamapipe.gguf.mmproj import MmprojInfo
    from llamapipe.llama.model import Model
    from llamapipe.media.decode import Given

_CACHE_BYTES = 2**28  # maximum size of the cached rows and prepared pixels
_LEAST_PIXELS = 2**22  # minimum estimate, in bytes, of a chunk that is not encoded yet


class MediaChunk:
    """Consecutive prompt rows of an image or a sound.

    ``n``: the number of rows. ``is_causal``: each row attends to earlier rows only; if False, to all rows. ``ids``:
    negative numbers that stand for the rows in lists of tokens and depend only on the content. ``rows``: float32, (n,
    n_embd); None until they are encoded. ``grid``: the height and the width of each row, (n, 2), int32, if all rows
    share one position and the chunk takes ``n_positions``; else None.
    """

    __slots__ = ("_chunks", "_index", "grid", "ids", "is_causal", "lock", "n", "n_positions", "rows")

    def __init__(
        self,
        chunks: Any,
        index: int,
        n: int,
        is_causal: bool,
        digest: bytes,
        grid: npt.NDArray[np.int32] | None = None,
        n_positions: int = 0,
    ) -> None:
        self.n = n
        self.is_causal = is_causal
        self.grid = grid
        self.n_positions = n_positions or n
        numbers = np.frombuffer(shake_256(digest + index.to_bytes(4, "little")).digest(8 * n), "<i8")
        # Each number has 62 random bits: two images have equal numbers only if their hashes collide.
        self.ids: list[int] = (-1 - (numbers & (2**62 - 1))).tolist()
        self.rows: npt.NDArray[np.float32] | None = None
        self.lock = Lock()
        self._chunks = chunks
        self._index = index

    def __repr__(self) -> str:
        return f"<MediaChunk n={self.n}{'' if self.rows is None else ' encoded'}>"


class Media:
    """An image or a sound in a prompt: ``parts`` are tokens of the text model, or chunks.

    ``n``: the number of tokens and rows. ``n_pixels``: the size of the original image.
    """

    def __init__(self, parts: list[list[int] | MediaChunk], n_pixels: int = 0) -> None:
        self.parts = parts
        self.n_pixels = n_pixels
        self.n = sum(len(part) if isinstance(part, list) else part.n for part in parts)

    def __repr__(self) -> str:
        return f"<Media n={self.n} n_parts={len(self.parts)}>"


class Projector:
    """An encoder for one model, and its cache. Any thread. Images are prepared in turn, and encoded one at a time.

    Nothing is loaded before ``open`` or the first image. ``name``: libmtmd's names of the projector's kinds. ``sees``,
    ``hears``: whether it takes images, and sounds. ``image_tokens``: the file's limits on an image's tokens, if they
    can be changed. ``limits``: the limits that were set; None for the file's.
    """

    def __init__(
        self,
        native: Any,
        model: Model,
        handle: Any,
        info: MmprojInfo,
        use_gpu: bool,
        limits: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.path = info.path
        self.name = " and ".join(info.projectors)
        self.sees, self.hears = info.sees, info.hears
        self.image_tokens, self.limits = info.image_tokens, limits
        self.sample_rate = 0
        self._info, self._use_gpu, self._has_kernels = info, use_gpu, model.attends
        self._native = native
        self._model_handle = handle
        self._handle: Any = None
        self._is_closed = False
        self._lock = Lock()  # guards the cache
        self._cache: OrderedDict[bytes, Media] = OrderedDict()
        self._opening = Lock()
        # libmtmd prepares a sound in one call, which takes 13 ms per second of sound. Images do not wait for sounds.
        self._turns = {"image": Turns(), "sound": Turns()}
        self._n_vocab = model.n_vocab
        self._n_embd: int = native.lib.llama_model_n_embd_inp(handle)

    def open(self) -> None:
        """Load the encoder, unless it is loaded. Raises ModelLoadError."""
        with self._opening:
            self._open()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the model is closed; load it again")

    def _open(self) -> Any:
        """Return the native encoder. The caller holds ``_opening``. Raises EngineClosedError, ModelLoadError."""
        self._check_open()
        if self._handle is not None:
            return self._handle
        native, path = self._native, self.path
        lib, ffi = native.lib, native.ffi
        library = next(LIB_DIR.glob("libllamapipe-mtmd*"), None)
        if library is None:
            raise ModelLoadError(
                "mmproj is given, and this build of llamapipe has no libmtmd; build it with --media on"
            )
        drain_log(native)
        with mapping_guard(native, path):
            if change := self._info.stamp.change():
                raise ModelLoadError(f"{change} after the model was loaded; load it again")
            least, most = (-1 if limit is None else limit for limit in self.limits)
            handle = lib.lp_media_open(
                os.fsencode(library),
                os.fsencode(path),
                self._model_handle,
                self._use_gpu,
                self._has_kernels,
                least,
                most,
            )
        problems = drain_log(native)
        if handle == ffi.NULL:
            raise ModelLoadError(f"{path}: libmtmd refused it: {(problems or [last_error(native)])[0]}")
        self.sees = bool(lib.lp_media_sees(handle))
        self.sample_rate = lib.lp_media_sample_rate(handle)
        self.hears = self.sample_rate > 0
        self._handle = handle
        return handle

    def __repr__(self) -> str:
        return f"<Projector {self.path.name!r} {self.name}>"

    def media(
        self, source: Given, owner: bytes = b"", share: Hashable = None, max_sound_s: float | None = None
    ) -> Media:
        """Prepare an image or a sound for a prompt, without encoding it.

        Only calls with the same ``owner`` share the result.

        ``share``: the client that calls; clients take turns (``Turns``). ``max_sound_s``: the longest sound; None: any
        length that can be decoded.

        Raises InvalidRequestError for media that cannot be decoded or whose kind the model does not take; TypeError,
        ImportError; ModelLoadError if the encoder cannot be loaded; EngineClosedError; and what ``check_wanted``
        raises.
        """
        if not (self.sees if source.kind == "image" else self.hears):
            what = "images" if source.kind == "image" else "sounds"
            raise InvalidRequestError(f"{source.place}: {self.path.name} takes no {what}")
        # The digest includes the limits: with different limits an image has different rows, which must have different
        # ids.
        digest = sha256(source.digest() + repr(self.limits).encode() + owner).digest()
        if (hit := self._find(digest)) is not None:
            return hit
        with limited(Limit(self._check_open)), self._turns[source.kind].turn(share):
            if (hit := self._find(digest)) is not None:  # another thread was faster
                return hit
            check_wanted()
            media = self._prepare(source, digest, max_sound_s)
            with self._lock:
                self._cache[digest] = media
                while len(self._cache) > 1 and sum(map(self._bytes_of, self._cache.values())) > _CACHE_BYTES:
                    self._cache.popitem(last=False)
        return media

    def _find(self, digest: bytes) -> Media | None:
        with self._lock:
            if (media := self._cache.get(digest)) is not None:
                self._cache.move_to_end(digest)
            return media

    def _bytes_of(self, media: Media) -> int:
        """Estimate the size of rows in bytes; before they are encoded, of their pixels: 4 MiB and 32 × 32 per row."""
        n_bytes = 0
        for part in media.parts:
            if isinstance(part, MediaChunk):
                n_bytes += (
                    part.n * self._n_embd * 4 if part.rows is not None else _LEAST_PIXELS + part.n * 12 * 1024
                )
        return n_bytes

    def _prepare(self, source: Given, digest: bytes, max_sound_s: float | None) -> Media:
        lib, ffi, n_pixels = self._native.lib, self._native.ffi, 0
        with self._opening:
            handle = self._open()
        if source.kind == "image":
            image = source.pixels()
            height, width, _ = image.shape
            n_pixels = height * width
            chunks = lib.lp_media_image(handle, width, height, ffi.from_buffer("uint8_t[]", image))
        else:
            samples = source.samples(self.sample_rate, max_sound_s)
            chunks = lib.lp_media_sound(handle, len(samples), ffi.from_buffer("float[]", samples))
        problems = drain_log(self._native)
        if chunks == ffi.NULL:
            reason = (problems or [last_error(self._native)])[0]
            raise InvalidRequestError(f"{source.place}: the {source.kind} cannot be used: {reason}")
        owned = ffi.gc(chunks, lib.lp_media_chunks_free)
        n = lib.lp_media_n_chunks(owned)
        return Media([self._part(source, owned, i, digest) for i in range(n)], n_pixels)

    def _part(self, source: Given, chunks: Any, index: int, digest: bytes) -> list[int] | MediaChunk:
        native = self._native
        part = native.ffi.new("lp_media_part *")
        if native.lib.lp_media_chunk(self._handle, chunks, index, part) < 0:
            raise InvalidRequestError(
                f"{source.place}: the {source.kind} cannot be used: {last_error(native)}"
            )
        if not part.is_text:
            return self._media_chunk(source, chunks, index, part, digest)
        tokens: list[int] = native.ffi.unpack(part.tokens, part.n_tokens)
        if any(not 0 <= token < self._n_vocab for token in tokens):
            raise InvalidRequestError(
                f"{source.place}: the text model lacks tokens that the projector {self.name} puts around images; "
                "use the files of one model"
            )
        return tokens

    def _media_chunk(self, source: Given, chunks: Any, index: int, part: Any, digest: bytes) -> MediaChunk:
        native, grid, n_positions = self._native, None, 0
        if part.has_grid:
            grid, n_positions = np.empty((part.n_tokens, 2), np.int32), part.n_positions
            if native.lib.lp_media_grid(chunks, index, native.ffi.from_buffer("int32_t[]", grid)) < 0:
                raise InvalidRequestError(
                    f"{source.place}: the {source.kind} cannot be used: {last_error(native)}"
                )
        return MediaChunk(chunks, index, part.n_tokens, part.is_causal, digest, grid, n_positions)

    def encode(self, media: Any, n_threads: int) -> bool:
        """Encode a chunk on this many CPU threads. Return False if it was already encoded. Raises DecodeError."""
        assert isinstance(media, MediaChunk)
        with media.lock:
            if media.rows is not None:
                return False
            native = self._native
            rows = np.empty((media.n, self._n_embd), np.float32)
            buffer = native.ffi.from_buffer("float[]", rows)
            code = native.lib.lp_media_encode(self._handle, media._chunks, media._index, n_threads, buffer)
            problems = drain_log(native)
            if code < 0:
                raise DecodeError(
                    f"an image or a sound could not be encoded: {(problems or [last_error(native)])[0]}"
                )
            if not np.isfinite(rows).all():
                raise DecodeError(
                    "an image or a sound has rows that are not finite; the projector's file is damaged"
                )
            media.rows, media._chunks = rows, None
        return True

    def close(self) -> None:
        """Free the encoder once no caller prepares an image. Close every engine of the model first.

        The preparation of an image stops with EngineClosedError at the image's next piece.
        """
        self._is_closed = True
        with ExitStack() as alone:
            for turns in self._turns.values():
                for _ in range(N_MOST):
                    alone.enter_context(turns.turn(object()))
            if self._handle is not None:
                self._cache.clear()
                handle, self._handle = self._handle, None
                self._native.lib.lp_media_close(handle)


def in_prompt(
    tokens: Sequence[int], media: Sequence[Media]
) -> tuple[list[int], list[tuple[int, MediaChunk]]]:
    """Replace each token ``-1 - i`` with the tokens of ``media[i]``; return the tokens and where each chunk begins."""
    ids: list[int] = []
    chunks: list[tuple[int, MediaChunk]] = []
    for token in tokens:
        if token >= 0:
            ids.append(token)
            continue
        for part in media[-1 - token].parts:
            if isinstance(part, list):
                ids += part
            else:
                chunks.append((len(ids), part))
                ids += part.ids
    return ids, chunks
