"""llama.cpp's way to evaluate a prompt with images: ``mtmd_helper_eval_chunks`` of the library that is built."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import llamapipe
from llamapipe.llama.context import Context
from llamapipe.native.load import LIB_DIR, native

Array = npt.NDArray[Any]
MARKER = "<__media__>"
_P, _N, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32


class _Params(ctypes.Structure):
    _fields_ = (
        ("use_gpu", ctypes.c_bool), ("device", _P), ("print_timings", ctypes.c_bool), ("n_threads", ctypes.c_int),
        ("image_marker", ctypes.c_char_p), ("media_marker", ctypes.c_char_p), ("flash_attn_type", ctypes.c_int),
        ("warmup", ctypes.c_bool), ("image_min_tokens", ctypes.c_int), ("image_max_tokens", ctypes.c_int),
        ("cb_eval", _P), ("cb_eval_user_data", _P), ("batch_max_tokens", _I), ("progress_callback", _P),
        ("progress_callback_user_data", _P),
    )  # fmt: skip


class _Text(ctypes.Structure):
    _fields_ = (
        ("text", ctypes.c_char_p), ("text_len", _N), ("add_special", ctypes.c_bool), ("parse_special", ctypes.c_bool)
    )  # fmt: skip


class Reference:
    """Evaluates prompts in a context with one sequence."""

    def __init__(
        self,
        model: llamapipe.Model,
        mmproj: Path,
        n_ctx: int = 2048,
        n_batch: int = 512,
        image_tokens: tuple[int, int] = (-1, -1),
        **options: Any,
    ) -> None:
        self._lib = lib = ctypes.CDLL(str(next(LIB_DIR.glob("libllamapipe-mtmd*"))))
        lib.mtmd_context_params_default.restype = _Params
        makers = (
            "init_from_file",
            "bitmap_init",
            "bitmap_init_from_audio",
            "input_chunks_init",
            "input_chunks_get",
        )
        for name in makers:
            getattr(lib, f"mtmd_{name}").restype = _P
        lib.mtmd_input_chunks_size.restype = _N
        lib.mtmd_input_chunk_get_n_tokens.restype = _N
        params = lib.mtmd_context_params_default()
        params.use_gpu = params.warmup = params.print_timings = False
        params.n_threads = 1
        params.image_min_tokens, params.image_max_tokens = image_tokens
        native_module = native()
        address = int(native_module.ffi.cast("uintptr_t", model.handle))
        self._media = lib.mtmd_init_from_file(str(mmproj).encode(), _P(address), params)
        assert self._media
        self._context = Context(model, n_ctx=n_ctx, n_seq_max=1, n_batch=n_batch, n_threads=1, **options)
        self._native, self._n_batch, self._n_vocab = native_module, n_batch, model.n_vocab

    def logprobs(self, text: str, media: Sequence[Array]) -> tuple[int, npt.NDArray[np.float64]]:
        """The number of tokens of a prompt with a ``MARKER`` for each image, and the log-probabilities after it."""
        lib, ffi = self._lib, self._native.ffi
        bitmaps = (_P * len(media))(*map(self._bitmap, media))
        encoded = text.encode()
        input_text = _Text(encoded, len(encoded), True, True)
        chunks = _P(lib.mtmd_input_chunks_init())
        assert (
            lib.mtmd_tokenize(_P(self._media), chunks, ctypes.byref(input_text), bitmaps, _N(len(media))) == 0
        )
        n = sum(
            lib.mtmd_input_chunk_get_n_tokens(_P(lib.mtmd_input_chunks_get(chunks, _N(i))))
            for i in range(lib.mtmd_input_chunks_size(chunks))
        )
        llama = self._native.lib.lp_context_llama(self._context.handle)
        address = _P(int(ffi.cast("uintptr_t", llama)))
        self._native.lib.lp_context_memory(self._context.handle, self._native.lib.LP_CLEAR, 0, 0, 0, -1)
        n_past = _I(0)
        code = lib.mtmd_helper_eval_chunks(
            _P(self._media),
            address,
            chunks,
            _I(0),
            _I(0),
            _I(self._n_batch),
            ctypes.c_bool(True),
            ctypes.byref(n_past),
        )
        assert code == 0
        row = ffi.new("float[]", self._n_vocab)
        assert (
            self._native.lib.lp_logits(
                self._context.handle, 1, ffi.new("int32_t[]", [-1]), self._n_vocab, row
            )
            == 0
        )
        lib.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            lib.mtmd_bitmap_free(_P(bitmap))
        logits = np.frombuffer(ffi.buffer(row), np.float32).astype(np.float64)
        return n, logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def _bitmap(self, media: Array) -> int | None:
        if media.ndim == 3:
            height, width, _ = media.shape
            bitmap: int | None = self._lib.mtmd_bitmap_init(
                ctypes.c_uint32(width), ctypes.c_uint32(height), media.ctypes.data_as(_P)
            )
            return bitmap
        sound: int | None = self._lib.mtmd_bitmap_init_from_audio(_N(len(media)), media.ctypes.data_as(_P))
        return sound

    def close(self) -> None:
        """Frees both contexts."""
        self._lib.mtmd_free(_P(self._media))
        self._context.close()
