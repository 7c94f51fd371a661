"""A sampler chain. Open this file to change how a row of logits becomes one token."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsIndex

import numpy as np

from llamapipe.arguments import check_int, check_tokens
from llamapipe.errors import ConstraintError, DecodeError, EngineClosedError, NoToken
from llamapipe.llama.sampling_options import SamplingOptions
from llamapipe.llama.vocab import Vocab
from llamapipe.native.load import last_error, native
from llamapipe.native.owner import Owner

if TYPE_CHECKING:
    import numpy.typing as npt

# Called with a row of logits, or with the sequence's tokens and the row (``takes_tokens``).
Processor = Callable[..., object]


def takes_tokens(processor: Processor) -> bool:
    """Return whether a processor also takes the tokens: it has two positional parameters without defaults."""
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not say
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters) == 2


class Guide(Protocol):
    """Decides which token may come next, in place of llama.cpp."""

    def mask(self) -> npt.NDArray[np.uint32]:
        """Return a bit mask of the tokens that may follow; ``(ceil(n_vocab / 32),)``, valid until ``accept``."""

    @property
    def finished(self) -> bool:
        """Whether only an end of generation may follow."""

    def accept(self, token: int) -> None:
        """Accept the next token."""

    def forced(self, n: int) -> list[int]:
        """Return at most ``n`` tokens of text that must follow."""

    def follow(self, tokens: Sequence[int], n_known: int = 0) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield a mask after each token but the first, up to one that may not follow; an empty array allows nothing."""

    def n_allowed(self, tokens: Sequence[int], limit_s: float) -> int:
        """Return how many of these tokens may follow in sequence, as far as can be computed in this time."""

    def reset(self, tokens: Sequence[int]) -> None:
        """Start again after these tokens. Raises DecodeError if they are not allowed."""

    def close(self) -> None:
        """Free its resources."""


class SamplerChain(Owner):
    """Turns logits into tokens for one request: bias and penalties, then samplers in their order, then the draw.

    ``seed`` (0 to 2**64 - 1) starts this chain's generator, which gives each draw one uniform number. ``options``: a
    request's options, checked by the caller. ``processors``: callables that change rows. ``guide``: decides what may
    follow, and is closed with the chain. ``is_native``: draws need no Python, because there is no processor and no
    guide. Not thread-safe; the vocabulary's model must stay open. Close the chain, or use ``with``.

    Raises TypeError and ValueError for bad arguments here and in every method, ValueError for a bad grammar.
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
        self._set_python(processors, guide)
        self.error: Exception | None = None  # why the last draw failed, if not because of the row
        self.finished = False  # nothing may follow the tokens accepted so far
        self._vocab = vocab  # keeps what the native chain points to
        self.n_vocab = vocab.n_vocab
        self.seed = check_int("seed", seed, 0, 2**64 - 1)
        self._options = SamplingOptions() if options is None else options
        self.n_logprobs: int = self._options.struct.n_logprobs
        self.has_grammar = self._options.struct.grammar != self._native.ffi.NULL
        handle = self._lib.lp_sampler_new(vocab.handle, self.seed, self._options.struct)
        if handle == self._native.ffi.NULL:
            self._refuse("; the log llamapipe.native says where")
        self._handle = handle

    def __repr__(self) -> str:
        return f"<SamplerChain seed={self.seed}{' closed' if self._handle is None else ''}>"

    def _set_python(self, processors: Sequence[Processor], guide: Guide | None) -> None:
        self.processors = tuple(processors)
        self.guide = guide
        self.is_native = not self.processors and guide is None
        self._with_tokens = tuple(map(takes_tokens, self.processors))
        self.tokens: list[int] = []  # of the sequence, for processors; kept only if one takes them

    @property
    def keeps_tokens(self) -> bool:
        """Whether a processor is called with ``tokens``."""
        return True in self._with_tokens

    # ---- guesses of what follows
    def watch(self, predicted: Sequence[int], text: Sequence[int], own: bool) -> None:
        """Start guessing the tokens that follow ``text``, from ``predicted`` and, if ``own``, from the text itself."""
        predicted, text = list(predicted), list(text)
        self._check(self._lib.lp_sampler_watch(self.handle, len(predicted), predicted, len(text), text, own))

    def expect(self, tokens: Sequence[int]) -> int:
        """Prepare nothing for rows after guessed tokens, and allow all of them."""
        return len(tokens)

    def guess(self, n: int) -> tuple[list[int], float]:
        """Return at most ``n`` guessed tokens, and the fraction of such guesses that were right."""
        ffi = self._native.ffi
        tokens, share = ffi.new("int32_t[]", n), ffi.new("double *")
        n_tokens = self._lib.lp_sampler_guess(self.handle, n, tokens, share)
        return ffi.unpack(tokens, n_tokens), share[0]

    def n_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the options' grammar allows in sequence, without accepting any."""
        code: int = self._lib.lp_sampler_n_allowed(self.handle, len(tokens), list(tokens))
        self._check(code)
        return code

    # ---- use
    is_busy = False  # no other thread works for it
    n_draws = 0
    is_forced = False

    def logprobs(self, i: int = 0) -> tuple[float, list[tuple[int, float]]]:
        """Return the log-probability of the last draw's token in the unchanged row, and the most probable tokens'.

        ``i``: the index among tokens that were drawn together after right guesses. Raises ValueError if the options do
        not ask for log-probabilities.
        """
        if self.n_logprobs < 0:
            raise ValueError("log-probabilities were not enabled; give n_logprobs in the options")
        ffi = self._native.ffi
        logprob = ffi.new("float *")
        ids, values = ffi.new("int32_t[]", self.n_logprobs), ffi.new("float[]", self.n_logprobs)
        n = self._lib.lp_sampler_logprobs(self.handle, i, self.n_logprobs, logprob, ids, values)
        return logprob[0], list(zip(ffi.unpack(ids, n), ffi.unpack(values, n), strict=True))

    def accept(self, tokens: Iterable[SupportsIndex]) -> None:
        """Show the sequence's tokens to penalties, DRY and bad words; ``sample`` does not do this."""
        ids = check_tokens("tokens", tokens, self.n_vocab)
        self._check(self._lib.lp_sampler_accept(self.handle, len(ids), ids))

    def accept_grammar(self, tokens: Iterable[SupportsIndex]) -> None:
        """Advance the grammar by generated tokens. Raises ValueError if it does not allow them.

        After an error, nothing can be drawn before ``reset``.
        """
        ids = check_tokens("tokens", tokens, self.n_vocab)
        if self._lib.lp_sampler_accept_grammar(self.handle, len(ids), ids) < 0:
            self._refuse()

    def accept_reasoning(self, tokens: Iterable[SupportsIndex]) -> None:
        """Count the answer's tokens so far towards the limit of reasoning."""
        ids = check_tokens("tokens", tokens, self.n_vocab)
        self._check(self._lib.lp_sampler_accept_reasoning(self.handle, len(ids), ids))

    def accept_drawn(self, tokens: Iterable[SupportsIndex]) -> None:
        """Accept drawn tokens for penalties, grammar and reasoning, and count them. Raises ValueError."""
        ids = check_tokens("tokens", tokens, self.n_vocab)
        if self._lib.lp_sampler_accept_drawn(self.handle, len(ids), ids) < 0:
            self._refuse()

    def reset(self) -> None:
        """Forget the accepted tokens; the generator continues."""
        self._check(self._lib.lp_sampler_reset(self.handle))
        self.tokens = []

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Draw a token from logits, float32 ``(n_vocab,)``; do not accept it.

        Raises TypeError and ValueError for a wrong array, DecodeError if no logit is finite.
        """
        array = np.asarray(logits)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"logits must be numbers (float32), not {array.dtype}")
        row = np.ascontiguousarray(array, dtype=np.float32)
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
        """Draw as ``sample`` does from a native ``float *``, without processors or a guide."""
        token = self._draw(row)
        if token < 0:
            raise _no_token(token)
        return token

    def _draw(self, row: Any) -> int:
        """Draw a token, or a NoToken. Raises MemoryError."""
        token = self._native.ffi.new("int32_t *")
        code = self._lib.lp_sampler_draw(self.handle, row, token)
        if code == self._lib.LP_ERROR_MASK:
            return NoToken.NO_ALLOWED_TOKEN
        if code == self._lib.LP_ERROR_LOGITS:
            return NoToken.NO_FINITE_LOGIT
        self._check(code)
        return int(token[0])

    def ask_guide(self) -> bool:
        """Take the guide's mask for the next draw, if there is a guide; False when it failed, with ``error`` set."""

        def take_mask(guide: Guide) -> None:
            mask = guide.mask()
            if mask.dtype != np.uint32 or mask.size < -(-self.n_vocab // 32):
                raise ValueError(f"the mask is {mask.dtype} {mask.shape}; it must have a bit for each token")
            self.show_mask(mask)

        return self._use_guide(take_mask)

    def _use_guide(self, use: Callable[[Guide], object]) -> bool:
        try:
            if self.guide is not None:
                use(self.guide)
        except BaseException as e:
            self.error = _as_exception(e)
            return False
        return True

    def show_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        """Allow the next draw only tokens whose bits are set."""
        self._mask = mask  # the native chain looks into it
        self._lib.lp_sampler_set_mask(self.handle, self._native.ffi.from_buffer("uint32_t[]", mask))

    def tell_guide(self, token: int) -> bool:
        """Pass the drawn token to the guide; False if it failed, with ``error`` set."""
        return self._use_guide(lambda guide: guide.accept(token))

    def advance_guide(self) -> bool:
        """Compute the mask of the next token; False when it failed, with ``error`` set."""

        def note_end(guide: Guide) -> None:
            self.finished = guide.finished

        return self._use_guide(note_end)

    def draw_row(self, logits: npt.NDArray[np.float32]) -> int:
        """Let the processors change a copy of ``logits``, and draw from it. Return a token or a NoToken.

        If a processor fails, return ``NoToken.SAMPLER_FAILED`` and set ``error``.
        """
        from_buffer = self._native.ffi.from_buffer
        try:
            row = logits.copy()
            for processor, with_tokens in zip(self.processors, self._with_tokens, strict=True):
                result = processor(self.tokens, row) if with_tokens else processor(row)
                if isinstance(result, np.ndarray) and not np.may_share_memory(result, row):
                    raise ValueError(
                        "a logits processor returned another array, which is not used; change the row in place: "
                        "row[:] = …"
                    )
                if row.shape != logits.shape:
                    raise ValueError(
                        f"a logits processor made the row {row.shape}; it must stay {logits.shape}"
                    )
            token = self._draw(from_buffer("float[]", row))
            if token >= 0 and self.n_logprobs >= 0:  # of the model's row
                self._check(self._lib.lp_sampler_note(self.handle, from_buffer("float[]", logits), token))
            return token
        except BaseException as e:  # also SystemExit: it is one request's, not the engine's
            self.error = _as_exception(e)
            return NoToken.SAMPLER_FAILED

    def draw_processed(self, logits: npt.NDArray[np.float32]) -> int:
        """Draw as ``draw_row`` does, and accept the token."""
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

    def _refuse(self, more: str = "") -> NoReturn:
        reason = last_error(self._native)
        raise MemoryError(reason) if "bad_alloc" in reason else ValueError(f"{reason}{more}")

    def _check(self, code: int) -> None:
        if code < 0:
            raise MemoryError(last_error(self._native))

    # ---- lifetime
    @property
    def handle(self) -> Any:
        """The native ``lp_sampler *``. Raises EngineClosedError when closed."""
        if self._handle is None:
            raise EngineClosedError("the sampler chain is closed; create another")
        return self._handle

    def close(self) -> None:
        """Free the native memory; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._lib.lp_sampler_free(handle)
            if self.guide is not None:
                self.guide.close()

    def _is_left_open(self) -> bool:
        return getattr(self, "_handle", None) is not None and self._pid == os.getpid()


def _no_token(code: int) -> DecodeError:
    if code == NoToken.NO_ALLOWED_TOKEN:
        return ConstraintError("no token is allowed by what this request asks for")
    return DecodeError("no logit of this row is finite; the model or its weights are damaged")


def _as_exception(error: BaseException) -> Exception:
    """Return the exception that fails the request: a SystemExit must not reach the callers of other requests."""
    if isinstance(error, Exception):
        return error
    failure = DecodeError(f"what chooses this request's tokens raised {error!r}")
    failure.__cause__ = error
    return failure
