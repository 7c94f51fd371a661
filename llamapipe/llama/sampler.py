"""A sampler chain: from a row of logits to one token, with state of its own."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

import numpy as np

from llamapipe.errors import DecodeError, EngineClosedError
from llamapipe.llama.check import check_float, check_int, check_tokens
from llamapipe.llama.vocab import Vocab
from llamapipe.native.load import last_error, native

if TYPE_CHECKING:
    import numpy.typing as npt

# Far above any logit, far below where a float32 logit would stop being finite.
MAX_BIAS = 1e6


class SamplerChain:
    """Turns logits into tokens for one request: bias and penalties, then truncation in the order added, then the draw.

    ``seed`` (0 to 2**64 - 1) starts a generator of its own, which gives one uniform number to each drawn token. Not
    thread-safe; needs the vocabulary's model to live. Close it, or use ``with``.

    Raises TypeError and ValueError for bad arguments here and in every method, before anything is changed.
    """

    def __init__(self, vocab: Vocab, seed: int = 0) -> None:
        self._handle: Any = None
        if not isinstance(vocab, Vocab):
            raise TypeError(f"vocab must be a Vocab (model.vocab), not {type(vocab).__name__}")
        self._pid = os.getpid()
        self._native = native()
        self._vocab = vocab  # keeps what the native chain points to
        self.n_vocab = vocab.n_vocab
        self.seed = check_int("seed", seed, 0, 2**64 - 1)
        handle = self._native.lib.lp_sampler_new(vocab.handle, self.seed)
        if handle == self._native.ffi.NULL:
            raise MemoryError(last_error(self._native))
        self._handle = handle

    def __repr__(self) -> str:
        return f"<SamplerChain seed={self.seed}{' closed' if self._handle is None else ''}>"

    # ---- stages
    def set_bias(self, bias: Mapping[int, float]) -> SamplerChain:
        """Adds a number, of at most a million, to the logits of some tokens; minus infinity forbids a token."""
        if not isinstance(bias, Mapping):
            raise TypeError(f"bias must map token ids to numbers, not be a {type(bias).__name__}")
        tokens = check_tokens("bias", list(bias), self.n_vocab)
        values = [check_bias(f"bias of token {t}", v) for t, v in bias.items()]
        return self._checked(self._native.lib.lp_sampler_set_bias(self.handle, len(tokens), tokens, values))

    def set_penalties(
        self, last_n: int, repeat: float = 1.0, frequency: float = 0.0, presence: float = 0.0
    ) -> SamplerChain:
        """Penalties on tokens among the last ``last_n`` accepted, as llama.cpp defines them.

        A logit is divided by ``repeat`` when positive and multiplied when not, then lowered by ``presence`` and by
        ``frequency`` for each occurrence.
        """
        n = check_int("last_n", last_n, 0, 2**31 - 1)
        divisor = check_float("repeat", repeat, 1e-6, 1e6)
        each, once = (
            check_float(name, value, -1e6, 1e6)
            for name, value in (("frequency", frequency), ("presence", presence))
        )
        return self._checked(self._native.lib.lp_sampler_set_penalties(self.handle, n, divisor, each, once))

    def add_top_k(self, k: int) -> SamplerChain:
        """Keeps the ``k`` largest logits, on ties the lower ids; 0 keeps all."""
        return self._checked(
            self._native.lib.lp_sampler_add_top_k(self.handle, check_int("k", k, 0, 2**31 - 1))
        )

    def add_typical(self, p: float) -> SamplerChain:
        """Keeps the locally typical tokens of mass ``p`` (arXiv 2202.00666)."""
        return self._checked(self._native.lib.lp_sampler_add_typical(self.handle, check_float("p", p, 0, 1)))

    def add_top_p(self, p: float) -> SamplerChain:
        """Keeps the smallest set of tokens of mass ``p`` (arXiv 1904.09751)."""
        return self._checked(self._native.lib.lp_sampler_add_top_p(self.handle, check_float("p", p, 0, 1)))

    def add_min_p(self, p: float) -> SamplerChain:
        """Keeps tokens at least ``p`` times as probable as the first."""
        return self._checked(self._native.lib.lp_sampler_add_min_p(self.handle, check_float("p", p, 0, 1)))

    def add_temperature(self, temperature: float) -> SamplerChain:
        """Divides the logits; 0 makes the chain greedy (largest logit, on ties the lowest id)."""
        divisor = check_float("temperature", temperature, 0, 1e6)
        return self._checked(self._native.lib.lp_sampler_add_temperature(self.handle, divisor))

    # ---- use
    def accept(self, tokens: Iterable[SupportsIndex]) -> None:
        """Tells the penalties about tokens of the sequence; ``sample`` does not do it by itself."""
        ids = check_tokens("tokens", tokens, self.n_vocab)
        self._checked(self._native.lib.lp_sampler_accept(self.handle, len(ids), ids))

    def reset(self) -> None:
        """Forgets the accepted tokens; the generator goes on from where it is."""
        self._checked(self._native.lib.lp_sampler_reset(self.handle))

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Draws a token from logits, float32 ``(n_vocab,)``; does not accept it.

        Raises TypeError and ValueError for what is no such row, DecodeError when no logit is finite.
        """
        given = np.asarray(logits)
        if given.dtype.kind not in "fiu":
            raise TypeError(f"logits must be numbers (float32), not {given.dtype}")
        row = np.ascontiguousarray(given, dtype=np.float32)
        if row.shape != (self.n_vocab,):
            raise ValueError(f"logits have the shape {row.shape}; it must be ({self.n_vocab},)")
        ffi = self._native.ffi
        token = ffi.new("int32_t *")
        if self._native.lib.lp_sampler_draw(self.handle, ffi.from_buffer("float[]", row), token) != 0:
            raise DecodeError("no logit of this row is finite; the model or its weights are damaged")
        return int(token[0])

    def _checked(self, code: int) -> SamplerChain:
        if code < 0:
            raise MemoryError(last_error(self._native))
        return self

    # ---- lifetime
    @property
    def handle(self) -> Any:
        """The native ``lp_sampler *``. Raises EngineClosedError when closed."""
        if self._handle is None:
            raise EngineClosedError("the sampler chain is closed; create another")
        return self._handle

    def close(self) -> None:
        """Frees the native memory; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._native.lib.lp_sampler_free(handle)

    def __enter__(self) -> SamplerChain:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and self._pid == os.getpid():
            warnings.warn(
                f"{self!r} was never closed; use `with` or close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


def check_bias(name: str, value: SupportsFloat) -> float:
    """``value`` as what may be added to a logit. Raises TypeError, ValueError naming it."""
    if isinstance(value, float) and value == -math.inf:
        return -math.inf
    try:
        return check_float(name, value, -MAX_BIAS, MAX_BIAS)
    except ValueError as e:
        raise ValueError(f"{e}, or minus infinity to forbid the token") from None
