"""A sampler chain: open this for how a row of logits becomes one token."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsFloat, SupportsIndex

import numpy as np

from llamapipe.arguments import check_float, check_int, check_tokens
from llamapipe.errors import ConstraintError, DecodeError, EngineClosedError, NoToken
from llamapipe.llama.sampling_options import Dry, SamplingOptions
from llamapipe.llama.vocab import Vocab
from llamapipe.native.load import last_error, native
from llamapipe.native.not_copyable import NotCopyable

if TYPE_CHECKING:
    import numpy.typing as npt

# Far above any logit, far below where a float32 logit would stop being finite.
MAX_BIAS = 1e6


# Called with a row of logits, or with the sequence's tokens and the row (``takes_tokens``).
Processor = Callable[..., object]


def takes_tokens(processor: Processor) -> bool:
    """Whether a processor is called with the tokens too: it has two positional parameters without defaults."""
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not say
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in parameters) == 2


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


class SamplerChain(NotCopyable):
    """Turns logits into tokens for one request: bias and penalties, then samplers in their order, then the draw.

    ``seed`` (0 to 2**64 - 1) starts this chain's generator, which gives each draw one uniform number.
    ``options``: all of a request's options at once, checked by the caller; the methods below change them one by one.
    ``processors`` and ``guide``: see ``set_python``. Not thread-safe; needs the vocabulary's model to live. Close it,
    or use ``with``.

    Raises TypeError and ValueError for bad arguments here and in every method, before anything is changed.
    """

    def __init__(
        self,
        vocab: Vocab,
        seed: int = 0,
        options: SamplingOptions | None = None,
        processors: Sequence[Processor] = (),
        guide: Guide | None = None,
    ) -> None:
        self._handle: Any = None
        if not isinstance(vocab, Vocab):
            raise TypeError(f"vocab must be a Vocab (model.vocab), not {type(vocab).__name__}")
        self._pid = os.getpid()
        self._native = native()
        self._lib = self._native.lib
        self._set_processors(processors)
        self.guide = guide
        self.error: Exception | None = None  # why the last draw failed, if not because of the row
        self.finished = False  # nothing may follow the tokens accepted so far
        self._vocab = vocab  # keeps what the native chain points to
        self.n_vocab = vocab.n_vocab
        self.seed = check_int("seed", seed, 0, 2**64 - 1)
        self._options = SamplingOptions() if options is None else options
        self._owns_options = options is None
        self.n_logprobs: int = self._options.struct.n_logprobs
        handle = self._lib.lp_sampler_new(vocab.handle, self.seed, self._options.struct)
        if handle == self._native.ffi.NULL:
            raise MemoryError(last_error(self._native))
        self._handle = handle

    def __repr__(self) -> str:
        return f"<SamplerChain seed={self.seed}{' closed' if self._handle is None else ''}>"

    # ---- options one by one. A change keeps the accepted tokens and the state of the generator.
    def _change(self) -> SamplingOptions:
        """The options, to be changed and handed to ``_configure``. Raises EngineClosedError when closed."""
        _ = self.handle
        if not self._owns_options:
            self._options, self._owns_options = self._options.copy(), True
        return self._options

    def _configure(self) -> SamplerChain:
        return self._checked(self._lib.lp_sampler_configure(self.handle, self._options.struct))

    def _add(self, sampler: int, at_front: bool = False, **values: float) -> SamplerChain:
        options = self._change()
        for name, value in values.items():
            setattr(options.struct, name, value)
        options.put(sampler, at_front)
        return self._configure()

    def set_bias(self, bias: Mapping[int, float]) -> SamplerChain:
        """Adds a number, of at most a million, to the logits of some tokens; minus infinity forbids a token."""
        if not isinstance(bias, Mapping):
            raise TypeError(f"bias must map token ids to numbers, not be a {type(bias).__name__}")
        tokens = check_tokens("bias", list(bias), self.n_vocab)
        values = [check_bias(f"bias of token {t}", v) for t, v in bias.items()]
        self._change().set_bias(dict(zip(tokens, values, strict=True)))
        return self._configure()

    def set_allowed(self, tokens: Iterable[SupportsIndex]) -> SamplerChain:
        """Only these tokens may be drawn."""
        self._change().set_allowed(check_tokens("tokens", tokens, self.n_vocab))
        return self._configure()

    def set_bad_words(self, words: Iterable[Iterable[SupportsIndex]]) -> SamplerChain:
        """Never draws the last token of one of these words after the others."""
        checked = [check_tokens("tokens", word, self.n_vocab) for word in words]
        if not all(checked):
            raise ValueError("a bad word has no tokens; give at least one")
        self._change().set_bad_words(checked)
        return self._configure()

    def set_min_tokens(self, n: int, ends: Iterable[SupportsIndex]) -> SamplerChain:
        """Draws none of ``ends`` before ``n`` tokens were drawn and accepted."""
        ids = check_tokens("ends", ends, self.n_vocab)
        self._change().set_min_tokens(check_int("n", n, 0, 2**31 - 1), ids)
        return self._configure()

    def set_grammar(self, text: str, root: str = "root") -> SamplerChain:
        """Draws only what a grammar in llama.cpp's GBNF allows, from its rule ``root``. Raises ValueError for bad ones.

        Text that llama.cpp's parser does not survive has to be refused before (``llamapipe.structured``).
        """
        if not text.strip() or "\0" in text:
            raise ValueError("the grammar is empty or has a NUL in it, where llama.cpp would end it")
        before = self._change().copy()
        self._options.set_grammar(text, root)
        if self._lib.lp_sampler_configure(self.handle, self._options.struct) < 0:
            self._options = before
            raise ValueError(f"{last_error(self._native)}; the log llamapipe.native says where")
        return self

    def set_penalties(
        self, last_n: int, repeat: float = 1.0, frequency: float = 0.0, presence: float = 0.0
    ) -> SamplerChain:
        """Penalties on tokens among the last ``last_n`` accepted, as llama.cpp defines them; before other samplers.

        A logit is divided by ``repeat`` when positive and multiplied when not, then lowered by ``presence`` and by
        ``frequency`` for each occurrence.
        """
        return self._add(
            self._lib.LP_SAMPLER_PENALTIES,
            at_front=True,
            repeat_last_n=check_int("last_n", last_n, 0, 2**31 - 1),
            repeat_penalty=check_float("repeat", repeat, 1e-6, 1e6),
            frequency_penalty=check_float("frequency", frequency, -1e6, 1e6),
            presence_penalty=check_float("presence", presence, -1e6, 1e6),
        )

    def set_dry(self, dry: Dry) -> SamplerChain:
        """Lowers the logits of tokens that would lengthen a repetition; before other samplers but penalties."""
        handle, options = dry.handle, self._change()
        penalizes = self._lib.LP_SAMPLER_PENALTIES in options.order
        options.put(self._lib.LP_SAMPLER_DRY, at_front=True)
        if penalizes:  # they stay in front
            order = options.order
            order.insert(0, order.pop(order.index(self._lib.LP_SAMPLER_PENALTIES)))
            options.struct.order[0 : len(order)] = order
        options.struct.dry = handle
        try:
            return self._configure()
        finally:
            options.set_dry(None)  # the chain has its own copy now, and ``dry`` may be freed

    def add_top_k(self, k: int) -> SamplerChain:
        """Keeps the ``k`` largest logits, on ties the lower ids; 0 keeps all. The smallest of several counts."""
        top_k = check_int("k", k, 0, 2**31 - 1)
        before = self._options.struct.top_k
        return self._add(self._lib.LP_SAMPLER_TOP_K, top_k=min(top_k or before, before or top_k))

    def add_typical(self, p: float) -> SamplerChain:
        """Keeps the locally typical tokens of mass ``p`` (arXiv 2202.00666)."""
        return self._add(self._lib.LP_SAMPLER_TYPICAL_P, typical_p=check_float("p", p, 0, 1))

    def add_top_p(self, p: float) -> SamplerChain:
        """Keeps the smallest set of tokens of mass ``p`` (arXiv 1904.09751)."""
        return self._add(self._lib.LP_SAMPLER_TOP_P, top_p=check_float("p", p, 0, 1))

    def add_min_p(self, p: float) -> SamplerChain:
        """Keeps tokens at least ``p`` times as probable as the first."""
        return self._add(self._lib.LP_SAMPLER_MIN_P, min_p=check_float("p", p, 0, 1))

    def add_temperature(self, temperature: float) -> SamplerChain:
        """Divides the logits; 0 makes the chain greedy (largest logit, on ties the lowest id)."""
        divisor = check_float("temperature", temperature, 0, 1e6)
        return self._add(self._lib.LP_SAMPLER_TEMPERATURE, temperature=divisor)

    def set_python(self, processors: Sequence[Processor], guide: Guide | None) -> SamplerChain:
        """Callables that look at rows, and a guide that decides what may follow; it is closed with the chain."""
        if self.guide is not None and self.guide is not guide:
            self.guide.close()
        self._lib.lp_sampler_set_mask(self.handle, self._native.ffi.NULL)
        self._set_processors(processors)
        self.guide = guide
        struct = self._change().struct
        struct.needs_row, struct.has_guide = bool(self.processors), guide is not None
        return self._configure()

    def _set_processors(self, processors: Sequence[Processor]) -> None:
        self.processors = tuple(processors)
        self._with_tokens = tuple(map(takes_tokens, self.processors))
        self.tokens: list[int] = []  # of the sequence, for processors; kept only if one takes them

    @property
    def keeps_tokens(self) -> bool:
        """Whether a processor is called with ``tokens``."""
        return True in self._with_tokens

    def set_logprobs(self, n: int) -> SamplerChain:
        """Every draw notes the log-probability of its token and of the ``n`` most probable ones."""
        self.n_logprobs = check_int("n", n, 0, self.n_vocab)
        self._change().struct.n_logprobs = self.n_logprobs
        return self._configure()

    # ---- use
    is_busy = False  # no other thread works for it
    n_draws = 0

    @property
    def is_native(self) -> bool:
        """Whether a draw needs no Python: no processors and no guide."""
        return not self.processors and self.guide is None

    def logprobs(self) -> tuple[float, list[tuple[int, float]]]:
        """Of the last draw: its token's log-probability in the unchanged row, and the most probable tokens'.

        Raises ValueError if that was not asked for with ``set_logprobs``.
        """
        if self.n_logprobs < 0:
            raise ValueError("log-probabilities were not enabled; call set_logprobs() before sampling")
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
        """Tells the grammar of generated tokens. Raises ValueError where it does not allow them.

        Nothing can be drawn then before ``reset``.
        """
        ids = check_tokens("tokens", tokens, self.n_vocab)
        if self._lib.lp_sampler_accept_grammar(self.handle, len(ids), ids) < 0:
            self._refused()

    def accept_drawn(self, tokens: Iterable[SupportsIndex]) -> None:
        """``accept_grammar`` and ``accept`` of tokens that were drawn, and counts them. Raises ValueError."""
        ids = check_tokens("tokens", tokens, self.n_vocab)
        if self._lib.lp_sampler_accept_drawn(self.handle, len(ids), ids) < 0:
            self._refused()

    def reset(self) -> None:
        """Forgets the accepted tokens; the generator continues."""
        self._checked(self._lib.lp_sampler_reset(self.handle))
        self.tokens = []

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
            if token != NoToken.SAMPLER_FAILED:
                raise _no_token(token)
        assert self.error is not None
        raise self.error

    def draw(self, row: Any) -> int:
        """``sample`` from a native ``float *``, with neither processors nor guide."""
        token = self._draw(row)
        if token < 0:
            raise _no_token(token)
        return token

    def _draw(self, row: Any) -> int:
        """A token, or a NoToken. Raises MemoryError."""
        token = self._native.ffi.new("int32_t *")
        code = self._lib.lp_sampler_draw(self.handle, row, token)
        if code == self._lib.LP_ERROR_MASK:
            return NoToken.NO_ALLOWED_TOKEN
        if code == self._lib.LP_ERROR_LOGITS:
            return NoToken.NO_FINITE_LOGIT
        self._checked(code)
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
        except BaseException as e:
            self.error = _as_exception(e)
            return False
        return True

    def advance_guide(self) -> bool:
        """Computes the mask of the next token; False when it failed, with ``error`` set."""
        if self.guide is None:
            return True
        try:
            self.finished = self.guide.finished
        except BaseException as e:
            self.error = _as_exception(e)
            return False
        return True

    def draw_row(self, logits: npt.NDArray[np.float32]) -> int:
        """Draws from a copy of ``logits`` that the processors have changed. A token, or a NoToken.

        ``NoToken.SAMPLER_FAILED``, with ``error`` set, if a processor fails.
        """
        from_buffer = self._native.ffi.from_buffer
        try:
            row = logits.copy()
            for processor, with_tokens in zip(self.processors, self._with_tokens, strict=True):
                if with_tokens:
                    processor(self.tokens, row)
                else:
                    processor(row)
                if row.shape != logits.shape:
                    raise ValueError(
                        f"a logits processor made the row {row.shape}; it must stay {logits.shape}"
                    )
            token = self._draw(from_buffer("float[]", row))
            if token >= 0 and self.n_logprobs >= 0:  # of the model's row
                self._checked(self._lib.lp_sampler_note(self.handle, from_buffer("float[]", logits), token))
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
                if self.keeps_tokens:
                    self.tokens.append(token)
            except (ValueError, MemoryError) as e:
                self.error = e
                return NoToken.SAMPLER_FAILED
        return token

    def _refused(self) -> NoReturn:
        reason = last_error(self._native)
        raise MemoryError(reason) if "bad_alloc" in reason else ValueError(reason)

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


def _no_token(code: int) -> DecodeError:
    if code == NoToken.NO_ALLOWED_TOKEN:
        return ConstraintError("no token is allowed by what this request asks for")
    return DecodeError("no logit of this row is finite; the model or its weights are damaged")


def _as_exception(error: BaseException) -> Exception:
    """What a request fails with: callers of others must not be told to exit."""
    if isinstance(error, Exception):
        return error
    failure = DecodeError(f"what chooses this request's tokens raised {error!r}")
    failure.__cause__ = error
    return failure


def check_bias(name: str, value: SupportsFloat) -> float:
    """``value`` as what may be added to a logit. Raises TypeError, ValueError naming it."""
    if isinstance(value, float) and value == -math.inf:
        return -math.inf
    try:
        return check_float(name, value, -MAX_BIAS, MAX_BIAS)
    except ValueError as e:
        raise ValueError(f"{e}, or minus infinity to forbid the token") from None
