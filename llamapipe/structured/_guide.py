"""Follows a request through its grammar to find the allowed tokens, and prepares vocabularies for llguidance.

llguidance is an optional dependency. Only this module imports llguidance, when a grammar first needs it. llguidance
reports errors as a state of its matcher. ``Guide`` converts such a state to DecodeError, which fails only one request.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from llamapipe.errors import ConstraintError, DecodeError, EngineClosedError
from llamapipe.host.at_exit import awaited_at_exit
from llamapipe.llama.vocab import Vocab
from llamapipe.native.owner import Owner


def llguidance(field: str) -> Any:
    """Return the llguidance module. Any thread.

    Raises ImportError if llguidance is not installed. The message names ``field``, the option that needs it.
    """
    module = sys.modules.get("llguidance")
    if module is not None:
        return module
    try:
        with awaited_at_exit():
            return import_module("llguidance")
    except ImportError:
        raise ImportError(f'{field} needs llguidance: pip install "llamapipe[structured]"') from None


class GrammarTokenizer:
    """The tokens of a vocabulary as matchers need them, and masks of its end-of-generation tokens.

    llguidance sees one more token than the vocabulary has: an end token with the id ``n_vocab``. Where a grammar allows
    the end token, all end-of-generation tokens of the vocabulary are allowed. So a grammar can end even if the
    vocabulary has no end-of-generation token.

    - ``native``: the ``LLTokenizer``. It refers to the vocabulary weakly, so a cache keyed by vocabularies may hold it.
    - ``eog``: uint32 ``(n_words,)``, the bits of end-of-generation tokens. ``not_eog``: the bits of all other tokens.

    Immutable; any thread. The constructor takes a Python call and a copy per token: 0.6 s for 152,000 tokens.
    """

    def __init__(self, vocab: Vocab, field: str = "a grammar") -> None:
        library = llguidance(field)
        self.n_vocab = vocab.n_vocab
        self.n_words = (vocab.n_vocab + 31) // 32
        tokens, special = token_bytes(vocab)
        end = vocab.n_vocab
        source = self._source = _Source([*tokens, b"<end>"], [*special, end], end, vocab)
        with awaited_at_exit():
            self.native: Any = library.LLTokenizer(library.TokenizerWrapper(source))
        self.eog = _bits(self.n_words, np.fromiter(vocab.eog_tokens, np.int64, len(vocab.eog_tokens)))
        self.not_eog = _bits(self.n_words, np.arange(vocab.n_vocab)) & ~self.eog
        self.eog.flags.writeable = self.not_eog.flags.writeable = False

    def __repr__(self) -> str:
        return f"<GrammarTokenizer n_vocab={self.n_vocab}>"

    def tokens_of(self, text: bytes) -> list[int]:
        """Return the tokens that ``text`` usually has inside a longer text; empty if their bytes would differ."""
        try:
            decoded = text.decode()
        except UnicodeDecodeError:
            return []
        pieces = self._source.tokens
        for before in ("", "\n"):  # some vocabularies put a space before a text's first word
            tokens = self._source(before + decoded)
            n_left = len(text)
            for i in range(len(tokens), 0, -1):
                n_left -= len(pieces[tokens[i - 1]])
                if n_left <= 0:
                    tail = tokens[i - 1 :]
                    if n_left == 0 and b"".join(pieces[token] for token in tail) == text:
                        return tail
                    break
        return []


def token_bytes(vocab: Vocab) -> tuple[list[bytes], list[int]]:
    """Return the bytes of every token, and the ids of special tokens, which never represent text.

    The bytes of a control token are its name, such as ``<|end|>``, with which a Lark grammar can require it.
    End-of-generation tokens are special even if they have text, because such a token inside a string would end the
    request there. Tokens with neither text nor name (unused ids, padding) have no bytes, and no grammar allows them.
    """
    tokens = [vocab.piece(t) for t in range(vocab.n_vocab)]
    special = set(vocab.eog_tokens)
    for t in [t for t, piece in enumerate(tokens) if not piece]:
        tokens[t] = vocab.detokenize([t], unparse_special=True).encode()
        if tokens[t]:
            special.add(t)
    return tokens, sorted(special)


class _Source:
    """The attributes that ``llguidance.TokenizerWrapper`` reads."""

    bos_token_id: int | None = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int, vocab: Vocab) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self._vocab = weakref.ref(vocab)

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of ``text``. For bytes, a TypeError makes llguidance pass valid UTF-8 as a str.

        Masks do not depend on the result, because grammars are compiled with ``no_forcing``.
        """
        if not isinstance(text, str):
            raise TypeError("text must be str")
        vocab = self._vocab()
        return [] if vocab is None else vocab.tokenize(text, add_special=False, parse_special=False)


def _bits(n_words: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    words = np.zeros(n_words, np.uint32)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return words


_MAX_MESSAGE = 2000
# Tokens that a guide accepts between two masks. llguidance bounds the lexer's work between two masks: it refuses tokens
# beyond the bound as if they did not match, and every copy of the matcher then fails.
_MOST_WITHOUT_MASK = 4
_BYTES_A_TOKEN = 16  # of forced text, at most
DEAD_END = (
    "the output does not match the grammar yet, and no token of the vocabulary can extend it to a match"
)


class Guide(Owner):
    """Follows the tokens of one request through its grammar. ``GuideFactory.new`` creates it.

    ``prepare`` does the work of a step: llguidance computes the mask without the GIL, and the rest takes a few
    microseconds. ``mask`` returns the result. Use a guide from one thread at a time; the thread may change.

    End-of-generation tokens are allowed only when the output so far is a complete match of the grammar. If no other
    token is allowed, ``finished`` is true. End the request then, because the vocabulary may have no end-of-generation
    token.
    """

    def __init__(
        self,
        start: Any,
        tokenizer: GrammarTokenizer,
        other: Callable[[], Any] | None = None,
        on_exhausted: Callable[[], object] = int,
    ) -> None:
        """``start``: a matcher at the grammar's beginning, which is copied. ``other``: returns a second such matcher.

        ``on_exhausted`` is called when the lexer, which all copies of a matcher share, reaches its limit. Without
        ``other``, ``forced`` returns no tokens.
        """
        self._start = start
        self._tokenizer = tokenizer
        self._other = other
        self._on_exhausted = on_exhausted
        # Long forced text exhausts a lexer, which all copies share. So a separate matcher finds forced text.
        self._ahead: Any = None
        self._n_ahead = 0  # tokens that `_ahead` has accepted
        # A number of accepted tokens, and the forced tokens after them.
        self._forced: tuple[int, list[int]] = (0, [])
        self._matcher: Any = start.deep_copy()
        n_words = tokenizer.n_words
        # llguidance's own end token is bit n_vocab, which may need one more word.
        self._buffer = np.zeros((tokenizer.n_vocab + 1 + 31) // 32, np.uint32)
        self._words = self._buffer[:n_words]
        self._mask = self._words.view()
        self._mask.flags.writeable = False
        self._n_at_mask = 0  # tokens that had been accepted when the last mask was computed
        self._prepared = False
        self._may_end = False
        self._finished = False
        self._ended = False
        self._tokens: list[int] = []

    def __repr__(self) -> str:
        if self._matcher is None:
            return "<Guide closed>"
        state = " ended" if self._ended else " finished" if self._prepared and self._finished else ""
        return f"<Guide n_tokens={len(self._tokens)}{state}>"

    # ---- the next token
    def prepare(self) -> None:
        """Compute the mask of the next token, unless it has already been computed.

        Raises ConstraintError if the grammar allows no token here or exceeds llguidance's limits.
        """
        matcher = self._open()
        if self._ended:
            raise DecodeError("the output has ended; no token may follow its end-of-generation token")
        if self._prepared:
            return
        self._n_at_mask = len(self._tokens)
        self._buffer.fill(0)
        matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        if matcher.is_error():
            raise self._failure(f"the grammar stopped after {len(self._tokens)} tokens", matcher)
        end = self._tokenizer.n_vocab
        self._may_end = bool(self._buffer[end >> 5] >> np.uint32(end & 31) & np.uint32(1))
        # Drop llguidance's own end token, and end-of-generation tokens that a Lark grammar names.
        np.bitwise_and(self._words, self._tokenizer.not_eog, out=self._words)
        self._finished = not self._words.any()
        if self._finished and not self._may_end:
            raise ConstraintError(f"the grammar stopped after {len(self._tokens)} tokens: {DEAD_END}")
        if self._may_end:
            np.bitwise_or(self._words, self._tokenizer.eog, out=self._words)
        self._prepared = True

    def mask(self) -> npt.NDArray[np.uint32]:
        """Return the tokens allowed next as a mask: uint32 ``(ceil(n_vocab / 32),)``.

        Token ``i`` is at bit ``i % 32`` of word ``i // 32``. Bits from ``n_vocab`` upwards are 0. The result is a
        read-only view of the guide's buffer, valid until the next call of any other method. Raises as ``prepare`` does.
        """
        self.prepare()
        return self._mask

    @property
    def may_end(self) -> bool:
        """True if the output so far is a complete match of the grammar. Raises as ``prepare`` does."""
        if not self._ended:
            self.prepare()
        return self._may_end

    @property
    def finished(self) -> bool:
        """True if only the end of generation may follow, or has been accepted. Raises as ``prepare`` does."""
        if not self._ended:
            self.prepare()
        return self._finished or self._ended

    def accept(self, token: int) -> None:
        """Append a token to the output. If the grammar forbids it, raises DecodeError and changes nothing."""
        matcher = self._open()
        if len(self._tokens) - self._n_at_mask >= _MOST_WITHOUT_MASK:
            self.prepare()
        if 0 <= token < self._tokenizer.n_vocab and not self._ended:
            if bool(self._tokenizer.eog[token >> 5] >> np.uint32(token & 31) & np.uint32(1)):
                # llguidance knows only its own end token. Record this token here, where `rollback` can remove it.
                if self.may_end:
                    self._ended = True
                    return
            elif matcher.try_consume_tokens([token]) == 1:
                self._tokens.append(token)
                self._prepared = False
                return
        if matcher.is_error():
            raise self._failure(f"the grammar failed at token {token}", matcher)
        raise DecodeError(f"the grammar does not allow token {token} after {len(self._tokens)} tokens")

    def _failure(self, what: str, matcher: Any) -> ConstraintError:
        message = message_of(matcher)
        if "lexer error" in message:
            self._on_exhausted()
        return ConstraintError(f"{what}: {message}")

    def accept_any(self) -> None:
        """Accept the first allowed token that does not end generation, if any. Raises DecodeError like ``accept``."""
        (words,) = np.nonzero(self.mask() & self._tokenizer.not_eog)
        if len(words):
            word = int(words[0])
            bits = int(self._mask[word] & self._tokenizer.not_eog[word])
            self.accept(32 * word + (bits & -bits).bit_length() - 1)

    # ---- looking ahead
    def forced(self, n: int) -> list[int]:
        """Return up to ``n`` tokens of the text that begins every continuation. Computes no mask; accepts nothing.

        The text is certain. The tokens are its usual tokens, but ``mask`` also allows other tokens of the same text.
        """
        self._open()
        if self._ended or self._other is None:
            return []
        begin, known = self._forced
        n_said = len(self._tokens) - begin
        if not 0 <= n_said < len(known) or self._tokens[begin:] != known[:n_said]:
            n_said, known = 0, self._compute_forced(4 * n)
            self._forced = len(self._tokens), known
        return known[n_said : n_said + n]

    def _compute_forced(self, n: int) -> list[int]:
        assert self._other is not None
        if self._ahead is None:
            self._ahead, self._n_ahead = self._other().deep_copy(), 0
        new = self._tokens[self._n_ahead :]
        self._n_ahead += len(new)
        if self._ahead.try_consume_tokens(new) != len(new):  # the second lexer has reached a limit
            self._other = self._ahead = None
            return []
        # Use a copy: after computing forced bytes, a matcher accepts no special token in their place.
        forced: bytes = self._ahead.deep_copy().compute_ff_bytes()
        if len(forced) > _BYTES_A_TOKEN * n:  # too long for a step, so keep the first characters
            forced = forced[: _BYTES_A_TOKEN * n].decode(errors="ignore").encode()
        return self._tokenizer.tokens_of(forced)[:n] if forced else []

    def _restart_ahead(self) -> None:
        self._ahead, self._forced = None, (0, [])

    def follow(self, tokens: Sequence[int], n_known: int = 0) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the mask after each of ``tokens`` except the first ``n_known``, up to a token that is not allowed.

        Each mask is a copy, uint32 ``(n_words,)``. A mask of shape ``(0,)`` means that the text is finished. The guide
        itself accepts nothing.
        """
        with self._copied() as ahead:
            for i, token in enumerate(tokens):
                ahead.accept(token)
                if i >= n_known:
                    mask = ahead.mask()
                    yield mask[:0] if ahead.finished else mask.copy()

    def n_allowed(self, tokens: Sequence[int], limit_s: float) -> int:
        """Count how many of ``tokens`` may follow in sequence. Stop after about ``limit_s`` seconds.

        The guide itself accepts nothing. In most grammars, an allowed token takes a few microseconds.
        """
        n, until_s = 0, perf_counter() + limit_s
        with self._copied() as ahead:
            for token in tokens:
                ahead.accept(token)
                n += 1
                if perf_counter() > until_s:
                    break
        return n

    @contextmanager
    def _copied(self) -> Iterator[Guide]:
        """Yield a guide in the same state. A DecodeError ends the block silently; the request will raise it later."""
        ahead = Guide(self._open(), self._tokenizer, on_exhausted=self._on_exhausted)
        with ahead, suppress(DecodeError):
            yield ahead

    # ---- going back
    def rollback(self, n_tokens: int) -> None:
        """Remove the last ``n_tokens`` accepted tokens; an end of generation counts as one.

        Raises ValueError if fewer were accepted, DecodeError if llguidance cannot go back (use ``reset`` then).
        """
        matcher = self._open()
        n_ended = int(self._ended)
        if not 0 <= n_tokens <= len(self._tokens) + n_ended:
            raise ValueError(f"n_tokens is {n_tokens}; {len(self._tokens) + n_ended} were accepted")
        if n_tokens == 0:
            return
        n = n_tokens - n_ended
        if n and not matcher.rollback(n):
            raise DecodeError(f"the grammar cannot go back {n} tokens: {message_of(matcher)}")
        self._ended = False
        del self._tokens[len(self._tokens) - n :]
        self._n_at_mask = min(self._n_at_mask, len(self._tokens))
        self._restart_ahead()
        self._prepared = self._prepared and n == 0

    def reset(self, tokens: Iterable[int] = ()) -> None:
        """Restart the grammar, also after an error, and accept ``tokens``. Raises DecodeError as ``accept`` does."""
        self._open()
        self._matcher = self._start.deep_copy()
        self._tokens.clear()
        self._n_at_mask = 0
        self._restart_ahead()
        self._prepared = self._ended = False
        for token in tokens:
            self.accept(token)

    # ---- lifetime
    def _open(self) -> Any:
        if self._matcher is None:
            raise EngineClosedError("the guide is closed; create another one")
        return self._matcher

    def close(self) -> None:
        """Free the matcher; a second call does nothing. Dropping the last reference frees it as well."""
        self._matcher = self._start = self._ahead = self._other = None


def message_of(matcher: Any) -> str:
    """Return a matcher's error message in llguidance's words, without its internal state."""
    text: str = matcher.get_error()
    for mark in ("\n<state>", "<non-verbose/>", "\n<backtrace>", "\n<grammar>"):
        text = text.partition(mark)[0]
    text = text.strip()
    if text.startswith("panic:"):  # a failed assertion, which says nothing to the caller
        text = f"llguidance failed on this grammar; write simpler schemas or rules ({text})"
    if text.startswith("NoExtension"):  # llguidance's stop reason, where it has no message
        return DEAD_END
    if len(text) > _MAX_MESSAGE:  # messages may quote a whole line of the grammar, so cut out the middle
        text = f"{text[: _MAX_MESSAGE // 2]} ... {text[-_MAX_MESSAGE // 2 :]}"
    return text or "llguidance gives no reason"
