"""A llama_context that computes embeddings: each batch is a few whole texts, and no state is kept between batches.

llama.cpp aborts if an encoder's batch is cut, and pools wrongly if a text is cut. So a batch is never larger than a
ubatch, and all texts share one range of KV cells, which keeps llama.cpp from splitting the batch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llamapipe._options import EMBEDDER_BY_NAME as ROWS
from llamapipe.arguments import choice_of, int_of
from llamapipe.errors import BackendError, InvalidRequestError
from llamapipe.host.at_exit import awaited_at_exit
from llamapipe.host.cores import usable_cores
from llamapipe.llama.model import Model, warn_of_context
from llamapipe.native.load import drain_log, last_error, native
from llamapipe.native.not_copyable import NotCopyable

if TYPE_CHECKING:
    import numpy.typing as npt

_DEFAULT_N_CTX = 2048
_MIN_BATCH = 512
_POLL = 2  # as in Context


class EmbeddingContext(NotCopyable):
    """Compute buffers over a model. One thread at a time; close it before its model.

    ``n_ctx``: maximum tokens of a text. ``n_seq_max``: maximum texts in a batch. ``n_batch``: maximum tokens in a
    batch. ``width``: the number of values in a row of ``compute``. Raises as ``Embedder`` does.
    """

    def __init__(
        self,
        model: Model,
        pooling: str | None = None,
        n_ctx: int | None = None,
        n_seq_max: int = 16,
        n_threads: int | None = None,
    ) -> None:
        self._handle: Any = None
        self.model = model
        self._native = native()
        ffi, lib = self._native.ffi, self._native.lib
        handle = model.handle
        if model.vocab_only:
            raise InvalidRequestError(
                f"{model.path} was loaded with vocab_only=True; embeddings need weights"
            )
        if lib.llama_model_has_encoder(handle) and lib.llama_model_has_decoder(handle):
            raise InvalidRequestError(
                f"{model.path.name} is an encoder-decoder model; embeddings need an encoder or a decoder"
            )
        self.pooling = _pooling(model, pooling)
        default = min(model.n_ctx_train, _DEFAULT_N_CTX)
        self.n_ctx = int_of("n_ctx", default if n_ctx is None else n_ctx, ROWS)
        if not model.is_causal and self.n_ctx > model.n_ctx_train:
            raise InvalidRequestError(
                f"n_ctx is {self.n_ctx}, and {model.path.name} has positions for {model.n_ctx_train} tokens; "
                f"use at most {model.n_ctx_train}"
            )
        warn_of_context(model, self.n_ctx)
        self.n_seq_max = int_of("n_seq_max", n_seq_max, ROWS)
        self.n_threads = int_of("n_threads", usable_cores() if n_threads is None else n_threads, ROWS)
        # llama.cpp measures its graph with sequences of one length, and aborts where that is not a whole number.
        self.n_batch = -(-max(self.n_ctx, _MIN_BATCH) // self.n_seq_max) * self.n_seq_max

        params = ffi.new("struct llama_context_params *", lib.llama_context_default_params())
        params.n_ctx = -(-self.n_batch // 256) * 256
        params.n_batch = params.n_ubatch = params.n_outputs_max = self.n_batch
        params.n_seq_max = self.n_seq_max
        params.n_threads = params.n_threads_batch = self.n_threads
        params.kv_unified = params.embeddings = True
        params.pooling_type = getattr(lib, f"LLAMA_POOLING_TYPE_{self.pooling.upper()}")
        # Only with our kernels: ggml's flash attention lets a text's place in its batch show in the fourth digit.
        params.flash_attn_type = int(model.attends)
        self._pid = os.getpid()
        model.adopt(self, "an Embedder")
        try:
            drain_log(self._native)
            with awaited_at_exit():
                self._handle = (
                    lib.lp_context_new(handle, params, _POLL, 0, False, model.attends, False) or None
                )
            if self._handle is None:
                reason = "; ".join(drain_log(self._native)[-2:]) or last_error(self._native)
                raise BackendError(
                    f"a context for embeddings of {self.n_ctx} tokens could not be created ({reason}); "
                    "try a smaller n_ctx"
                )
            self._has_memory = lib.llama_get_memory(lib.lp_context_llama(self._handle)) != ffi.NULL
        except BaseException:
            self.close()
            raise
        rank = self.pooling == "rank"
        self.width: int = lib.llama_model_n_cls_out(handle) if rank else lib.llama_model_n_embd_out(handle)

    def __repr__(self) -> str:
        state = " closed" if self._handle is None else ""
        return f"<EmbeddingContext pooling={self.pooling!r} n_ctx={self.n_ctx}{state}>"

    def compute(self, texts: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Compute embeddings of texts, given as tokens: float32 ``(width,)`` each, or ``(n_tokens, width)`` unpooled.

        At most ``n_seq_max`` texts of 1 to ``n_ctx`` tokens, and ``n_batch`` tokens in all; the caller checks that.
        Raises BackendError if llama.cpp fails.
        """
        ffi, lib = self._native.ffi, self._native.lib
        lengths = [len(text) for text in texts]
        n = sum(lengths)
        tokens = np.fromiter((token for text in texts for token in text), np.int32, n)
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        seq_ids = np.repeat(np.arange(len(texts), dtype=np.int32), lengths)
        outputs = np.ones(n, np.int8)
        if self._has_memory and lib.lp_context_memory(self._handle, lib.LP_CLEAR, 0, 0, -1, -1) < 0:
            raise BackendError(f"clearing the context failed ({last_error(self._native)})")
        code = lib.lp_decode(
            self._handle,
            n,
            ffi.from_buffer("int32_t[]", tokens),
            ffi.from_buffer("int32_t[]", positions),
            ffi.from_buffer("int32_t[]", seq_ids),
            ffi.from_buffer("int8_t[]", outputs),
        )
        pooled = self.pooling != "none"
        rows = np.empty((len(texts) if pooled else n, self.width), np.float32)
        if code == 0:
            out = ffi.from_buffer("float[]", rows)
            code = lib.lp_embeddings(self._handle, len(rows), pooled, self.width, out)
        if code != 0:
            reason = "; ".join(drain_log(self._native)[-2:]) or last_error(self._native)
            raise BackendError(f"llama.cpp failed to compute these embeddings (code {code}: {reason})")
        return list(rows) if pooled else np.split(rows, np.cumsum(lengths)[:-1])

    def compute_alone(self, text: Sequence[int]) -> npt.NDArray[np.float32]:
        """Compute one text so that no number of other texts can change it. Raises as ``compute`` does.

        A number that is not finite reaches other texts in spite of the mask, which multiplies it by zero: texts of the
        same batch, and later ones through the cells. So this text's tokens overwrite all cells first.
        """
        if self._has_memory:
            n = min(self.n_ctx, self.n_batch // self.n_seq_max)
            self.compute([[text[i % len(text)] for i in range(n)]] * self.n_seq_max)
        return self.compute([text])[0]

    def set_threads(self, n_threads: int) -> None:
        """Change the number of compute threads from the next batch on. Raises ValueError, BackendError."""
        n = int_of("n_threads", n_threads, ROWS)
        if self._native.lib.lp_context_set_threads(self._handle, n, n) < 0:
            raise BackendError(f"{n} threads cannot be used ({last_error(self._native)})")
        self.n_threads = n

    def compute_thread_ids(self) -> list[int]:
        """Return the kernel's ids of the compute threads; empty before the first batch, and outside Linux."""
        ids = self._native.ffi.new("int32_t[]", 1024)
        n: int = self._native.lib.lp_context_thread_ids(self._handle, 1024, ids)
        return self._native.ffi.unpack(ids, max(n, 0))  # type: ignore[no-any-return]

    def rest(self) -> None:
        """Let the compute threads sleep until the next batch."""
        self._native.lib.lp_context_rest(self._handle)

    def close(self) -> None:
        """Free the context; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None and os.getpid() == self._pid:
            self._native.lib.lp_context_free(handle)
        self.model.release(self)


def _pooling(model: Model, wanted: str | None) -> str:
    """Return the pooling to use: the requested one, the model's own, or one that suits its attention."""
    if wanted is not None:
        pooling = choice_of("pooling", wanted, ROWS)
    else:
        own = model.metadata.get(f"{model.metadata.get('general.architecture')}.pooling_type", "")
        known = ROWS["pooling"].choices  # in the order of llama.cpp's numbers
        pooling = known[int(own)] if own.isdigit() and int(own) < len(known) else ""
        if pooling in ("", "none"):
            pooling = "last" if model.is_causal else "mean"
    if pooling == "rank" and not model.has_rank_head:
        raise InvalidRequestError(f"{model.path.name} has no rank head; rerankers have one")
    return pooling
