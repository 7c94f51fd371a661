"""A sampler chain: from a row of logits to one token, with state of its own."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, SupportsIndex

import numpy as np

from llamapipe.arguments import check_float, check_int, check_tokens
from llamapipe.errors import DecodeError, EngineClosedError, NoToken
from llamapipe.llama.vocab import Vocab
from llamapipe.native.load import last_error, native

if TYPE_CHECKING:
    import numpy.typing as npt

# Far above any logit, far below where a float32 logit would stop being finite.
MAX_BIAS = 1e6


Processor = Callable[["npt.NDArray[np.float32]"], object]


class Guide(Protocol):
    """What may follow, decided token by token by something that is not llama.cpp's."""

    def mask(self) -> npt.NDArray[np.uint32]:
        """A bit for each token, set where it may follow; ``(ceil(n_vocab / 32),)``, valid until ``accept``."""

    @property
    def finished(self) -> bool:
        """Whether nothing but an end may follow."""

    def accept(self, token: int) -> None:
        """Takes the token that follows."""

    def reset(self, tokens: Sequence[int]) -> None:
        """Begins anew, after these tokens. Raises DecodeError where they are not allowed."""

    def close(self) -> None:
        """Frees what it holds."""


class Dry:
    """The DRY sampler's options with its sequence breakers looked up in a vocabulary, which takes a while.

    ``multiplier * base ** (length - allowed_length)`` is taken from the logit of a token that would lengthen a
    repetition of the last ``last_n`` tokens to ``length``; repetitions end at ``breakers``. Freed when nobody refers
    to it any more, or by ``close``; the vocabulary's model may be closed before.
    """

    def __init__(
        self,
        vocab: Vocab,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Sequence[str],
    ) -> None:
        lib, ffi = native().lib, native().ffi
        texts = [ffi.new("char[]", text.encode()) for text in breakers]
        handle = lib.lp_dry_new(
            vocab.handle,
            multiplier,
            base,
            allowed_length,
            last_n,
            len(texts),
            ffi.new("const char *[]", texts),
        )
        if handle == ffi.NULL:
            raise MemoryError(last_error(native()))
        self._handle = handle
        # Shared by the chains of many requests, so it goes with the last of those who may make one.
        self._free = weakref.finalize(self, lib.lp_dry_free, handle)

    @property
    def handle(self) -> Any:
        """The native ``lp_dry *``. Raises EngineClosedError when closed."""
        if not self._free.alive:
            raise EngineClosedError("these options of DRY are closed; make others")
        return self._handle

    def close(self) -> None:
        """Frees the native memory; a second call does nothing. Chains made with it have their own."""
        self._free()


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
        self._lib = self._native.lib
        self.processors: tuple[Processor, ...] = ()
        self.guide: Guide | None = None
        self.error: Exception | None = None  # why the last draw failed, where that is not the row's doing
        self.finished = False  # nothing may follow the tokens accepted so far
        self.n_logprobs = -1
        self._vocab = vocab  # keeps what the native chain points to
        self.n_vocab = vocab.n_vocab
        self.seed = check_int("seed", seed, 0, 2**64 - 1)
        handle = self._lib.lp_sampler_new(vocab.handle, self.seed)
        if handle == self._native.ffi.NULL:
            raise MemoryError(last_error(self._native))
        self._handle = handle

    def __repr__(self) -> str:
        return f"<SamplerChain seed={self.seed}{' closed' if self._handle is None else ''}>"

    # ---- changes of logits: before every stage
    def set_bias(self, bias: Mapping[int, float]) -> SamplerChain:
        """Adds a number, of at most a million, to the logits of some tokens; minus infinity forbids a token."""
        if not isinstance(bias, Mapping):
            raise TypeError(f"bias must map token ids to numbers, not be a {type(bias).__name__}")
        tokens = check_tokens("bias", list(bias), self.n_vocab)
        values = [check_bias(f"bias of token {t}", v) for t, v in bias.items()]
        return self._checked(self._lib.lp_sampler_set_bias(self.handle, len(tokens), tokens, values))

    def set_allowed(self, tokens: Iterable[SupportsIndex]) -> SamplerChain:
        """Only these tokens may be drawn."""
        ids = check_tokens("tokens", tokens, self.n_vocab)
        return self._checked(self._lib.lp_sampler_set_allowed(self.handle, len(ids), ids))

    def add_bad_word(self, tokens: Iterable[SupportsIndex]) -> SamplerChain:
        """Never draws the last of these tokens after the others."""
        ids = check_tokens("tokens", tokens, self.n_vocab)
        if not ids:
            raise ValueError("a bad word has no tokens; give at least one")
        return self._checked(self._lib.lp_sampler_add_bad_word(self.handle, len(ids), ids))

    def set_min_tokens(self, n: int, ends: Iterable[SupportsIndex]) -> SamplerChain:
        """Draws none of ``ends`` before ``n`` tokens were drawn and accepted."""
        ids = check_tokens("ends", ends, self.n_vocab)
        least = check_int("n", n, 0, 2**31 - 1)
        return self._checked(self._lib.lp_sampler_set_min_tokens(self.handle, least, len(ids), ids))

    def set_grammar(self, text: str, root: str = "root") -> SamplerChain:
        """Draws what a grammar in llama.cpp's GBNF allows, from its rule ``root``. Raises ValueError if it is none.

        Text that llama.cpp's parser does not survive has to be refused before (``llamapipe.structured``).
        """
        if not text.strip() or "\0" in text:
            raise ValueError("the grammar is empty or has a NUL in it, where llama.cpp would end it")
        code = self._lib.lp_sampler_set_grammar(self.handle, text.encode(), root.encode())
        if code < 0:
            raise ValueError(f"{last_error(self._native)}; the log llamapipe.native says where")
        return self

    def set_penalties(
        self, last_n: int, repeat: float = 1.0, frequency: float = 0.0, presence: float = 0.0
    ) -> SamplerChain:
        """Penalties on tokens among the last ``last_n`` accepted, as llama.cpp defines them.

        A logit is divided by ``repeat`` when positive and multiplied when not, then lowered by ``presence`` and by
        ``frequency`` for each occurrence.
        """
        return self._checked(
            self._lib.lp_sampler_set_penalties(self.handle, *_penalties(last_n, repeat, frequency, presence))
        )

    def set_dry(self, dry: Dry) -> SamplerChain:
        """Lowers what would lengthen a repetition."""
        return self._checked(self._lib.lp_sampler_set_dry(self.handle, dry.handle))

    # ---- stages: in the order they are added
    def add_dry(self, dry: Dry) -> SamplerChain:
        """``set_dry`` as a stage, behind others."""
        return self._checked(self._lib.lp_sampler_add_dry(self.handle, dry.handle))

    def add_penalties(
        self, last_n: int, repeat: float = 1.0, frequency: float = 0.0, presence: float = 0.0
    ) -> SamplerChain:
        """``set_penalties`` as a stage, behind others."""
        return self._checked(
            self._lib.lp_sampler_add_penalties(self.handle, *_penalties(last_n, repeat, frequency, presence))
        )

    def add_top_k(self, k: int) -> SamplerChain:
        """Keeps the ``k`` largest logits, on ties the lower ids; 0 keeps all."""
        return self._checked(self._lib.lp_sampler_add_top_k(self.handle, check_int("k", k, 0, 2**31 - 1)))

    def add_typical(self, p: float) -> SamplerChain:
        """Keeps the locally typical tokens of mass ``p`` (arXiv 2202.00666)."""
        return self._checked(self._lib.lp_sampler_add_typical(self.handle, check_float("p", p, 0, 1)))

    def add_top_p(self, p: float) -> SamplerChain:
        """Keeps the smallest set of tokens of mass ``p`` (arXiv 1904.09751)."""
        return self._checked(self._lib.lp_sampler_add_top_p(self.handle, check_float("p", p, 0, 1)))

    def add_min_p(self, p: float) -> SamplerChain:
        """Keeps tokens at least ``p`` times as probable as the first."""
        return self._checked(self._lib.lp_sampler_add_min_p(self.handle, check_float("p", p, 0, 1)))

    def add_top_n_sigma(self, n: float) -> SamplerChain:
        """Keeps logits within ``n`` standard deviations of the largest (arXiv 2411.07641)."""
        return self._checked(
            self._lib.lp_sampler_add_top_n_sigma(self.handle, check_float("n", n, 1e-6, 1e6))
        )

    def add_xtc(self, probability: float, threshold: float) -> SamplerChain:
        """With a probability, drops all tokens above a probability but the least of them ("exclude top choices").

        Decides with a generator of llama.cpp's, seeded from this chain's.
        """
        chance, least = (
            check_float("probability", probability, 0, 1),
            check_float("threshold", threshold, 0, 1),
        )
        return self._checked(self._lib.lp_sampler_add_xtc(self.handle, chance, least))

    def add_temperature(self, temperature: float) -> SamplerChain:
        """Divides the logits; 0 makes the chain greedy (largest logit, on ties the lowest id)."""
        divisor = check_float("temperature", temperature, 0, 1e6)
        return self._checked(self._lib.lp_sampler_add_temperature(self.handle, divisor))

    def add_dynamic_temperature(self, temperature: float, spread: float, exponent: float) -> SamplerChain:
        """A temperature between ``temperature`` less and plus ``spread``, by the row's entropy (arXiv 2309.02772)."""
        middle = check_float("temperature", temperature, 0, 1e6)
        return self._checked(
            self._lib.lp_sampler_add_dynamic_temperature(
                self.handle,
                middle,
                check_float("spread", spread, 0, 1e6),
                check_float("exponent", exponent, 0, 1e6),
            )
        )

    def add_infill(self) -> SamplerChain:
        """For filling in the middle: ends where that is likely, and merges tokens with a common prefix."""
        return self._checked(self._lib.lp_sampler_add_infill(self.handle))

    def add_mirostat(self, version: int, tau: float, eta: float) -> SamplerChain:
        """Mirostat 1 or 2 (arXiv 2007.14966), which draws by itself: the last stage."""
        which = check_int("version", version, 1, 2)
        return self._checked(
            self._lib.lp_sampler_add_mirostat(
                self.handle, which, check_float("tau", tau, 0, 1e3), check_float("eta", eta, 0, 1e3)
            )
        )

    def add_adaptive_p(self, target: float, decay: float) -> SamplerChain:
        """Favours tokens of a probability near ``target`` over time; draws by itself: the last stage."""
        return self._checked(
            self._lib.lp_sampler_add_adaptive_p(
                self.handle, check_float("target", target, 0, 1), check_float("decay", decay, 0, 0.99)
            )
        )

    # ---- use
    @property
    def is_native(self) -> bool:
        """Whether a draw needs no Python: no processors and no guide."""
        return not self.processors and self.guide is None

    def set_python(self, processors: Sequence[Processor], guide: Guide | None) -> SamplerChain:
        """What looks at rows, and decides what may follow, in Python; the guide is closed with the chain."""
        if self.guide is not None and self.guide is not guide:
            self.guide.close()
        self._lib.lp_sampler_set_mask(self.handle, self._native.ffi.NULL)
        self.processors, self.guide = tuple(processors), guide
        self._lib.lp_sampler_set_python(self.handle, bool(self.processors), guide is not None)
        return self

    def set_logprobs(self, n: int) -> SamplerChain:
        """Every draw notes the log-probability of its token and of the ``n`` most probable ones."""
        self.n_logprobs = check_int("n", n, 0, self.n_vocab)
        return self._checked(self._lib.lp_sampler_set_logprobs(self.handle, self.n_logprobs))

    def logprobs(self) -> tuple[float, list[tuple[int, float]]]:
        """Of the last draw: its token's log-probability in the unchanged row, and the most probable tokens'.

        Raises ValueError if that was not asked for with ``set_logprobs``.
        """
        if self.n_logprobs < 0:
            raise ValueError("nobody asked for log-probabilities; call set_logprobs before the draw")
        ffi = self._native.ffi
        one = ffi.new("float *")
        ids, values = ffi.new("int32_t[]", self.n_logprobs), ffi.new("float[]", self.n_logprobs)
        n = self._lib.lp_sampler_logprobs(self.handle, self.n_logprobs, one, ids, values)
        return one[0], list(zip(ffi.unpack(ids, n), ffi.unpack(values, n), strict=True))

    def accept(self, tokens: Iterable[SupportsIndex]) -> None:
        """Tells penalties, DRY and bad words about tokens of the sequence; ``sample`` does not do it by itself."""
        ids = check_tokens("tokens", tokens, self.n_vocab)
        self._checked(self._lib.lp_sampler_accept(self.handle, len(ids), ids))

    def accept_grammar(self, tokens: Iterable[SupportsIndex]) -> None:
        """Tells the grammar of generated tokens. Raises ValueError where it does not go on with them.

        Nothing can be drawn then before ``reset``.
        """
        ids = check_tokens("tokens", tokens, self.n_vocab)
        if self._lib.lp_sampler_accept_grammar(self.handle, len(ids), ids) < 0:
            raise ValueError(last_error(self._native))

    def accept_drawn(self, tokens: Iterable[SupportsIndex]) -> None:
        """``accept_grammar`` and ``accept`` of tokens that were drawn, and counts them. Raises ValueError."""
        ids = check_tokens("tokens", tokens, self.n_vocab)
        if self._lib.lp_sampler_accept_drawn(self.handle, len(ids), ids) < 0:
            raise ValueError(last_error(self._native))

    def reset(self) -> None:
        """Forgets the accepted tokens; the generator goes on from where it is."""
        self._checked(self._lib.lp_sampler_reset(self.handle))

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
        if self.is_native:
            return self.draw(self._native.ffi.from_buffer("float[]", row))
        if self.ask_guide():
            token = self.draw_row(row)
            if token >= 0:
                return token
        assert self.error is not None
        raise self.error

    def draw(self, row: Any) -> int:
        """``sample`` from a native ``float *``, with neither processors nor guide."""
        token = self._native.ffi.new("int32_t *")
        code = self._lib.lp_sampler_draw(self.handle, row, token)
        if code == self._lib.LP_ERROR_MASK:
            raise DecodeError("no token is allowed by what this request asks for")
        if code != 0:
            raise DecodeError("no logit of this row is finite; the model or its weights are damaged")
        return int(token[0])

    def ask_guide(self) -> bool:
        """Takes the guide's mask for the next draw, if there is a guide; False when it failed, with ``error`` set."""
        if self.guide is None:
            return True
        try:
            mask = self.guide.mask()
            if mask.dtype != np.uint32 or mask.size < -(-self.n_vocab // 32):
                raise ValueError(f"the mask is {mask.dtype} {mask.shape}; it must have a bit for each token")
            self._mask = mask  # the native chain looks into it
            self._lib.lp_sampler_set_mask(self.handle, self._native.ffi.from_buffer("uint32_t[]", mask))
        except BaseException as e:
            self.error = _as_exception(e)
            return False
        return True

    def tell_guide(self, token: int) -> bool:
        """Tells the guide of the token that was drawn; False when it failed, with ``error`` set."""
        if self.guide is None:
            return True
        try:
            self.guide.accept(token)
            self.finished = self.guide.finished
        except BaseException as e:
            self.error = _as_exception(e)
            return False
        return True

    def draw_row(self, logits: npt.NDArray[np.float32]) -> int:
        """Draws from a copy of ``logits`` that the processors have changed; ``SAMPLER_FAILED``, with ``error`` set, if that fails."""
        from_buffer = self._native.ffi.from_buffer
        try:
            row = logits.copy()
            for processor in self.processors:
                processor(row)
                if row.shape != logits.shape:
                    raise ValueError(
                        f"a logits processor made the row {row.shape}; it must stay {logits.shape}"
                    )
            token = self.draw(from_buffer("float[]", row))
            if self.n_logprobs >= 0:  # of the model's row
                self._lib.lp_sampler_note(self.handle, from_buffer("float[]", logits), token)
            return token
        except BaseException as e:  # also SystemExit: it is one request's, not the engine's
            self.error = _as_exception(e)
            return NoToken.SAMPLER_FAILED

    def draw_processed(self, logits: npt.NDArray[np.float32]) -> int:
        """``draw_row``, and accepts the token."""
        token = self.draw_row(logits)
        if token >= 0:
            try:
                self.accept_drawn([token])
            except ValueError as e:
                self.error = e
                return NoToken.SAMPLER_FAILED
        return token

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
            self._lib.lp_sampler_free(handle)
            if self.guide is not None:
                self.guide.close()

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


def _as_exception(error: BaseException) -> Exception:
    """What a request fails with: callers of others must not be told to exit."""
    if isinstance(error, Exception):
        return error
    failure = DecodeError(f"what chooses this request's tokens raised {error!r}")
    failure.__cause__ = error
    return failure


def _penalties(
    last_n: int, repeat: float, frequency: float, presence: float
) -> tuple[int, float, float, float]:
    return (
        check_int("last_n", last_n, 0, 2**31 - 1),
        check_float("repeat", repeat, 1e-6, 1e6),
        check_float("frequency", frequency, -1e6, 1e6),
        check_float("presence", presence, -1e6, 1e6),
    )


def check_bias(name: str, value: SupportsFloat) -> float:
    """``value`` as what may be added to a logit. Raises TypeError, ValueError naming it."""
    if isinstance(value, float) and value == -math.inf:
        return -math.inf
    try:
        return check_float(name, value, -MAX_BIAS, MAX_BIAS)
    except ValueError as e:
        raise ValueError(f"{e}, or minus infinity to forbid the token") from None
