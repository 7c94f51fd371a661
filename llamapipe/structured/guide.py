"""The state of one request in its grammar: which tokens may come next."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from llamapipe.errors import DecodeError, EngineClosedError
from llamapipe.structured.tokenizer import GrammarTokenizer

_MAX_MESSAGE = 2000
_DEAD_END = "no token of this vocabulary continues the text, which is not a whole one of the grammar yet"


class Guide:
    """Follows the tokens of one request through its grammar; made by ``GuideFactory.new``.

    One thread at a time, though not always the same one. ``prepare`` does the work of a step, all but a few
    microseconds of it without the GIL (llguidance gives it up while it computes a mask); ``mask`` returns the result.

    An end-of-generation token is allowed exactly where the text so far is a whole one of the grammar. Where nothing
    else is, ``finished`` is true: end the request then. A vocabulary without end-of-generation tokens needs that.
    """

    def __init__(self, start: Any, tokenizer: GrammarTokenizer) -> None:
        """``start``: a matcher at the grammar's beginning, which is copied."""
        self._start = start
        self._tokenizer = tokenizer
        self._matcher: Any = start.deep_copy()
        n_words = tokenizer.n_words
        # llguidance's own end is one bit behind the vocabulary, which may need a word more.
        self._buffer = np.zeros((tokenizer.n_vocab + 1 + 31) // 32, np.uint32)
        self._words = self._buffer[:n_words]
        self._scratch = np.empty(n_words, np.uint32)
        self._mask = self._words.view()
        self._mask.flags.writeable = False
        self._prepared = False
        self._may_end = False
        self._finished = False
        self._ended = False
        self._n_tokens = 0

    def __repr__(self) -> str:
        if self._matcher is None:
            return "<Guide closed>"
        state = " ended" if self._ended else " finished" if self._prepared and self._finished else ""
        return f"<Guide n_tokens={self._n_tokens}{state}>"

    # ---- the next token
    def prepare(self) -> None:
        """Computes the mask of the next token; does nothing when it is there.

        Raises DecodeError, for this request only: the grammar allows no token here, or grew beyond llguidance's limits.
        """
        matcher = self._open()
        if self._ended:
            raise DecodeError("the grammar's text has ended; no token may follow its end of generation")
        if self._prepared:
            return
        self._buffer.fill(0)
        matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        if matcher.is_error():
            raise DecodeError(
                f"the grammar cannot go on after {self._n_tokens} tokens: {message_of(matcher)}"
            )
        end = self._tokenizer.n_vocab
        self._may_end = bool(self._buffer[end >> 5] >> np.uint32(end & 31) & np.uint32(1))
        # Also drops llguidance's own end, and end-of-generation tokens that a Lark grammar asked for by name.
        np.bitwise_and(self._words, self._tokenizer.not_eog, out=self._words)
        self._finished = not self._words.any()
        if self._finished and not self._may_end:
            raise DecodeError(f"the grammar cannot go on after {self._n_tokens} tokens: {_DEAD_END}")
        if self._may_end:
            np.bitwise_or(self._words, self._tokenizer.eog, out=self._words)
        self._prepared = True

    def mask(self) -> npt.NDArray[np.uint32]:
        """The tokens allowed next: uint32 ``(ceil(n_vocab / 32),)``, token ``i`` at bit ``i % 32`` of word ``i // 32``.

        A read-only view of the guide's only buffer: good until the next call of anything but ``mask``. Bits from
        ``n_vocab`` on are 0. Raises as ``prepare`` does.
        """
        self.prepare()
        return self._mask

    @property
    def may_end(self) -> bool:
        """Whether the text so far is a whole one of the grammar. Raises as ``prepare`` does."""
        if not self._ended:
            self.prepare()
        return self._may_end

    @property
    def finished(self) -> bool:
        """Whether nothing but the end of generation may follow. Raises as ``prepare`` does."""
        if not self._ended:
            self.prepare()
        return self._finished or self._ended

    def accept(self, token: int) -> None:
        """The token that was chosen. Raises DecodeError, and changes nothing, when the grammar does not allow it."""
        matcher = self._open()
        if 0 <= token < self._tokenizer.n_vocab and not self._ended:
            if bool(self._tokenizer.eog[token >> 5] >> np.uint32(token & 31) & np.uint32(1)):
                # llguidance never sees it: what it knows is its own end, and a trimmed text simply goes on.
                if self.may_end:
                    self._ended = True
                    return
            elif matcher.try_consume_tokens([token]) == 1:
                self._n_tokens += 1
                self._prepared = False
                return
        if matcher.is_error():
            raise DecodeError(f"the grammar failed at token {token}: {message_of(matcher)}")
        raise DecodeError(f"the grammar does not allow token {token} after {self._n_tokens} tokens")

    def accept_any(self) -> None:
        """Accepts the first token that is allowed, if it is text. Raises DecodeError as ``accept`` does."""
        (words,) = np.nonzero(self.mask() & self._tokenizer.not_eog)
        if len(words):
            word = int(words[0])
            bits = int(self._mask[word] & self._tokenizer.not_eog[word])
            self.accept(32 * word + (bits & -bits).bit_length() - 1)

    # ---- going back
    def rollback(self, n_tokens: int) -> None:
        """Takes back the last ``n_tokens`` accepted; an end of generation counts as one.

        Raises ValueError for more than there are, DecodeError when llguidance cannot (then use ``reset``).
        """
        matcher = self._open()
        n_ended = int(self._ended)
        if not 0 <= n_tokens <= self._n_tokens + n_ended:
            raise ValueError(f"n_tokens is {n_tokens}; {self._n_tokens + n_ended} were accepted")
        if n_tokens == 0:
            return
        n = n_tokens - n_ended
        if n and not matcher.rollback(n):
            raise DecodeError(f"the grammar cannot go back {n} tokens: {message_of(matcher)}")
        self._ended = False
        self._n_tokens -= n
        self._prepared = self._prepared and n == 0

    def reset(self, tokens: Iterable[int] = ()) -> None:
        """Starts again and accepts ``tokens``; also out of an error. Raises DecodeError as ``accept`` does."""
        self._open()
        self._matcher = self._start.deep_copy()
        self._n_tokens = 0
        self._prepared = self._ended = False
        for token in tokens:
            self.accept(token)

    # ---- lifetime
    def _open(self) -> Any:
        if self._matcher is None:
            raise EngineClosedError("the guide is closed; make another")
        return self._matcher

    def close(self) -> None:
        """Lets the matcher go; a second call does nothing. Plain memory: a guide that is dropped frees it, too."""
        self._matcher = self._start = None

    def __enter__(self) -> Guide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def message_of(matcher: Any) -> str:
    """What went wrong in a matcher, in llguidance's words, without its internal state."""
    text: str = matcher.get_error()
    for mark in ("\n<state>", "<non-verbose/>", "\n<backtrace>", "\n<grammar>"):
        text = text.partition(mark)[0]
    text = text.strip()
    if text.startswith("NoExtension"):  # llguidance's reason for having stopped, where it has no message
        return _DEAD_END
    if len(text) > _MAX_MESSAGE:  # a message quotes the grammar's line, however long it is
        text = f"{text[: _MAX_MESSAGE // 2]} ... {text[-_MAX_MESSAGE // 2 :]}"
    return text or "llguidance gives no reason"
