"""Checks a GGUF file's vocabulary before llama.cpp reads it.

Each rule refuses a vocabulary on which llama.cpp (``llama-vocab.cpp``) would abort, loop forever or read outside its
buffers. Problems that llama.cpp reports or tolerates itself are mostly left to it.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from llamapipe.gguf._shapes import text
from llamapipe.gguf.reader import F32, I32, STRING, U32, Array, Damage, Entry, Head

_PREFIX: Final = "tokenizer.ggml."
_BYTE: Final = 6
_BYTE_PIECE: Final = re.compile(rb"<0x[0-9A-Fa-f]{2}>")
_BPE: Final = ("gpt2", "gemma4", "hybriddna", "whitespace")
# Ids that llama.cpp assumes if the file names none: BOS, EOS, UNK, SEP.
_DEFAULTS: Final = {
    "llama": (1, 2, 0, None),
    "bert": (101, None, 100, 102),
    "gpt2": (11, 11, None, None),
    "hybriddna": (11, 11, None, None),
    "whitespace": (11, 11, None, None),
    "t5": (None, 1, 2, None),
    "plamo2": (1, 2, 0, None),
}
_ID_KEYS: Final = ("bos_token_id", "eos_token_id", "unknown_token_id", "seperator_token_id")
# Pre-tokenizers of byte-level BPE that put a BOS before a text, unless the file says otherwise.
_BPE_WITH_BOS: Final = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken chameleon".split()
)
_BPE_WITHOUT_BOS: Final = frozenset(("chatglm-bpe", "glm4", "glm5"))  # no default BOS
_NO_ID: Final = 0xFFFF_FFFF
# llama.cpp walks the tries of unigram and RWKV vocabularies recursively, one call per byte. The pieces of real
# vocabularies have a few hundred bytes at most.
_MAX_PIECE_BYTES: Final = 8192
# The time to build PLaMo-2's table grows with the sum of the cubes of the pieces' lengths in bytes. In a real
# vocabulary of 100,000 pieces, this sum is 5e7.
_MAX_CUBES: Final = 2e10


def check_vocabulary(head: Head) -> tuple[str | None, int]:
    """Return the tokenizer's name (None without a vocabulary) and the number of its pieces. Raises Damage."""
    entries = head.entries
    tokenizer = text(entries, "tokenizer.ggml.model")
    if tokenizer is None:
        return None, 0
    if tokenizer in ("none", "no_vocab"):
        raise Damage(
            f"it has no vocabulary (tokenizer.ggml.model is {tokenizer!r}); such models are not supported"
        )
    tokens = _array(entries, "tokens", (STRING,))
    if tokens is None:
        raise Damage("it has no vocabulary: tokenizer.ggml.tokens is missing")
    if tokens.count == 0:
        raise Damage("its vocabulary is empty: tokenizer.ggml.tokens has no pieces")
    pieces = head.strings(tokens)
    _check_pieces(pieces)
    scores = _array(entries, "scores", (F32, I32))
    kinds = _array(entries, "token_type", (I32,))
    for name, array in (("scores", scores), ("token_type", kinds)):
        if array is not None and array.count < tokens.count:
            raise Damage(f"tokenizer.ggml.{name} has {array.count} elements for {tokens.count} pieces")
    if scores is not None and scores.kind == F32 and np.isnan(scores.data).any():
        raise Damage(f"the score of piece {int(np.isnan(scores.data).argmax())} is not a number")
    if kinds is not None:
        _check_kinds(tokenizer, pieces, kinds)
    _check_ids(entries, tokenizer, tokens.count)
    if tokenizer == "llama":
        _check_bytes(pieces)
    elif tokenizer in _BPE:
        _check_bpe(head, tokenizer)
    elif tokenizer == "rwkv":
        _check_rwkv(pieces)
    elif tokenizer == "plamo2" and sum(len(piece) ** 3 for piece in pieces) > _MAX_CUBES:
        raise Damage("the pieces of its PLaMo-2 vocabulary are too long for llama.cpp to index")
    return tokenizer, tokens.count


def _array(entries: dict[str, Entry], name: str, kinds: tuple[int, ...]) -> Array | None:
    entry = entries.get(_PREFIX + name)
    if entry is None:
        return None
    if not isinstance(entry.value, Array) or entry.value.kind not in kinds:
        wanted = " or ".join({STRING: "strings", F32: "f32", I32: "i32"}[kind] for kind in kinds)
        raise Damage(f"{_PREFIX}{name} must be an array of {wanted}")
    return entry.value


def _check_pieces(pieces: list[bytes]) -> None:
    longest = max(map(len, pieces))
    if longest > _MAX_PIECE_BYTES:
        raise Damage(f"a piece of the vocabulary has {longest} bytes; the limit is {_MAX_PIECE_BYTES}")
    distinct = set(pieces)
    # llama.cpp names empty pieces itself, so any number of them is fine unless another piece has such a name.
    n_empty = pieces.count(b"") if b"" in distinct else 0
    if len(distinct) == len(pieces) - max(n_empty - 1, 0):
        if n_empty:
            names = {b"[EMPTY_%d]" % i for i, piece in enumerate(pieces) if not piece}
            if taken := names & distinct:
                raise Damage(
                    f"the vocabulary has the piece {taken.pop()!r}, and an empty piece that llama.cpp gives this name"
                )
        return
    first: dict[bytes, int] = {}
    for i, piece in enumerate(pieces):
        if piece and first.setdefault(piece, i) != i:
            raise Damage(f"the pieces {first[piece]} and {i} of the vocabulary are the same: {piece!r}")


def _check_kinds(tokenizer: str, pieces: list[bytes], kinds: Array) -> None:
    values = kinds.data[: len(pieces)].astype(np.int64)
    wrong = np.flatnonzero((values < 0) | (values > _BYTE))
    if len(wrong):
        i = int(wrong[0])
        raise Damage(f"piece {i} has the token type {values[i]}; llama.cpp knows 0 to {_BYTE}")
    if tokenizer in ("test", "rwkv"):
        return
    for i in np.flatnonzero(values == _BYTE).tolist():
        if tokenizer == "bert":
            raise Damage(f"piece {i} is a byte, which a WordPiece vocabulary cannot have")
        if not _BYTE_PIECE.fullmatch(pieces[i]):
            raise Damage(f"piece {i} is a byte but is written {pieces[i]!r}; bytes are written like '<0x0A>'")


def _check_ids(entries: dict[str, Entry], tokenizer: str, n_pieces: int) -> None:
    """Check that the vocabulary has all special tokens that tokenizing adds or falls back to.

    llama.cpp asserts this while tokenizing.
    """
    pre = text(entries, "tokenizer.ggml.pre") or ""
    defaults: tuple[int | None, ...] = _DEFAULTS.get(tokenizer, (None,) * 4)
    if tokenizer in _BPE and pre in _BPE_WITHOUT_BOS:
        defaults = (None, *defaults[1:])
    ids: list[int | None] = []
    for name, default in zip(_ID_KEYS, defaults, strict=True):
        entry = entries.get(_PREFIX + name)
        value = default if default is not None and default < n_pieces else None
        if entry is not None:
            if entry.kind != U32 or not isinstance(entry.value, int):
                raise Damage(f"{_PREFIX}{name} must be a u32")
            if entry.value < n_pieces:
                value = entry.value
            elif entry.value != _NO_ID and name in ("bos_token_id", "eos_token_id"):
                raise Damage(f"{_PREFIX}{name} is {entry.value}; the vocabulary has {n_pieces} pieces")
        ids.append(value)
    bos, eos, unk, sep = ids
    adds_bos = _flag(
        entries, "add_bos_token", tokenizer == "llama" or (tokenizer in _BPE and pre in _BPE_WITH_BOS)
    )
    adds_eos = _flag(entries, "add_eos_token", tokenizer == "t5")
    if tokenizer == "gemma4" or pre in ("gemma4", "granite-embed-multi-311m") or tokenizer == "bert":
        adds_bos = True  # regardless of the file's flag
    needs = {
        "BOS": (adds_bos and tokenizer in ("llama", "t5", "bert", *_BPE), bos),
        "EOS": (adds_eos and tokenizer in ("llama", "t5", *_BPE), eos),
        "SEP": (tokenizer == "bert", sep),
        "unknown": (tokenizer in ("bert", "t5"), unk),
    }
    for what, (needed, value) in needs.items():
        if needed and value is None:
            raise Damage(f"its {tokenizer} tokenizer needs the {what} token, which the vocabulary lacks")


def _flag(entries: dict[str, Entry], name: str, default: bool) -> bool:
    entry = entries.get(_PREFIX + name)
    return default if entry is None else bool(entry.value)


def _check_bytes(pieces: list[bytes]) -> None:
    """Check that a vocabulary with byte pieces has all 256; llama.cpp throws for text that they cannot spell."""
    known = set(pieces)
    missing = [i for i in range(256) if b"<0x%02X>" % i not in known]
    if 0 < len(missing) < 256:
        raise Damage(
            f"{len(missing)} of the 256 byte pieces are missing from the vocabulary, such as '<0x{missing[0]:02X}>'"
        )


def _check_bpe(head: Head, tokenizer: str) -> None:
    pre = text(head.entries, "tokenizer.ggml.pre") or ""
    if pre == "whitespace" and tokenizer != "whitespace":
        raise Damage(
            f"tokenizer.ggml.pre is 'whitespace', which does not go with the tokenizer {tokenizer!r}"
        )
    merges = _array(head.entries, "merges", (STRING,))
    if merges is None or merges.count == 0:
        return
    first = int(merges.starts[0])
    region = np.frombuffer(head.buffer, np.uint8, int(merges.starts[-1] + merges.lengths[-1]) - first, first)
    # A merge is two pieces with a space between them: the first space after the start must lie before the end.
    spaces = np.append(np.flatnonzero(region == ord(" ")), len(region) + 1)
    starts = merges.starts - first
    first_spaces = spaces[np.searchsorted(spaces, starts + 1)]
    wrong = np.flatnonzero(first_spaces >= starts + merges.lengths)
    if len(wrong):
        i = int(wrong[0])
        start = int(merges.starts[i])
        merge = head.buffer[start : start + min(int(merges.lengths[i]), 40)]
        raise Damage(f"merge {i} of the vocabulary, {merge!r}, is not two pieces with a space between them")


def _check_rwkv(pieces: list[bytes]) -> None:
    """Check that every byte that begins a piece is also a piece.

    Otherwise llama.cpp would start again at the text's first byte, forever.
    """
    decoded = [_unescape(piece) for piece in pieces]
    single = {piece for piece in decoded if len(piece) == 1}
    for i, piece in enumerate(decoded):
        if piece and piece[:1] not in single:
            raise Damage(f"the vocabulary has the piece {pieces[i]!r} ({i}), but not its first byte alone")


def _unescape(piece: bytes) -> bytes:
    simple = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}

    def value(match: re.Match[bytes]) -> bytes:
        if match[1] is not None:
            return bytes([int(match[1], 16)])
        return simple.get(match[2], match[2])

    return re.sub(rb"\\(?:x([0-9a-fA-F]{2})|(.))", value, piece, flags=re.DOTALL) if b"\\" in piece else piece
