"""Wraps a model's vocabulary: converts text to token ids and back.

A vocabulary belongs to its model and is freed with it. Ids and text are checked here, before llama.cpp sees them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, SupportsIndex

from llamapipe.arguments import check_flag, check_int, check_tokens
from llamapipe.chat.control_text import SpecialToken
from llamapipe.errors import EngineClosedError, InvalidRequestError
from llamapipe.host.at_exit import awaited_at_exit
from llamapipe.native.load import last_error, native
from llamapipe.native.not_copyable import NotCopyable
from llamapipe.text.word_piece import WordPiece

_CHUNK = 512  # pieces fetched per native call
_INT32_MIN = -(2**31)
_MAX_TEXT_BYTES = 2**30
_UNKNOWN_IN_BERT = 100  # the unknown token's id if the file has none, as in llama.cpp
_PART = 2**11  # characters in a part of a long text
_LONG_BYTES = 2**12  # the interpreter's exit waits for the tokenizing of longer texts


class FimTokens(NamedTuple):
    """The tokens that mark a prefix, a suffix, and the gap between them that the model fills.

    ``repository``, ``file``: the tokens before the name of a project and the name of each file; None if the vocabulary
    lacks them.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None


class Vocab(NotCopyable):
    """The tokens of a loaded model: tokenizing, detokenizing, special tokens.

    ``n_vocab``: number of tokens; ids are 0 to ``n_vocab - 1``. ``bos``, ``eos``, ``eot``, ``sep``: ids, or None.
    ``add_bos``: the model wants a BOS before a text; ``add_eos``, ``add_sep``: it wants an EOS or SEP after it.
    ``eog_tokens``: ids that end generation. ``fim_tokens``: the tokens for filling in the middle; None if the model has
    none.

    Any thread, until the model is closed. After that, methods other than ``is_eog`` raise EngineClosedError; the
    attributes stay.
    """

    def __init__(self, handle: Any, metadata: Callable[[], Mapping[str, str]] = dict) -> None:
        """``metadata``: returns the metadata of the model's file; only called if the kind of vocabulary needs it."""
        self._native = native()
        lib = self._native.lib
        self._handle: Any = handle
        self._pieces: dict[int, list[bytes]] = {}  # by token // _CHUNK
        usual = (lib.LLAMA_VOCAB_TYPE_NONE, lib.LLAMA_VOCAB_TYPE_SPM, lib.LLAMA_VOCAB_TYPE_BPE)
        texts = {} if lib.llama_vocab_type(handle) in usual else metadata()
        self._is_spm = lib.llama_vocab_type(handle) == lib.LLAMA_VOCAB_TYPE_SPM
        self._is_bert = texts.get("tokenizer.ggml.model") == "bert"
        self._unknown = int(texts.get("tokenizer.ggml.unknown_token_id", _UNKNOWN_IN_BERT))
        self._lowercase = texts.get("tokenizer.ggml.normalizer.lowercase", "true") == "true"
        strips = texts.get("tokenizer.ggml.normalizer.strip_accents")
        self._strips_accents = self._lowercase if strips is None else strips == "true"
        self.n_vocab: int = lib.llama_vocab_n_tokens(handle)
        self.bos: int | None = self._optional(lib.llama_vocab_bos(handle))
        self.eos: int | None = self._optional(lib.llama_vocab_eos(handle))
        self.eot: int | None = self._optional(lib.llama_vocab_eot(handle))
        self.add_bos: bool = lib.llama_vocab_get_add_bos(handle)
        self.sep: int | None = self._optional(lib.llama_vocab_sep(handle))
        self.add_eos: bool = lib.llama_vocab_get_add_eos(handle)
        self.add_sep: bool = lib.llama_vocab_get_add_sep(handle)
        fim = (
            lib.llama_vocab_fim_pre(handle),
            lib.llama_vocab_fim_suf(handle),
            lib.llama_vocab_fim_mid(handle),
        )
        self.fim_tokens: FimTokens | None = None
        if min(fim) >= 0:
            more = lib.llama_vocab_fim_rep(handle), lib.llama_vocab_fim_sep(handle)
            self.fim_tokens = FimTokens(*fim, *map(self._optional, more))
        self._written: dict[int, bytes] = {}
        self._longest: int | None = None  # bytes of the longest token; 0: no limit is known
        self.eog_tokens: frozenset[int] = frozenset(
            t for t in range(self.n_vocab) if lib.llama_vocab_is_eog(handle, t)
        )

    def __repr__(self) -> str:
        return f"<Vocab n_vocab={self.n_vocab} bos={self.bos} eos={self.eos}>"

    def _optional(self, token: int) -> int | None:
        return token if 0 <= token < self.n_vocab else None

    @property
    def handle(self) -> Any:
        """The native ``llama_vocab *``. Raises EngineClosedError if the model is closed."""
        if self._handle is None:
            raise EngineClosedError("the vocabulary's model is closed; load it again")
        return self._handle

    def forget(self) -> None:
        """Drop the native handle; the model calls this before it frees the vocabulary."""
        self._handle = None
        self._pieces.clear()

    def is_eog(self, token: SupportsIndex) -> bool:
        """Return whether the token ends generation (EOS, EOT and similar tokens)."""
        return check_int("token", token, 0, self.n_vocab - 1) in self.eog_tokens

    def special_tokens(self) -> list[SpecialToken]:
        """Return the tokens whose names, such as ``<|im_end|>``, are matched in a text before it is tokenized."""
        lib, handle = self._native.lib, self.handle
        control = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        special = control | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        tokens = []
        for token in range(self.n_vocab):
            attr = lib.llama_vocab_get_attr(handle, token)
            if attr & special:
                left, right = attr & lib.LLAMA_TOKEN_ATTR_LSTRIP, attr & lib.LLAMA_TOKEN_ATTR_RSTRIP
                text = self._native.ffi.string(lib.llama_vocab_get_text(handle, token)).decode(
                    errors="replace"
                )
                tokens.append(SpecialToken(text, token, bool(attr & control), bool(left), bool(right)))
        return tokens

    def is_control(self, token: SupportsIndex) -> bool:
        """Return whether the token is a control token, which has no text."""
        return bool(
            self._native.lib.llama_vocab_is_control(
                self.handle, check_int("token", token, 0, self.n_vocab - 1)
            )
        )

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of ``text``.

        ``add_special`` adds the special tokens that the model expects (BOS), but no second BOS if the text already
        begins with one. ``parse_special`` turns the names of control tokens in the text into these tokens; leave it
        off for untrusted text.

        Raises TypeError if ``text`` is not a str, ValueError for lone surrogates and for text over 1 GiB,
        InvalidRequestError for text that the vocabulary cannot express.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be str, not {type(text).__name__}")
        with_special, parse = (
            check_flag("add_special", add_special),
            check_flag("parse_special", parse_special),
        )
        try:
            data = text.encode()
        except UnicodeEncodeError as e:
            raise ValueError(
                f"text has a lone surrogate at {e.start}, which UTF-8 cannot express; decode it properly first"
            ) from None
        if len(data) > _MAX_TEXT_BYTES:
            raise ValueError(f"text has {len(data)} bytes; the limit is {_MAX_TEXT_BYTES}: split it")
        if self._is_bert and self._word_piece is not None and not parse:
            self.handle  # noqa: B018  (raises when the model is closed)
            before, after = self._around if with_special else ((), ())
            return [*before, *self._word_piece.tokenize(text), *after]
        parts = list(self._parts(text)) if self._is_spm and len(text) > _PART else [text]
        if len(parts) == 1:
            return self._tokenize(data, with_special, parse)
        return self._tokenize_parts(parts, with_special, parse)

    def _parts(self, text: str) -> Iterator[str]:
        """Split a text for llama.cpp's SPM tokenizer, whose time is quadratic in the number of unknown characters.

        With the bundled model, 250,000 emoji took 24 s. A text is cut only before characters that occur in tokens only
        at the beginning or not at all. So no token spans a cut, and the parts have the same tokens as the whole text.
        """
        start = 0
        while (cut := self._cuts.search(text, start + _PART)) is not None:
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    @cached_property
    def _cuts(self) -> re.Pattern[str]:
        """The places where a text can be cut: before a character that occurs in tokens only first or not at all.

        A text is not cut after a control token or white space, because llama.cpp may add a space there.
        """
        lib, handle, string = self._native.lib, self.handle, self._native.ffi.string
        inside: set[str] = set()
        for token in range(self.n_vocab):
            inside.update(string(lib.llama_vocab_get_text(handle, token)).decode(errors="replace")[1:])
        ends = {token.text[-1:] for token in self.special_tokens()}
        after, never = (re.escape("".join(sorted(characters))) for characters in (ends, inside))
        return re.compile(f"(?<![\\s{after}])[^\\s{never}]")

    def _tokenize_parts(self, parts: list[str], with_special: bool, parse: bool) -> list[int]:
        """Return the tokens of a text in parts, without the space that llama.cpp may add before each."""
        single, double = (self._tokenize((n * parts[1][0]).encode(), False, False) for n in (1, 2))
        n_before = 2 * len(single) - len(double)
        tokens = self._tokenize(parts[0].encode(), False, parse)
        for part in parts[1:]:
            tokens += self._tokenize(part.encode(), False, parse)[n_before:]
        if not with_special:
            return tokens
        before, after = self._around
        if tokens[: len(before)] == before == [self.bos]:
            before = []
        return [*before, *tokens, *after]

    def _tokenize(self, data: bytes, with_special: bool, parse: bool) -> list[int]:
        """Return the tokens that llama.cpp makes."""
        ffi, lib = self._native.ffi, self._native.lib
        n_max = len(data) + 8
        with awaited_at_exit() if len(data) > _LONG_BYTES else nullcontext():
            ids = ffi.new("int32_t[]", n_max)
            n = lib.lp_tokenize(self.handle, data, len(data), ids, n_max, with_special, parse)
            if _INT32_MIN < n < 0:
                n_max = -n
                ids = ffi.new("int32_t[]", n_max)
                n = lib.lp_tokenize(self.handle, data, len(data), ids, n_max, with_special, parse)
        if n < 0:
            reason = last_error(self._native)
            if "bad_alloc" in reason:
                raise MemoryError(f"no memory is left to tokenize {len(data)} bytes")
            raise InvalidRequestError(f"the vocabulary cannot express this text ({reason})")
        tokens: list[int] = ffi.unpack(ids, n) if n else []
        if with_special and self.add_bos and n > 1 and tokens[0] == tokens[1] == self.bos:
            del tokens[0]
        return tokens

    @cached_property
    def _word_piece(self) -> WordPiece | None:
        """The tokenizer of a BERT vocabulary; None if some of its tokens are matched in a text before it is split."""
        lib, handle = self._native.lib, self.handle
        pieces: dict[str, int] = {}
        for token in range(self.n_vocab):
            attr = lib.llama_vocab_get_attr(handle, token)
            if attr & lib.LLAMA_TOKEN_ATTR_USER_DEFINED:
                return None
            if not attr & (lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN):
                text = self._native.ffi.string(lib.llama_vocab_get_text(handle, token))
                pieces.setdefault(text.decode(errors="replace"), token)
        return WordPiece(pieces, self._unknown, self._lowercase, self._strips_accents)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        plain, whole = self._tokenize(b"a", False, False), self._tokenize(b"a", True, False)
        start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]

    def least_tokens(self, n_characters: int) -> int:
        """Return the fewest tokens that a text of this many characters can have, to refuse long texts untokenized.

        The result is 0 for vocabularies that can express any number of characters with one token, such as an unknown
        word.
        """
        if self._longest is None:
            lib = self._native.lib
            bounded = (lib.LLAMA_VOCAB_TYPE_SPM, lib.LLAMA_VOCAB_TYPE_BPE)
            if lib.llama_vocab_type(self.handle) in bounded:
                special = (len(token.text.encode()) for token in self.special_tokens())
                self._longest = max(*map(len, map(self.piece, range(self.n_vocab))), *special, 1)
            else:
                self._longest = 0
        return -(-n_characters // self._longest) if self._longest else 0

    def detokenize(
        self, ids: Iterable[SupportsIndex], remove_special: bool = False, unparse_special: bool = False
    ) -> str:
        """Return the text of a sequence of token ids; bytes that are not valid UTF-8 become U+FFFD.

        ``remove_special`` drops the special tokens that ``add_special`` adds. ``unparse_special`` writes control tokens
        by name. Raises TypeError or ValueError for wrong ids.
        """
        tokens = check_tokens("ids", ids, self.n_vocab)
        without = check_flag("remove_special", remove_special)
        unparse = check_flag("unparse_special", unparse_special)
        if not tokens:
            return ""
        ffi, lib = self._native.ffi, self._native.lib
        n_max = 16 * len(tokens) + 64
        for _ in range(2):
            text = ffi.new("char[]", n_max)
            n = lib.lp_detokenize(self.handle, tokens, len(tokens), text, n_max, without, unparse)
            if n >= 0:
                return bytes(ffi.buffer(text, n)).decode("utf-8", "replace")
            if n == _INT32_MIN:
                break
            n_max = -n
        raise InvalidRequestError(f"these ids cannot be written as text ({last_error(self._native)})")

    def piece(self, token: SupportsIndex) -> bytes:
        """Return the bytes of a token, which may split a UTF-8 character. Control tokens have none."""
        if type(token) is not int or not 0 <= token < self.n_vocab:
            token = check_int("token", token, 0, self.n_vocab - 1)
        # Pieces are fetched in chunks: each native call releases the GIL, and the engine thread must then wait for it.
        chunk = self._pieces.get(token // _CHUNK)
        if chunk is None:
            first = token - token % _CHUNK
            chunk = self._read_pieces(first, min(_CHUNK, self.n_vocab - first))
            if chunk is None:
                return self._only_piece(token)
            self._pieces[token // _CHUNK] = chunk
        return chunk[token % _CHUNK]

    def written_piece(self, token: SupportsIndex) -> bytes:
        """Return the bytes of a token; for a control token, the bytes of its name, such as ``<|im_end|>``."""
        piece = self.piece(token)
        if piece:
            return piece
        number = int(token)
        written = self._written.get(number)
        if written is None:
            written = self._written[number] = self.detokenize([number], unparse_special=True).encode()
        return written

    def _only_piece(self, token: int) -> bytes:
        """Return the piece of one token, read alone because another token of its chunk has no piece."""
        pieces = self._read_pieces(token, 1)
        if pieces is None:
            raise InvalidRequestError(f"the token {token} has no piece ({last_error(self._native)})")
        return pieces[0]

    def _read_pieces(self, first: int, n: int) -> list[bytes] | None:
        """Return the pieces of ``n`` tokens from ``first``; None if llama.cpp fails for one of them."""
        ffi, lib = self._native.ffi, self._native.lib
        ends = ffi.new("int32_t[]", n)
        n_max = 16 * n
        for _ in range(2):
            data = ffi.new("char[]", n_max)
            size = lib.lp_pieces(self.handle, first, n, data, n_max, ends)
            if size >= 0:
                text = bytes(ffi.buffer(data, size))
                bounds = [0, *ffi.unpack(ends, n)]
                return [text[a:b] for a, b in pairwise(bounds)]
            if size == _INT32_MIN:
                break
            n_max = -size
        return None
